"""docs/guide-commands.md: every command line of ours in it is one that its parser takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NoReturn

import aura
import pytest
from aura.commands import cli, notify, prepare
from aura.corpus import sources
from aura.corpus.work import Settings
from aura.errors import EXIT_USAGE, ConfigError, Parser
from aura.run import attempt

ROOT = Path(aura.__file__).parents[2]
PAGE = ROOT / "docs" / "guide-commands.md"
# What `…` stands for.
NEEDED = {"train": "--preset gpt2-nano --corpus corpus"}
CODE = re.compile(r"`([^`]+)`")
VARIABLE = re.compile(r"[A-Z_]+=\S+")


class Accepted(Exception):
    """The command line has been read and checked; what it asks for is left out."""


def rows() -> list[str]:
    """The last column of every table."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [line.strip("|").rsplit(" | ", 1)[1] for line in lines]


def command_lines() -> list[str]:
    """What follows `aura` in every command of ours, also behind torchrun or variables."""
    found = []
    for code in (code for row in rows() for code in CODE.findall(row)):
        words = code.split()
        while words and VARIABLE.fullmatch(words[0]):
            words.pop(0)
        if words[:1] == ["aura"]:
            found.append(" ".join(words[1:]))
        elif words and words[0] in ("torchrun", "python"):
            found.append(code.split(" -m aura ")[1])
    return list(dict.fromkeys(found))


def completed(line: str) -> list[str]:
    command = line.split()[0]
    return shlex.split(line.replace("…", NEEDED.get(command, "")))


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parser raises Accepted when it is content; aura train and aura prepare go on and check what was said."""
    parse_args = Parser.parse_args

    def accept(self: Parser, args: list[str], namespace: None = None) -> Any:
        arguments = parse_args(self, args)
        if self.prog in ("aura train", "aura prepare"):
            return arguments
        raise Accepted

    def run(*_: object, **__: object) -> NoReturn:
        raise Accepted

    def build(source: object, output: object, settings: Settings, listener: object) -> NoReturn:
        settings.check()
        raise Accepted

    def into_a_bucket(source: object, settings: Settings, address: object) -> NoReturn:
        settings.check()
        raise Accepted

    def no_files(inputs: object, say: object) -> list[Path]:
        return []

    monkeypatch.setattr(Parser, "parse_args", accept)
    monkeypatch.setattr(prepare, "build", build)
    monkeypatch.setattr(prepare, "_into_a_bucket", into_a_bucket)
    monkeypatch.setattr(cli, "corpus_here", lambda place: place)
    monkeypatch.setattr(sources, "find_files", no_files)
    monkeypatch.setattr(attempt, "run", run)
    monkeypatch.setattr(notify, "beside", lambda *_: None)
    monkeypatch.setattr(cli, "_check_corpus", lambda *_: None)
    monkeypatch.setattr(cli, "_of_this_run", lambda *_: None)


@pytest.mark.parametrize("line", command_lines())
def test_the_parsers_take_every_line(line: str, nothing_runs: None) -> None:
    words = completed(line)
    lines = [words]
    if words[0] == "launch-local" and "--" in words:
        lines.append(["train", *words[words.index("--") + 1 :]])
    for each in lines:
        with pytest.raises(Accepted):
            cli.main(each)


def test_the_page_names_every_command_that_the_guides_have() -> None:
    assert {line.split()[0] for line in command_lines()} >= {
        *(
            "prepare",
            "train",
            "monitor",
            "launch-local",
            "check-allreduce",
            "export",
            "fingerprint",
            "version",
        )
    }
    assert len(command_lines()) > 50


def test_every_playbook_exists() -> None:
    named = {name for row in rows() for name in re.findall(r"ansible-playbook (\S+\.yml)", row)}
    assert len(named) >= 4
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_flag_of_the_last_table_is_in_its_own_row() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## Every flag")[1]
    for row in re.findall(r"^\| (`--.*) \| (.*) \|$", table, re.MULTILINE):
        flags, here = CODE.findall(row[0]), row[1]
        assert all(flag in here or flag == "--prepare" for flag in flags), row


def test_text_is_not_taken_for_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("Hola")
    with pytest.raises(
        ConfigError, match=r"corpus\.txt is a file, not a corpus\. Prepare it once: aura prepare"
    ) as refused:
        cli.train(["--preset", "gpt2-nano", "--dataset_path", str(tmp_path / "corpus.txt")])
    advice = str(refused.value).split("aura prepare ")[1].split(",")[0]
    (tmp_path / "corpus.txt").write_text("Hola.\n\nAdiós.\n" * 500, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert prepare.main(advice.split()) == 0


def test_what_belongs_to_the_preparation_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--dataset_path corpus --tokenizer_name_or_path t --validation_split=0.01 --epochs 3".split()
    with pytest.raises(SystemExit) as ended:
        cli.train(words)
    assert ended.value.code == EXIT_USAGE
    assert capsys.readouterr().err == (
        "aura train: --tokenizer-name-or-path, --validation-split: for `aura prepare`, not here. "
        "See aura prepare --help.\n"
    )


def test_resume_from_is_a_checkpoint_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run(*_: object, **keywords: object) -> int:
        given.update(keywords)
        return 0

    monkeypatch.setattr(attempt, "run", run)
    there = tmp_path / "run" / "checkpoints" / "checkpoint-step-5"
    there.mkdir(parents=True)
    aside = there.with_name("superseded-checkpoint-step-6-1")
    aside.mkdir()
    words = ["--preset", "gpt2-nano", "--corpus", str(tmp_path), "--output-dir", str(tmp_path / "run")]
    assert cli.train([*words, "--resume-from", str(there)]) == 0
    assert given["resume_from"] == there
    for path, message in (
        (there.with_name("checkpoint-step-6"), r"is no checkpoint\. There are: checkpoint-step-5\."),
        (aside, r"is no checkpoint\. There are: checkpoint-step-5\."),
        (tmp_path / "run" / "checkpoint-step-5.pt", r"is not in .*checkpoints"),
        (tmp_path / "other" / "checkpoints" / "checkpoint-step-5", r"is not in .*checkpoints"),
    ):
        with pytest.raises(ConfigError, match=message):
            cli.train([*words, "--resume-from", str(path)])
