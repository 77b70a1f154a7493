"""A preparation that is killed goes on, and the result is that of one that was not; also with several workers."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aura.commands import bars
from aura.commands.bars import Bars
from aura.commands.prepare import main
from aura.corpus import shards, work
from aura.corpus.corpus import verify
from aura.corpus.prepare import build
from aura.corpus.shards import Workplace
from aura.corpus.sources import HubDataset, LocalFiles
from aura.corpus.work import Settings
from aura.errors import ConfigError, DataError
from spanish import english_in


@pytest.fixture
def lines(text: Path, tmp_path: Path) -> Path:
    """600 documents, a broken line and empty ones among them."""
    words = text.read_text(encoding="utf-8").split()
    documents = [" ".join(words[i * 40 : i * 40 + 10 + i % 30]) for i in range(600)]
    rows = [json.dumps({"text": document}) for document in documents]
    rows[100:100] = ["broken", "", ""]
    rows[400:400] = ["{}"]
    file = tmp_path / "text.jsonl"
    file.write_text("\n".join(rows))
    return file


def take_steps(monkeypatch: pytest.MonkeyPatch, chars: int, tokens: int) -> None:
    """A batch of so many characters, shards of so many tokens, and the journal with each batch."""
    monkeypatch.setattr(work, "BATCH_CHARS", chars)
    monkeypatch.setattr(shards, "SHARD_TOKENS", tokens)
    monkeypatch.setattr(shards, "COMMIT_SECONDS", 0)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    take_steps(monkeypatch, chars=4000, tokens=2000)


SETTINGS = Settings(vocab_size=300, validation_fraction=0.1, max_errors=2)
WORDS = "--vocab-size 300 --validation-fraction 0.1 --max-errors 2".split()  # that mean the same


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


class Stop(BaseException):
    """What a power cut is for the process: nobody tidies up."""


@contextmanager
def stopped_at(journal: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """When this journal has been written."""
    write_journal, journals = Workplace.write_journal, iter(range(1, journal))

    def write(place: Workplace, content: dict[str, Any]) -> None:
        write_journal(place, content)
        if next(journals, None) is None:
            raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Workplace, "write_journal", write)
        yield


@pytest.mark.parametrize("max_tokens", [None, 9000])
def test_interrupted_anywhere_it_ends_with_the_same_bytes(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int | None
) -> None:
    settings = Settings(300, 0.1, max_errors=2, max_tokens=max_tokens)
    build(LocalFiles([lines]), tmp_path / "whole", settings)
    assert len(list((tmp_path / "whole").glob("train-*"))) > 3
    output = tmp_path / "c"
    write_journal, left = Workplace.write_journal, 0

    def limited(place: Workplace, journal: dict[str, Any]) -> None:
        nonlocal left
        write_journal(place, journal)
        left -= 1
        if not left:
            # Bytes that were on their way when the power went.
            for split in shards.SPLITS:
                newest = max(place.corpus.glob(f"{split}-*"))
                newest.write_bytes(newest.read_bytes() + b"\1" * 999)
            raise Stop

    monkeypatch.setattr(Workplace, "write_journal", limited)
    stops = 0
    while not output.exists():
        left = 2
        try:
            build(LocalFiles([lines]), output, settings)
        except Stop:
            stops += 1
            assert stops < 50
    assert stops > 1
    assert content(output) == content(tmp_path / "whole")
    assert not Workplace(output).path.exists()
    meta = json.loads((output / "meta.json").read_text())
    assert meta["skipped"] == ({"broken": 2, "empty": 2} if not max_tokens else {"broken": 1, "empty": 2})


def test_what_is_left_out_behind_the_last_document_counts_once(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Workplace) -> None:
        raise Stop

    lines.write_text(lines.read_text() + "\n\n{}\n ")
    output, settings = tmp_path / "c", Settings(300, 0.1, max_errors=3)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Workplace, "finish", stop)
        build(LocalFiles([lines]), output, settings)
    build(LocalFiles([lines]), output, settings)
    assert json.loads((output / "meta.json").read_text())["skipped"] == {"broken": 3, "empty": 4}


def test_the_number_of_workers_changes_nothing(lines: Path, tmp_path: Path) -> None:
    build(LocalFiles([lines]), tmp_path / "one", SETTINGS)
    build(LocalFiles([lines]), tmp_path / "two", Settings(300, 0.1, max_errors=2, workers=2))
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_workers_need_no_way_into_the_directory_of_who_types(lines: Path, tmp_path: Path) -> None:
    """`sudo -u aura aura prepare …` in one's home, which is closed to aura. (So is root without its rights.)"""
    home = tmp_path / "home"
    home.mkdir()
    words = ["prepare", "--input", lines, "--output", tmp_path / "c", *WORDS, "--workers", "2"]
    may_less = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    script = 'cd "$1" && chmod 0 . && shift && exec "$@"'
    command = ["sh", "-c", script, "sh", home, *may_less, sys.executable, "-m", "aura", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    finally:
        home.chmod(0o700)
    assert done.returncode == 0, done.stderr
    verify(tmp_path / "c")


PREPARE = """
import sys
from aura.commands import cli
from aura.corpus import shards
from aura.corpus import work
work.BATCH_CHARS, shards.SHARD_TOKENS, shards.COMMIT_SECONDS = 1000, 2000, 0
if __name__ == "__main__":
    sys.exit(cli.main(["prepare", *sys.argv[1:]]))
"""


def test_a_killed_process_leaves_no_worker_and_goes_on(lines: Path, tmp_path: Path) -> None:
    script, output = tmp_path / "prepare.py", tmp_path / "c"
    script.write_text(PREPARE)
    words = [sys.executable, str(script), "--input", str(lines), "--output", str(output), *WORDS]
    words += ["--workers", "2"]
    journal = Workplace(output).journal
    for number, ending in ((signal.SIGKILL, -9), (signal.SIGTERM, 143)):
        before = journal.stat().st_mtime_ns if journal.exists() else 0
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            deadline = time.monotonic() + 60
            while not (journal.exists() and journal.stat().st_mtime_ns > before):
                assert process.poll() is None and time.monotonic() < deadline, process.stderr
                time.sleep(0.002)
            process.send_signal(number)
            # The pipes end when the workers are gone, too.
            _, said = process.communicate(timeout=60)
            if process.returncode == 0:
                break  # it was faster
            assert process.returncode == ending
            if number == signal.SIGTERM:
                assert "the same command goes on from there" in said
    made = build(LocalFiles([lines]), output, SETTINGS)
    build(LocalFiles([lines]), tmp_path / "whole", SETTINGS)
    assert verify(output) == made
    assert content(output) == content(tmp_path / "whole")


def test_a_broken_place_late_in_the_text_costs_nothing(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, strict = tmp_path / "c", Settings(300, 0.1, tokenizer=None, max_errors=1)
    # The tokenizer is trained on the beginning, so the second broken line is met while encoding.
    with monkeypatch.context() as patch:
        patch.setattr(work, "TOKENIZER_SAMPLE", 1000)
        with pytest.raises(DataError, match=r"line 401 .* --max-errors 1 .*goes on from there"):
            build(LocalFiles([lines]), output, strict)
    done = json.loads(Workplace(output).journal.read_text())
    assert done["position"][1] > 300
    build(LocalFiles([lines]), output, SETTINGS)
    assert not Workplace(output).path.exists()


def test_other_settings_do_not_touch_what_was_begun(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "c"
    with stopped_at(1, monkeypatch):
        build(LocalFiles([lines]), output, SETTINGS)
    before = content(Workplace(output).corpus)
    with pytest.raises(ConfigError, match="unfinished corpus from other text or settings"):
        build(LocalFiles([lines]), output, Settings(301, 0.1, max_errors=2))
    assert content(Workplace(output).corpus) == before
    journal = json.loads(Workplace(output).journal.read_text())
    journal["request"] = {"dataset": "acme/es", "revision": "abc"}
    Workplace(output).journal.write_text(json.dumps(journal))
    with pytest.raises(ConfigError, match="newer one: go on with --dataset-revision abc"):
        Workplace(output).read_journal({"dataset": "acme/es", "revision": "def"})
    with (Workplace(output).path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="Another `aura prepare` is at work"):
            build(LocalFiles([lines]), output, SETTINGS)
    assert content(Workplace(output).corpus) == before


def test_without_a_terminal_lines_tell_the_progress_of_this_start(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a dataset, what was done before is not read again; so it says nothing about the speed of now."""
    folder = tmp_path / "data"
    folder.mkdir()
    documents = [row for row in lines.read_text().splitlines() if row.startswith('{"text"')]
    rows = [row.replace(': "', f': "{copy} ', 1) for copy in range(20) for row in documents]
    (folder / "train.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(work, "BATCH_CHARS", 50_000)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 10**9)

    def expected() -> list[float]:
        """In MB, line by line."""
        said = capsys.readouterr().err
        return [float(total) for total in re.findall(r"Encoding: [\d.]+ MB of ([\d.]+) MB, .* left\.", said)]

    monkeypatch.setattr(bars, "SECONDS_PER_LINE", 0.01)
    settings = Settings(300, 0.1, max_tokens=500_000)
    source = partial(HubDataset, str(folder), None, "train", "text")
    with stopped_at(8, monkeypatch):
        build(source(), tmp_path / "c", settings, Bars())
    before = expected()
    build(source(), tmp_path / "c", settings, Bars())
    after = expected()
    assert before[0] == pytest.approx(before[-1], rel=0.2)
    assert after[0] == pytest.approx(after[-1], rel=0.2)
    assert after[-1] < 0.8 * before[-1]


def test_a_preparation_is_shown_in_spanish(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AURA_LANG", "es")
    monkeypatch.setattr(bars, "SECONDS_PER_LINE", 0)
    folder = tmp_path / "textos"
    folder.mkdir()
    shutil.copy(lines, folder)
    (folder / "foto.jpg").touch()
    (folder / "nada.txt").touch()
    words = ["--input", str(folder), "--output", str(tmp_path / "c"), "--max-errors", "99"]
    for _ in range(2):
        assert main([*words, "--vocab-size", "9999"]) == 0
    said = "".join(capsys.readouterr()).replace(str(tmp_path), "")
    for sentence in (
        "Nota: en /textos hay otros ficheros (1) que no se leen, por ejemplo /textos/foto.jpg.",
        "Nota: /textos/nada.txt está vacío.",
        "Leyendo: ",
        "Entrenando tokenizador: ",
        "Codificando: ",
        " lugares dañados, ",
        "Nota: el texto no da para más de ",
        "Entropía unigrama ",
        "/c está al día.",
    ):
        assert sentence in said, said
    assert re.search(r"Codificando: [\d.]+ MB de [\d.]+ MB, .*faltan \d+ min \d\d s\.", said), said
    assert not english_in(said), said


@pytest.mark.parametrize("damage", ["cut", "gone"])
@pytest.mark.parametrize("number", [0, -1], ids=["finished", "open"])
def test_a_shard_that_lacks_something_is_known_before_the_work(
    damage: str, number: int, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped_at(5, monkeypatch):
        build(LocalFiles([lines]), tmp_path / "c", SETTINGS)
    place = Workplace(tmp_path / "c")
    shard = sorted(place.corpus.glob("train-*"))[number]
    shard.write_bytes(shard.read_bytes()[:-2])
    if damage == "gone":
        shard.unlink()
    before = place.journal.read_text()
    refusal = rf"{shard.name} is shorter than its journal says: remove .*c\.partial\."
    with pytest.raises(DataError, match=refusal):
        build(LocalFiles([lines]), tmp_path / "c", SETTINGS)
    assert place.journal.read_text() == before


def test_what_an_earlier_release_has_begun_is_gone_on_with(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted no bytes of text by shard, and left no duplicates out."""
    whole = build(LocalFiles([lines]), tmp_path / "whole", SETTINGS)
    with stopped_at(5, monkeypatch):
        build(LocalFiles([lines]), tmp_path / "c", SETTINGS)
    file = Workplace(tmp_path / "c").journal
    journal = json.loads(file.read_text())
    assert journal["shards"]["train"]["entries"]
    del journal["hashes"], journal["duplicates"]
    Workplace(tmp_path / "c").hashes.unlink()
    for state in journal["shards"].values():
        for counted in (state, *state["entries"]):
            del counted["text_bytes"]
    file.write_text(json.dumps(journal))
    with stopped_at(1, monkeypatch):
        build(LocalFiles([lines]), tmp_path / "c", SETTINGS)
    made = build(LocalFiles([lines]), tmp_path / "c", SETTINGS)
    assert (made.fingerprint, made.text_bytes) == (whole.fingerprint, whole.text_bytes)
    first, *_, last = made.files["train"]
    assert "text_bytes" not in first and last == whole.files["train"][-1]


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_damaged_journal_is_one_sentence(
    content: str, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped_at(1, monkeypatch):
        build(LocalFiles([lines]), tmp_path / "c", SETTINGS)
    Workplace(tmp_path / "c").journal.write_text(content)
    with pytest.raises(DataError, match=r"journal\.json is damaged, .*: remove .*c\.partial\."):
        build(LocalFiles([lines]), tmp_path / "c", SETTINGS)


def test_too_few_tokens_are_named_as_the_cause(lines: Path, tmp_path: Path) -> None:
    """Not the text, of which there is enough."""
    with pytest.raises(DataError, match=r"--dataset-max-tokens 5 ends .* before there are two"):
        build(LocalFiles([lines]), tmp_path / "c", Settings(300, 0.1, max_tokens=5, max_errors=2))


def test_one_document_at_least_is_for_validation(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("uno dos tres\ncuatro cinco\nseis siete ocho\n")
    made = build(LocalFiles([file], documents_per_line=True), tmp_path / "c", Settings(300, 1e-9))
    documents = json.loads((made.path / "meta.json").read_text())["documents"]
    assert documents == {"train": 2, "validation": 1}


def test_the_output_is_not_the_directory_of_who_types(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the directory in which you are"):
        main(["--input", str(text), "--output", ".", "--vocab-size", "300"])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("named", ["", "**", "c*/t*.json", "*.partial/j*", "**/*.json*"])
def test_what_is_made_in_a_directory_of_text_is_no_text(
    named: str, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--input", f"{tmp_path}/{named}", str(lines), "--output", f"{tmp_path}/c", *WORDS]
    (tmp_path / "c.json").write_text(json.dumps({"text": "otro"}))
    for pattern in ("cx/tx.json", "x.partial/jx.json"):  # which no pattern lacks
        (tmp_path / pattern).parent.mkdir()
        (tmp_path / pattern).write_text(json.dumps({"text": pattern}))
    before = set(tmp_path.iterdir())
    with stopped_at(2, monkeypatch):
        main(words)
    assert [main(words), main(words)] == [0, 0]
    assert set(tmp_path.iterdir()) - before == {tmp_path / "c"}


def test_a_dataset_may_not_hold_the_output(text: Path) -> None:
    """datasets reads all that is in the directory."""
    words = ["--dataset", str(text.parent), "--output", str(text.parent / "c"), "--vocab-size", "300"]
    with pytest.raises(ConfigError, match="lies in the input"):
        main(words)


def test_what_is_not_utf8_is_known_before_anything_is_made_unless_it_may_be_left_out(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "b.txt").write_bytes(b"ma\xf1ana")
    words = ["--input", str(folder), "--vocab-size", "300", "--output", str(tmp_path / "c")]
    with pytest.raises(DataError, match=r"b\.txt is not UTF-8: byte 2 "):
        main(words)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert main([*words, "--max-errors", "1"]) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert "is up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--input", "x", "--dataset-name", "c4", "--vocab-size", "300"], "either --input PATH"),
        (["--vocab-size", "300"], "either --input PATH"),
        (["--input", "{text}", "--vocab-size", "300", "--tokenizer", "x"], "either --vocab-size N"),
        (["--input", "{text}", "--tokenizer", ""], "either --vocab-size N"),
        (["--input", "{text}", "--dataset-config", "es"], "--dataset-config says something of a dataset"),
        (["--input", "{text}", "--dataset-split", "train"], "--dataset-split says something of a dataset"),
        (["--input", "{text}", "--dataset_revision", "a"], "--dataset-revision says something of a dataset"),
        (["--dataset", "c4", "--documents-per-line"], "--documents-per-line says something of text files"),
        (
            ["--dataset", "{text}"],
            "is a file, and --dataset takes a dataset or a directory: name it with --input",
        ),
        (["--input", "{text}", "--vocab-size", "300", "--workers", "-1"], "--workers -1"),
        (["--input", "{text}", "--vocab-size", "300", "--max-errors", "-1"], "--max-errors -1"),
        (["--input", "{text}", "--vocab-size", "300", "--dataset-max-tokens", "0"], "--dataset-max-tokens 0"),
        (["--input", "{text}", "--vocab-size", "300", "--validation-split", "1"], "--validation-fraction 1"),
    ],
)
def test_command_lines_that_are_refused(words: list[str], sentence: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        main([word.format(text=text) for word in [*words, "--output", str(tmp_path / "c")]])
    assert list(tmp_path.iterdir()) == []
