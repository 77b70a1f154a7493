"""Where documents come from, and what is said about those that cannot be used."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from aura.commands import prepare
from aura.corpus import files, running_text, sources
from aura.corpus.sources import HubDataset, LocalFiles, Problems, Source
from aura.errors import EXIT_DATA, ConfigError, DataError
from conftest import BOUND
from pyarrow import parquet

TEXTS = [f"documento {i}: el ñandú\ncorre por el campo" for i in range(40)]


def nothing(count: int) -> None:
    pass


def read(source: Source, position: Any = None, limit: int = 0) -> tuple[list[str], dict[str, int], list[str]]:
    """Documents, counts of problems, sentences."""
    said: list[str] = []
    problems = Problems(limit, said.append)
    return list(source.documents(position, problems, nothing)), problems.counts, said


def json_lines(texts: list[str]) -> str:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))


def write_parquet(path: Path, texts: list[str | None], column: str = "text") -> None:
    parquet.write_table(pa.table({"id": list(range(len(texts))), column: texts}), path, row_group_size=7)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("suffix", ["", *PACKERS])
def test_json_lines_compressed_and_cut_short(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.jsonl{suffix}"
    data = json_lines(TEXTS).encode()
    if suffix:
        data = PACKERS[suffix](data)
    file.write_bytes(data)
    done = 0

    def count(n: int) -> None:
        nonlocal done
        done += n

    assert list(LocalFiles([file]).documents(None, Problems(0, print), count)) == TEXTS
    assert done == file.stat().st_size  # progress is measured in what lies on the disk
    if suffix:
        file.write_bytes(data[: len(data) // 2])
        with pytest.raises(DataError, match=rf"a\.jsonl{suffix} cannot be read to its end"):
            read(LocalFiles([file]))


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_a_compressed_file_of_several_streams_is_read_whole_or_not_at_all(
    suffix: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pbzip2 and pixz make them, and `cat a.xz b.xz`; zeros between them, as the format .xz allows."""
    monkeypatch.setattr(files, "CHUNK", chunk)
    file = tmp_path / f"a.jsonl{suffix}"
    first, second = (PACKERS[suffix](json_lines(part).encode()) for part in (TEXTS[:20], TEXTS[20:]))
    zeros = b"" if suffix == ".zst" else bytes(8)
    file.write_bytes(first + zeros + second + zeros)
    assert read(LocalFiles([file]))[0] == TEXTS
    damaged = bytearray(second)
    damaged[:6] = b"broken"
    for rest in (second[:-9], second[:3], damaged):
        file.write_bytes(first + rest)
        with pytest.raises(DataError, match=rf"a\.jsonl{suffix} cannot be read to its end"):
            read(LocalFiles([file]))


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
def test_of_several_files_one_without_a_byte_is_no_compressed_one(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"a.txt{suffix}").touch()
    (tmp_path / "b.txt").write_text("more")
    with pytest.raises(DataError, match=rf"a\.txt{suffix} cannot be read to its end"):
        read(LocalFiles([tmp_path]))


