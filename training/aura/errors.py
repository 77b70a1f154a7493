"""How a command ends: exit codes, and errors whose text is one sentence for a person, in the person's language.

No torch and no other third-party package is imported here, nor in cli, config and corpus: `aura config` has to
answer at once, also on a controller that has no torch.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

EXIT_OK = 0
EXIT_USAGE = 64  # wrong command line or configuration: starting again does not help
EXIT_DATA = 65  # what was read or computed cannot be trusted: starting again does not help
EXIT_GPU = 69  # a GPU of this node is unhealthy: starting again does not help, without this node it may
FOR_GOOD = (EXIT_USAGE, EXIT_DATA, EXIT_GPU)  # nobody starts it again, and all ranks end with it
EXIT_TEMPORARY = 75  # start me again: the process group broke, or this rank was turned away
# Why a file cannot be written, and what a person has to do about it (aura/texts): until then it fails as it does now,
# but for EIO, which one bad sector gives once. What is in no such table may pass by itself: a disk that is full gets
# room, a file server comes back.
REMEDIES = {
    errno.EDQUOT: "remedy_quota",
    errno.EFBIG: "remedy_file_size",
    errno.EROFS: "remedy_read_only",
    errno.EACCES: "remedy_permission",
    errno.EPERM: "remedy_permission",
    errno.EIO: "remedy_disk",
}
# Nothing but another name, or other permissions, helps.
OF_A_NAME = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
)


def _unworded(key: str, /, **values: object) -> str:
    return f"{key} {values}"


_words: Callable[..., str] = _unworded


def speak_with(words: Callable[..., str]) -> None:
    """Leaves know no texts: aura/texts/console.py says, when it is imported, how a key and values become a sentence."""
    global _words
    _words = words


def in_words(key: str, /, **values: object) -> str:
    """The sentence (or the part of one) that aura/texts has under `key`."""
    return _words(key, **values)


class AuraError(Exception):
    """A sentence of aura/texts, by its key, with the values that are put into it: what is wrong and what to do.
    `exit_code` says whether starting again may help."""

    exit_code = 1

    def __init__(self, key: str, /, **values: object) -> None:
        super().__init__(key)
        self.key, self.values = key, values

    def __str__(self) -> str:
        return in_words(self.key, **self.values)


class ConfigError(AuraError):
    exit_code = EXIT_USAGE


class DataError(AuraError):
    exit_code = EXIT_DATA


class NoRoom(AuraError):
    """What has to be kept can be kept nowhere; where there is room again, starting again helps."""

    exit_code = EXIT_TEMPORARY


class NoCheckpoint(AuraError):
    """None of those that are there can be read; a disk may have been away for a moment, so starting again may help."""

    exit_code = EXIT_TEMPORARY


class GpuFault(AuraError):
    exit_code = EXIT_GPU


def refusal_of(error: AuraError | OSError) -> AuraError:
    """Of a file that the system does not give, too. Raises the error where no file is named: that is not a person's."""
    if isinstance(error, AuraError):
        return error
    if not error.filename:
        raise error
    where = {"path": error.filename, "reason": error.strerror}
    return (
        ConfigError("file_refused", **where) if error.errno in OF_A_NAME else AuraError("file_fails", **where)
    )


class Parser(argparse.ArgumentParser):
    """argparse that accepts --batch_size for --batch-size, and answers a mistake with one sentence and 64."""

    def __init__(self, elsewhere: dict[str, tuple[str, ...]] | None = None, **options: object) -> None:
        """`elsewhere`: flags that one might look for here, and the command that has them."""
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]
        self.elsewhere = elsewhere or {}

    def parse_args(self, args: list[str]) -> argparse.Namespace:  # type: ignore[override]
        words = [_with_hyphens(word) for word in args]
        for command, flags in self.elsewhere.items():
            if named := [flag for flag in flags if any(word.split("=")[0] == flag for word in words)]:
                self.error(in_words("flag_elsewhere", flags=", ".join(named), command=command))
        parsed, unknown = self.parse_known_args(words)
        if unknown:
            flag = unknown[0].split("=")[0]
            valid = [flag for action in self._actions for flag in action.option_strings if flag != "-h"]
            hint = did_you_mean(flag, valid)
            self.error(in_words("unknown_argument", flag=flag, hint=hint, program=self.prog))
        return parsed

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def _with_hyphens(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def reason_of(error: Exception) -> str:
    """In a few words, for a sentence that names the file itself."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def waiting_mends(error: Exception | None) -> bool:
    """May a file that could not be written be written later, without anybody who has seen to it?"""
    return not (isinstance(error, OSError) and error.errno in REMEDIES.keys() - {errno.EIO})


def why_not_written(error: Exception) -> str:
    """`reason_of`, and behind it what there is to do."""
    reason = reason_of(error)
    if isinstance(error, OSError) and error.errno in REMEDIES:
        return f"{reason} ({in_words(REMEDIES[error.errno])})"
    return reason


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """' Did you mean 'x'?' for the nearest valid word, or '' when none is near."""
    near = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f" {in_words('did_you_mean', word=near[0])}" if near else ""
