"""One catalogue: both languages say the same, and the environment chooses."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aura.config import SETTINGS
from aura.errors import ConfigError
from aura.texts import console
from spanish import english_in

VARIABLES = ("AURA_LANG", "LC_ALL", "LC_MESSAGES", "LANG")


def set_locale(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_both_languages_have_the_same_keys_with_the_same_values() -> None:
    spanish, english = console.SENTENCES["es"], console.SENTENCES["en"]
    assert list(spanish) == list(english)
    for key, sentence in spanish.items():
        fields, others = (
            sorted(str(field) for _, *field, _ in string.Formatter().parse(text) if field[0])
            for text in (sentence, english[key])
        )
        assert fields == others, key


SPEAKERS = {"text", "in_words", "ConfigError", "DataError", "CheckFailed"}  # their first argument is a key
# What is given to these is shown as it is.
TELLERS = set("say warn put print error Later OSError ConnectionError ArgumentTypeError".split())
# What is English everywhere: --help.
ENGLISH_EVERYWHERE = ("commands/cli.py:_print_help",)


PACKAGE = Path(console.__file__).parents[1]
CODE = {
    path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")
}


def calls_of(names: set[str]) -> Iterator[tuple[str, ast.Call]]:
    """Every call in the package of a function with such a name, and where it is."""
    for file, tree in CODE.items():
        inside = {
            id(node): function.name
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in names and f"{file}:{inside.get(id(node))}" not in ENGLISH_EVERYWHERE:
                    yield f"{file}:{node.lineno}", node


def test_every_sentence_that_the_code_asks_for_is_there_with_its_values() -> None:
    """Also of errors: who meets one shall not meet a KeyError in its place."""
    asked = set()
    for place, call in calls_of(SPEAKERS):
        first = call.args[0]
        if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
            continue  # chosen before, or put together
        assert first.value in console.SENTENCES["es"], f"{place}: {first.value}"
        asked.add(first.value)
        given = {word.arg for word in call.keywords}
        parsed = string.Formatter().parse(console.SENTENCES["en"][first.value])
        wanted = {field for _, field, _, _ in parsed if field}
        # None: **values
        assert wanted == given or (None in given and given - {None} <= wanted), f"{place}: {wanted} {given}"
    assert len(asked) > 220


def test_every_setting_is_explained_in_both_languages() -> None:
    explained = {key.removeprefix("help_") for key in console.SENTENCES["es"] if key.startswith("help_")}
    assert explained == set(SETTINGS)


def constants(*trees: ast.Module) -> set[object]:
    return {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_no_sentence_is_left_that_nobody_says() -> None:
    """Those of argparse have its own English words as their keys."""
    of_argparse, words = constants(ast.parse(inspect.getsource(argparse))), constants(*CODE.values())
    built = ("memory_", "plan_", "help_", "gpu_", "remedy_")  # keys that are put together
    for key, sentence in console.SENTENCES["en"].items():
        assert key in words or key.startswith(built) or (key == sentence and key in of_argparse), key


def test_no_spanish_sentence_is_english() -> None:
    for key, sentence in console.SENTENCES["es"].items():
        assert not english_in(re.sub(r"\{[^}]*\}|--[\w-]+", "", sentence)), key


def test_nobody_says_a_sentence_of_his_own() -> None:
    """In one language only, that is."""
    for place, call in calls_of(SPEAKERS | TELLERS):
        for part in ast.walk(call):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                assert not re.search(r"[a-z]{3,} [a-z]{2,} [a-z]{2,}", part.value), f"{place}: {part.value}"


@pytest.mark.parametrize(
    ("variables", "language"),
    [
        ({}, "es"),
        ({"LANG": "C.UTF-8"}, "es"),
        ({"LANG": "POSIX"}, "es"),
        ({"LANG": "es_ES.UTF-8"}, "es"),
        ({"LANG": "fr_FR.UTF-8"}, "es"),
        ({"LANG": "en_GB.UTF-8"}, "en"),
        ({"LANG": "es_ES.UTF-8", "LC_MESSAGES": "en_US"}, "en"),
        ({"LC_MESSAGES": "en_US", "LC_ALL": "es_AR"}, "es"),
        ({"LC_ALL": "", "LANG": "en_US"}, "en"),
        ({"LC_ALL": "en_US", "AURA_LANG": "es"}, "es"),
        ({"AURA_LANG": "en"}, "en"),
    ],
)
def test_the_locale_chooses(
    variables: dict[str, str], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_locale(monkeypatch, **variables)
    assert console.language() == language


def test_an_unknown_language_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_locale(monkeypatch, AURA_LANG="de")
    with pytest.raises(ConfigError, match=r"AURA_LANG='de' is unknown\. There are: es, en\."):
        console.text("alone")


def test_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    set_locale(monkeypatch)
    assert console.live(120, 6100, 12345.6, 0.4123, 3 * 3600 + 5 * 60) == (
        "Step 120/6100 | 12,346 tokens/s | MFU: 41.2% | Falta: 3 h 05 min"
    )
    assert console.live(1, 20, 10, None, None) == "Step 1/20 | 10 tokens/s | MFU: ? | Falta: ?"
    spoken = {59.7: "1 min 00 s", 3599.6: "1 h 00 min", 72 * 3600: "3 d 0 h"}
    assert {seconds: console.duration(seconds) for seconds in spoken} == spoken


@pytest.mark.parametrize("rank", [0, 1])
def test_the_live_line_is_replaced_on_a_terminal_of_rank_0(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        speaker = console.Console(rank, 2, "node0", "cpu")
        for text in ("Step 1/9", "Step 2/9 comes too soon"):
            speaker.show(text)
        speaker.say("Loss: 3")
    seen = ""
    while not seen.endswith("\n"):  # a terminal hands over what it has so far
        seen += os.read(ours, 1000).decode()
    os.close(ours)
    line = f"[Rank {rank}/2 | Node node0 | Device cpu] Loss: 3\r\n"
    assert seen == ("\r\033[KStep 1/9\r\033[K" + line if rank == 0 else line)


def test_there_is_no_live_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    speaker = console.Console(0, 1, "node0", "cpu")
    speaker.show("Step 1/9")
    speaker.say("Loss: 3")
    assert capsys.readouterr().out == "[Rank 0/1 | Node node0 | Device cpu] Loss: 3\n"