def test_directories_patterns_and_other_files(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/b.jsonl").write_text(json_lines(TEXTS[:10]))
    (tmp_path / "in/deep/c.txt.gz").write_bytes(gzip.compress("\n".join(["uno", "dos"]).encode()))
    write_parquet(tmp_path / "in/deep/d.parquet", [*TEXTS[10:30]])
    (tmp_path / "in/README.md").write_text("no corpus")
    whole = LocalFiles([tmp_path / "in"], documents_per_line=True, say=said.append)
    assert read(whole)[0] == [*TEXTS[:10], "uno", "dos", *TEXTS[10:30]]
    assert "1 other files" in said.pop()
    assert read(LocalFiles([tmp_path / "in/**/*.parquet"]))[0] == TEXTS[10:30]
    assert read(LocalFiles([tmp_path / "in/*"], say=said.append))[0] == TEXTS[:10]
    assert "1 other files" in said.pop()
    for name, sentence in (
        ("in/*.none", "does not match a file"),
        ("in/d*", "does not match a file"),  # a directory
        ("in/*.md", "no .txt, .jsonl or .parquet file in"),
        ("in/none", "none does not exist"),
    ):
        with pytest.raises(DataError, match=sentence):
            LocalFiles([tmp_path / name])


def test_links_are_followed_once_and_what_is_not_read_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "in").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "in/a.jsonl").write_text(json_lines(TEXTS[:2]))
    (tmp_path / "elsewhere/b.jsonl").write_text(json_lines(TEXTS[2:4]))
    for name, target in (("link", "../elsewhere"), ("self", "."), ("none.txt", "none"), ("round", "round")):
        (tmp_path / "in" / name).symlink_to(target)
    (tmp_path / "elsewhere/back").symlink_to("../in")
    assert read(LocalFiles([tmp_path / "in"], say=said.append))[0] == TEXTS[:4]
    assert "2 other files" in said.pop() and not said
    before = HubDataset(str(tmp_path / "in"), None, "train", "text").identity(nothing)
    (tmp_path / "elsewhere/b.jsonl").write_text(json_lines(TEXTS[2:5]))
    assert HubDataset(str(tmp_path / "in"), None, "train", "text").identity(nothing) != before


def test_a_directory_that_may_not_be_read_ends_it(tmp_path: Path) -> None:
    (tmp_path / "in/secret").mkdir(parents=True)
    (tmp_path / "in/a.txt").write_text("uno")
    (tmp_path / "in/secret").chmod(0)
    words = ["prepare", "--input", f"{tmp_path}/in", "--output", f"{tmp_path}/c", "--vocab-size", "300"]
    command = [*BOUND, sys.executable, "-m", "aura", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == f"{tmp_path}/in/secret cannot be read to its end: Permission denied.\n"
    assert done.returncode == EXIT_DATA


def test_capital_letters_in_names_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "A.JSONL").write_text(json_lines(TEXTS[:2]))
    (tmp_path / "B.TXT").write_text("uno")
    (tmp_path / "C.Txt.GZ").write_bytes(gzip.compress(b"dos"))
    write_parquet(tmp_path / "D.Parquet", [TEXTS[2]])
    assert read(LocalFiles([tmp_path]))[0] == [*TEXTS[:2], "uno", "dos", TEXTS[2]]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.TAR.zst", "a.tgz", "a.zip"])
def test_archives_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"archive")
    with pytest.raises(DataError, match="is an archive: unpack it"):
        LocalFiles([tmp_path / name])


