"""What a rank prints: one catalogue of the lines that a person reads (es.toml, en.toml).

The Spanish lines that the guides show have exactly the guides' form. Errors (aura/errors.py) are in the catalogue too.
Spanish is the default; a locale that says English, or AURA_LANG=en, changes it.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources

from aura.errors import ConfigError, speak_with

LANGUAGES = ("es", "en")
CLEAR = "\r\033[K"  # back to the beginning of the terminal's line, and nothing is left of it
LIVE_PAUSE = 0.5


def _read(language: str) -> dict[str, str]:
    file = resources.files("aura.texts").joinpath(f"{language}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


SENTENCES = {language: _read(language) for language in LANGUAGES}


def language() -> str:
    """es or en: what AURA_LANG says, else en when the locale is English, else es. Raises ConfigError."""
    forced = os.environ.get("AURA_LANG")
    if forced:
        if forced not in LANGUAGES:
            raise ConfigError("unknown_language", value=forced, languages=", ".join(LANGUAGES))
        return forced
    # The first of these that is set decides (POSIX, "Internationalization Variables").
    locale = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "en" if locale.lower().startswith("en") else "es"


def text(key: str, /, **values: object) -> str:
    return SENTENCES[language()][key].format(**values)


def _language_of_errors() -> str:
    """A language that does not exist is an error itself, and has to be said in one that does."""
    try:
        return language()
    except ConfigError:
        return "en"


def _error_text(key: str, /, **values: object) -> str:
    return SENTENCES[_language_of_errors()][key].format(**values)


def _error_of_argparse(sentence: str) -> str:
    """Its errors are under their own English sentences; what is not there (--help) stays English."""
    return SENTENCES[_language_of_errors()].get(sentence, sentence)


speak_with(_error_text)
# What argparse asks gettext by this name, which would want a compiled catalogue of its own kind.
argparse._ = _error_of_argparse  # type: ignore[attr-defined]


def put(line: str, end: str = "\n") -> None:
    """Print at once (journald shows it without delay), for as long as somebody reads it: `| tee` may be gone. In one
    write, so that lines of several ranks in one terminal do not mix."""
    try:
        print(line + end, end="", flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class Console:
    """Prints lines that are headed by who speaks."""

    def __init__(self, rank: int, world_size: int, node: str, device: str) -> None:
        self.head = f"[Rank {rank}/{world_size} | Node {node} | Device {device}]"
        self.leads = rank == 0
        self.is_live = self.leads and sys.stdout.isatty()
        self.shown = -math.inf  # when the live line was written

    def line(self, text: str) -> str:
        return f"{CLEAR if self.is_live else ''}{self.head} {text}"

    def say(self, text: str) -> None:
        put(self.line(text))

    def say_once(self, text: str) -> None:
        """One rank speaks for all."""
        if self.leads:
            self.say(text)

    def show(self, text: str) -> None:
        """A line that the next one replaces, on a terminal and no more than every LIVE_PAUSE seconds."""
        if self.is_live and time.monotonic() - self.shown >= LIVE_PAUSE:
            width = shutil.get_terminal_size().columns
            put(f"{CLEAR}{text[: width - 1]}", end="")
            self.shown = time.monotonic()


def who_goes_on(ranks: Sequence[int]) -> str:
    """When some of these are lost, or cut off from each other (register.enough)."""
    half, odd = divmod(len(ranks), 2)
    if len(ranks) == 2:
        return text("goes_on_of_two", first=ranks[0])
    or_half = "" if odd else text("or_half", half=half, first=ranks[0])
    return text("goes_on_of_some", ranks=len(ranks), needed=half + 1, or_half=or_half)


def bits_per_byte(whole: float, parts: Mapping[str, float]) -> str:
    """parts: of a mixture, by name."""
    shown = ", ".join(f"{part} {bits:.3f}" for part, bits in parts.items())
    return text("bits_per_byte", bits=whole) + (f" ({shown})" if shown else "")


def precision(name: str) -> str:
    def on(state: bool) -> str:
        return "ON" if state else "OFF"

    return text("precision", name=name, autocast=on(name != "fp32"), scaler=on(name == "fp16"))


def live(
    step: int, steps: int, tokens_per_second: float, mfu: float | None, eta_seconds: float | None
) -> str:
    """`mfu` from 0 to 1; None where the peak of the device is not known, or no time has been measured yet."""
    return text(
        "live",
        step=step,
        steps=steps,
        rate=tokens_per_second,
        mfu=text("unknown") if mfu is None else f"{mfu:.1%}",
        eta=text("unknown") if eta_seconds is None else duration(eta_seconds),
    )


def completed(ranks_compared: bool) -> str:
    return text("completed") + (f" {text('synchronised')}" if ranks_compared else "")


def duration(seconds: float) -> str:
    """2 d 3 h, 3 h 05 min or 4 min 07 s."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return text("minutes", minutes=minutes, seconds=rest)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return text("hours", hours=hours, minutes=minutes)
    return text("days", days=hours // 24, hours=hours % 24)
