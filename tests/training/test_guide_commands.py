"""docs/guide-commands.md and docs/rented.md: every command line of ours there is one that its parser takes."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any, NoReturn

import aura
import pytest
import yaml
from aura.commands import cli, notify, prepare
from aura.corpus import sources
from aura.corpus.work import Settings
from aura.errors import EXIT_USAGE, ConfigError, Parser
from aura.run import attempt
from conftest import Aura
from torch.distributed import run as torchrun

ROOT = Path(aura.__file__).parents[2]
PAGE = ROOT / "docs" / "guide-commands.md"
RENTED = ROOT / "docs" / "rented.md"
# What `…` stands for.
NEEDED = {"train": "--preset gpt2-nano --corpus corpus"}
CODE = re.compile(r"`([^`]+)`")
VARIABLE = re.compile(r"[A-Z_]+=\S+")


class Accepted(Exception):
    """The command line has been read and checked; what it asks for is left out."""


def table(after: str = "") -> list[list[str]]:
    """The cells of every row of every table (after these words): the guide, ours, its test."""
    text = PAGE.read_text(encoding="utf-8").partition(after)[2] if after else PAGE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    lines = [line for line in lines if not line.startswith("| --- ")]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]


def rows() -> list[str]:
    """What is ours in every table."""
    return [cells[1] for cells in table()]


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
            found += code.split(" -m aura ")[1:]
    return list(dict.fromkeys(found))


def torchrun_lines() -> list[str]:
    """What follows `torchrun` in every command of ours, with numbers in place of variables."""
    codes = [code for row in rows() for code in CODE.findall(row)]
    found = [code.partition("torchrun ")[2] for code in codes if "torchrun -" in code and "…" not in code]
    return [re.sub(r"\$\w+", "1", line) for line in found]


def rented_lines() -> list[str]:
    """What is typed on the page about a rented machine: blocks, and code in the text; without comments."""
    text = RENTED.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += CODE.findall(re.sub(r"(?s)```.*?```", "", text))
    return [re.sub(r"\s{2,}#.*", "", line) for line in lines]


def rented_commands() -> list[str]:
    """What follows `aura`, also where another user or Ansible types it."""
    found = [re.search(r"/bin/aura (\w[^']*)", line) for line in rented_lines()]
    return [command[1] for command in found if command]


def launches() -> list[str]:
    lines = dict.fromkeys(rented_lines() + [code for row in rows() for code in CODE.findall(row)])
    return [line for line in lines if "launch.yml -e preset=" in line or "prepare.yml -e" in line]


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

    def check(*given: object) -> NoReturn:
        (settings,) = [one for one in given if isinstance(one, Settings)]
        settings.check()
        raise Accepted

    monkeypatch.setattr(Parser, "parse_args", accept)
    monkeypatch.setattr(prepare, "build", check)
    monkeypatch.setattr(cli, "corpus_here", lambda place: Path(str(place)))
    monkeypatch.setattr(sources, "find_files", lambda *_: [])
    monkeypatch.setattr(attempt, "run", run)
    monkeypatch.setattr(notify, "beside", lambda *_: None)
    monkeypatch.setattr(cli, "_of_this_run", lambda *_: None)


@pytest.mark.parametrize("line", command_lines() + rented_commands())
def test_the_parsers_take_every_line(line: str, nothing_runs: None) -> None:
    command = line.split()[0]
    words = shlex.split(line.replace("…", NEEDED.get(command, "")))
    with pytest.raises(Accepted):
        cli.main(words)


@pytest.mark.parametrize("line", torchrun_lines())
def test_torchrun_takes_every_line(line: str) -> None:
    given = torchrun.parse_args(shlex.split(line))
    assert given.training_script == "aura" or given.training_script.endswith(".py")


def test_the_page_names_every_command_that_the_guides_have() -> None:
    lines = command_lines()
    needed = "prepare train monitor check-allreduce export fingerprint version"
    assert {line.split()[0] for line in lines} >= set(needed.split())
    assert len(lines) > 50


def test_every_playbook_and_inventory_exists() -> None:
    named = {name for row in rows() for name in re.findall(r"ansible-playbook (\S+\.yml)", row)}
    assert len(named) >= 4
    typed = [line for line in rented_lines() if line.startswith(("ansible ", "ansible-playbook "))]
    assert len(typed) >= 8
    assert all("-i inventory/rented" in line for line in typed), "another cluster would be meant"
    words = {word for line in typed for word in line.split()}
    named |= {word for word in words if word.endswith(".yml") or word.startswith("inventory/")}
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("line", launches())
def test_what_a_playbook_is_told_are_settings_of_the_preset(line: str, aura_says: Aura) -> None:
    told = dict(word.split("=", 1) for word in re.findall(r"-e (\S+=\S+)", line))
    judged = runpy.run_path(str(ROOT / "plugins/filter/run_request.py"))
    plays = yaml.safe_load((ROOT / "playbooks/launch.yml").read_text(encoding="utf-8"))
    (more,) = [play["vars"]["request_more"] for play in plays if "request_more" in play.get("vars", {})]
    settings = [f"{name}={value}" for name, value in judged["preset_settings"](told, *more).items()]
    words = ["--set", *settings] if settings else []
    aura_says("config", "--preset", told.get("preset", "gpt2-medium"), *words)


def missing(name: str) -> str:
    """Why there is no such test: `test_x.py`, `test_x.py::test_y`, `roles/NAME`; empty when there is."""
    file, _, function = name.partition("::")
    if file.startswith("roles/"):
        return "" if (ROOT / file / "molecule/default/verify.yml").is_file() else f"{file} has no scenario"
    found = list((ROOT / "tests").glob(f"*/{file}"))
    if len(found) != 1:
        return f"tests/ has {len(found)} files {file}"
    there = not function or f"def {function}(" in found[0].read_text(encoding="utf-8")
    return "" if there else f"{file} has no {function}"


@pytest.mark.parametrize("cells", table(), ids=lambda cells: cells[0])
def test_every_row_names_a_test_that_exists_or_says_why_there_is_none(cells: list[str]) -> None:
    assert len(cells) == 3, "a row has three cells: the guide, ours, its test"
    if cells[2] == "test":  # the head of a table
        return
    named = CODE.findall(cells[2])
    assert [problem for problem in map(missing, named) if problem] == []
    assert named or re.match(r"none: \w+", cells[2]), "name a test, or say why none is possible: none: …"


def test_every_flag_of_the_last_table_is_in_its_own_row() -> None:
    rows_of_flags = [cells for cells in table("## Every flag") if cells[0].startswith("`--")]
    assert len(rows_of_flags) > 20
    for guide, here, _ in rows_of_flags:
        assert all(flag in here or flag == "--prepare" for flag in CODE.findall(guide)), guide


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


def test_what_belongs_to_the_preparation_is_said_to(aura_says: Aura) -> None:
    words = "--dataset_path corpus --tokenizer_name_or_path t --validation_split=0.01 --epochs 3".split()
    assert aura_says("train", *words, code=EXIT_USAGE) == (
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