def test_an_archive_under_another_name_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hola")
    with tarfile.open(tmp_path / "b.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
    with pytest.raises(DataError, match=r"b\.gz is no text: byte [0-9]+ \(line 1\) is zero"):
        read(LocalFiles([tmp_path / "b.gz"]))
    with pytest.raises(DataError, match=r"b\.gz, line 1 has a NUL byte"):
        read(LocalFiles([tmp_path / "b.gz"], documents_per_line=True))


def test_the_identity_knows_the_content_and_how_it_is_read_but_no_names(tmp_path: Path) -> None:
    def digest(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        known: str = LocalFiles([tmp_path / name]).identity(nothing)["sha256"]
        return known

    assert digest("a.txt", b"{}") == digest("b", b"{}") == digest("c.d.txt", b"{}")
    assert digest("a.jsonl", b"{}") == digest("b.c.jsonl", b"{}")
    assert len({digest(name, b"{}") for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet")}) == 4
    assert digest("a.txt", b"{}") != digest("a.txt", b"[]")


def test_a_document_per_line(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffuno\r\n\n  \ndos ñ\ntres".encode())
    texts, counts, said = read(LocalFiles([file], documents_per_line=True))
    assert texts == ["uno", "dos ñ", "tres"]
    assert counts == {"broken": 0, "empty": 2}
    assert [f"{file}, line {n} has no text" in sentence for n, sentence in zip((2, 3), said, strict=True)]


BROKEN = [
    (b'{"text": "cortado', "line 2 is not JSON"),
    (b'["text"]', "line 2 is not a JSON object with a text under 'text'"),
    (b'{"texto": "otro nombre"}', "line 2 is not a JSON object with a text under 'text'"),
    (b'{"text": 5}', "line 2 has 5 under 'text', which is no text"),
    (b'{"text": "media \\ud83d letra"}', "line 2 has half of a surrogate pair"),
    ('{"text": "año"}'.encode("latin-1"), "is not UTF-8: byte 27 (line 2) is 0xf1"),
    (b'{"text": "' + b"a" * 200 + b'"}', "line 2 is longer than"),
]


@pytest.mark.parametrize(("line", "sentence"), BROKEN, ids=[sentence[:30] for _, sentence in BROKEN])
def test_broken_lines_stop_or_are_left_out(
    line: bytes, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LONGEST_LINE", 150)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "uno"}\n' + line + b'\n\n{"text": " "}\n{"text": "dos"}\n' + line)
    with pytest.raises(DataError) as caught:
        read(LocalFiles([file]))
    for words in (str(file), sentence, "--max-errors N"):
        assert words in str(caught.value)
    texts, counts, said = read(LocalFiles([file]), limit=2)
    assert texts == ["uno", "dos"]
    assert counts == {"broken": 2, "empty": 2}
    assert sentence in said[0]
    assert "line 6" in said[-1]
    with pytest.raises(DataError, match="more than --max-errors 1 allows"):
        read(LocalFiles([file]), limit=1)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_bytes_that_are_no_text_are_left_out_of_running_text(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_text, "CHUNK", chunk)
    file = tmp_path / "a.txt"
    file.write_bytes("uno ñ\r\ndo".encode() + b"\xf1\xff" + "s\ntrés".encode() + b"\0\xc3\0\xc3")
    texts, counts, said = read(LocalFiles([file]), limit=6)
    assert texts == ["uno ñ\ndos\ntrés"]
    assert counts["broken"] == 6
    command = f"`iconv -f windows-1252 -t utf8 {file} > {tmp_path}/a-utf8.txt`"
    assert f"If it is Windows-1252, {command} converts it; then" in said[0]
    assert [sentence.split(": ")[2].split(". ")[0] for sentence in said] == [
        "byte 10 (line 2) is 0xf1",
        "byte 11 (line 2) is 0xff",
        "byte 19 (line 3) is zero.",
        "byte 20 (line 3) is 0xc3",
        "byte 21 (line 3) is zero.",
        "byte 22 (line 3) is 0xc3",
    ]


@pytest.mark.parametrize("name", ["mi niño.txt", "mi niño.jsonl"])
def test_utf16_has_a_command_that_can_be_pasted(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text('{"text": "año"}\n', encoding="utf-16")
    with pytest.raises(
        DataError, match=r"If it is UTF-16, `(.*)` converts it; then move the old file away\. Correct it"
    ) as caught:
        read(LocalFiles([file]))
    subprocess.run(["sh", "-c", str(caught.value).split("`")[1]], check=True)
    assert "año" in file.with_stem("mi niño-utf8").read_text(encoding="utf-8")


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_all_files_that_are_not_utf8_are_known_before_anything_is_made(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (files, running_text):
        monkeypatch.setattr(module, "CHUNK", chunk)
    (tmp_path / "a.txt").write_text("Niños y niñas: 😀 …\n" * 20)
    (tmp_path / "b.txt").write_bytes("bien\nñ\n".encode() + "mal: año\n".encode("cp1252"))
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "letra cortada \xc3"}\n')
    (tmp_path / "d.txt").write_bytes("fin cortado ñ".encode()[:-1])
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress("no se ve aquí: año".encode("cp1252")))
    with pytest.raises(DataError) as caught:
        LocalFiles([tmp_path], strict=True).identity(nothing)
    said = str(caught.value)
    assert f"{tmp_path}/b.txt is not UTF-8: byte 14 (line 3) is 0xf1. If it is Windows-1252, `iconv" in said
    assert f"Nor are 2 more files UTF-8: {tmp_path}/c.jsonl, {tmp_path}/d.txt. Correct it, or leave" in said
    tolerant = LocalFiles([tmp_path]).identity(nothing)
    for name in ("b.txt", "c.jsonl", "d.txt"):
        (tmp_path / name).unlink()
    assert LocalFiles([tmp_path], strict=True).identity(nothing) != tolerant


def test_parquet_columns_empty_cells_and_damage(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, ["uno", None, " ", "dos"], "contenido")
    texts, counts, said = read(LocalFiles([file], "contenido"))
    assert (texts, counts["empty"]) == (["uno", "dos"], 2)
    assert "a.parquet, row 2 has no text" in said[0]
    with pytest.raises(DataError, match="no column 'text' but id, contenido: choose with --dataset-column"):
        read(LocalFiles([file]))
    with pytest.raises(DataError, match="row 1 has 0 under 'id', which is no text"):
        read(LocalFiles([file], "id"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read(LocalFiles([file], "contenido"))


def test_reading_goes_on_behind_any_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_text, "DOCUMENT_CHARS", 100)
    monkeypatch.setattr(running_text, "CHUNK", 64)
    some = f"{json_lines(TEXTS[:3])}broken\n\n{json_lines(TEXTS[3:5])}broken\n"
    (tmp_path / "a.jsonl").write_text(some)
    (tmp_path / "b.txt").write_bytes(b"\xff" + "\n\n".join(TEXTS).encode().replace(b"20:", b"20\xf1"))
    write_parquet(tmp_path / "c.parquet", [TEXTS[0], None, *TEXTS[1:10]])
    source = LocalFiles([tmp_path])
    expected, counts, _ = read(source, limit=4)
    assert counts == {"broken": 4, "empty": 2}
    problems = Problems(4, print)
    for number, _ in enumerate(source.documents(None, problems, nothing), start=1):
        rest, new, _ = read(LocalFiles([tmp_path]), source.position, limit=4)
        assert rest == expected[number:]
        assert {kind: problems.counts[kind] + new[kind] for kind in new} == counts


def test_a_directory_that_is_a_dataset(tmp_path: Path) -> None:
    """The same path through `datasets` as a name on the hub takes."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        write_parquet(data / f"train-{number:05d}-of-00003.parquet", [*TEXTS[number * 10 :][:10]])
    write_parquet(data / "test-00000-of-00001.parquet", [None, "de prueba"])
    source = HubDataset(str(data), None, "train", "text")
    expected = read(source)[0]
    assert expected == TEXTS[:30]
    for number, _ in enumerate(source.documents(None, Problems(0, print), nothing), start=1):
        if number in (1, 10, 17):
            position = json.loads(json.dumps(source.position))
            again = HubDataset(str(data), None, "train", "text")
            assert read(again, position)[0] == expected[number:]
            rest = again.documents(position, Problems(0, print), nothing)
            next(rest)
            third = HubDataset(str(data), None, "train", "text")
            assert read(third, again.position)[0] == expected[number + 1 :]
    texts, counts, said = read(HubDataset(str(data), None, "test", "text"))
    assert (texts, counts["empty"]) == (["de prueba"], 1)
    assert "split test, row 1 has no text" in said[0]
    with pytest.raises(ConfigError, match="no column 'texto' but id, text"):
        read(HubDataset(str(data), None, "train", "texto"))
    with pytest.raises(DataError, match="cannot be read"):
        read(HubDataset(str(data), None, "none", "text"))
    words = ["--dataset_name", str(data), "--output", str(tmp_path / "c"), "--vocab-size", "300"]
    assert prepare.main([*words, "--validation_split", "0.1", "--dataset-max-tokens", "300"]) == 0
    meta = json.loads((tmp_path / "c" / "meta.json").read_text())
    assert 300 <= sum(meta["tokens"].values()) < 350
    assert meta["source"]["max_tokens"] == 300


def test_names_of_the_guides() -> None:
    assert HubDataset("wikipedia", None, "train", "text").path == "wikimedia/wikipedia"
    assert HubDataset("wikipedia", None, "train", "text").config == "20231101.es"
    assert HubDataset("wikipedia", "20231101.ca", "train", "text").config == "20231101.ca"
