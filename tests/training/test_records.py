"""One record means the same in a line of JSON, in a JSON list, in parquet and in a dataset."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import zstandard
from aura.commands import prepare
from aura.corpus import json_list, sources
from aura.corpus.files import find_files
from aura.corpus.sources import HubDataset, LocalFiles, Problems, Source
from aura.errors import DataError
from pyarrow import parquet
from test_sources import TEXTS, nothing, read

ID = '"id": 1'
RECORDS = {
    "text": (f'{{{ID}, "text": " dos "}}', "dos", ""),
    "null": (f'{{{ID}, "text": null}}', None, "has no text"),
    "space": (f'{{{ID}, "text": " "}}', None, "has no text"),
    "NUL": (f'{{{ID}, "text": "a\\u0000b"}}', None, "has a NUL byte, so it is no text"),
}


def lines(path: Path, records: list[str]) -> Source:
    (path / "a.jsonl").write_text("\n".join(records))
    return LocalFiles([path / "a.jsonl"])


def json_list_of(path: Path, records: list[str]) -> Source:
    (path / "a.json").write_text("[" + ",\n ".join(records) + "]\n")
    return LocalFiles([path / "a.json"])


def table(path: Path, records: list[str]) -> Source:
    texts = [json.loads(record)["text"] for record in records]
    parquet.write_table(pa.table({"text": texts}), path / "a.parquet")
    return LocalFiles([path / "a.parquet"])


def dataset(path: Path, records: list[str]) -> Source:
    lines(path, records)
    return HubDataset(str(path), None, None, "text")


def saved_dataset(path: Path, records: list[str]) -> Source:
    texts = [json.loads(record)["text"] for record in records]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(path)
    return HubDataset(str(path), None, None, "text")


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("source", [lines, json_list_of, table, dataset, saved_dataset])
def test_a_record_means_the_same_wherever_it_lies(
    source: Callable[[Path, list[str]], Source], kind: str, tmp_path: Path
) -> None:
    record, text, why = RECORDS[kind]
    records = [RECORDS["text"][0], record, RECORDS["text"][0]]
    texts, counts, said = read(source(tmp_path, records), limit=1)
    assert texts == [each for each in ("dos", text, "dos") if each]
    assert counts == {"broken": int(kind == "NUL"), "empty": int(kind in ("null", "space"))}
    assert [why in sentence for sentence in said] == [True] * (text is None)
    assert all(" 2 " in sentence for sentence in said)
    if kind == "NUL":
        with pytest.raises(DataError, match=f"2 {why}"):
            read(source(tmp_path, records))


def test_a_number_of_any_length_that_nobody_asked_for_is_no_hindrance(tmp_path: Path) -> None:
    record = f'{{"id": {"9" * 5000}, "text": "uno"}}'
    for source in (lines, json_list_of):
        assert read(source(tmp_path, [record]))[0] == ["uno"]
    with pytest.raises(DataError, match="line 1 has inf under 'id', which is no text"):
        read(LocalFiles([tmp_path / "a.jsonl"], "id"))


@pytest.mark.parametrize("blank", ["", "\n \r\n"])
def test_a_list_begins_with_the_first_line_that_is_not_empty(blank: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(
        b"\xef\xbb\xbf" + f'{blank} ["uno",\n {json.dumps({"text": "dos"})}]'.encode()
    )
    source = LocalFiles([tmp_path / "a.json"])
    empty = blank.count("\n")
    documents = source.documents(None, Problems(1, print), nothing)
    assert next(documents) == "dos"
    assert source.position == [0, empty + 2]
    texts, counts, said = read(source, limit=1)
    assert (texts, counts) == (["dos"], {"broken": 1, "empty": empty})
    assert "a.json, element 1 is not a JSON object with a text under 'text'" in said[-1]
    assert read(source, [0, empty + 1])[0] == ["dos"] and read(source, [0, empty + 2])[0] == []


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)],
    ids=["", ".gz", ".zst"],
)
def test_a_list_is_read_a_little_at_a_time_and_goes_on_anywhere(
    suffix: str,
    pack: Callable[[bytes], bytes],
    indent: int | None,
    chunk: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_list, "CHUNK", chunk)
    records: list[Any] = [{"text": text, "n": [1, {"x": None}]} for text in TEXTS[:5]]
    records[3:3] = [7, {"texto": "uno"}, {"text": None}]
    file = tmp_path / f"a.json{suffix}"
    file.write_bytes(pack(b"\xef\xbb\xbf" + json.dumps(records, indent=indent, ensure_ascii=False).encode()))
    source = LocalFiles([file])
    texts, counts, said = read(source, limit=2)
    assert (texts, counts) == (TEXTS[:5], {"broken": 2, "empty": 1})
    assert f"{file}, element 4 is not a JSON object with a text under 'text'" in said[0]
    for number, _ in enumerate(source.documents(None, Problems(2, print), nothing), start=1):
        assert read(LocalFiles([file]), source.position, limit=2)[0] == texts[number:]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"[", r"at element 1, it ends without '\]'"),
        (b'[{"text": "uno"}', r"at element 2, it ends without '\]'"),
        (b'[{"text": "uno"},\n', r"at element 2, it ends without '\]'"),
        (b'[{"text": "uno", ', r"at element 1, it ends without '\]'"),
        (b'[{"text": "uno"} {"text": "dos"}]', r"at element 2, ']' is missing before '\{'"),
        (b'[{"text": "uno"}, {"text": "cor', r"at element 2, it ends without '\]'"),
        (b'[{"text": "uno" "n": 1}]', "at element 1, Expecting ',' delimiter: .\"n\": 1"),
        (
            b'[{"text": "uno" "n": "' + b"a" * 500 + b'"}]',
            'at element 1, Expecting \',\' delimiter: ."n": "aaa',
        ),
        (b'[{"text": "uno"}]\n{"text": "dos"}\n', r"at element 2, behind the list stands '\{'"),
        (
            '[{"text": "año"}]'.encode("cp1252"),
            "at element 1, it is not UTF-8; if it is Windows-1252, `iconv",
        ),
        (b'[{"text": "' + b"a" * 500 + b'"}]', "at element 1, it is longer than 0 MiB"),
        (b"[" * 100_000, "at element 1, "),
    ],
)
def test_a_list_that_is_damaged_ends_it_in_a_sentence(
    text: bytes, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with --max-errors: what comes behind it cannot be told apart."""
    monkeypatch.setattr(json_list, "CHUNK", 99)
    monkeypatch.setattr(sources, "LONGEST_LINE", 300 if b"aaa" in text else 1 << 24)
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(DataError, match=f"is no JSON list that could be read whole: {sentence}"):
        read(LocalFiles([tmp_path / "a.json"]), limit=9)


def test_what_save_to_disk_has_made_is_a_dataset(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_dict({"text": TEXTS})
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    splits = {"entreno": whole.select(range(30)), "prueba": whole.select(range(30, 40))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "two")
    source = HubDataset(str(tmp_path / "one"), None, None, "text")
    for number, _ in enumerate(source.documents(None, Problems(0, print), nothing), start=1):
        if number in (1, 13, 14, 40):
            position = json.loads(json.dumps(source.position))
            again = HubDataset(str(tmp_path / "one"), None, None, "text")
            assert read(again, position)[0] == TEXTS[number:]
    assert read(HubDataset(str(tmp_path / "two"), None, "prueba", "text"))[0] == TEXTS[30:]
    for name in ("one", "two"):
        with pytest.raises(DataError, match=r"cannot be read: (Bad|Unknown) split"):
            read(HubDataset(str(tmp_path / name), None, "none", "text"))


def test_a_pipe_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    refused = "a.jsonl is a pipe or a device: it can be read once"
    for name, words in (("--input", ["{}"]), ("--dataset", ["{}"]), ("--dataset", ["{}=0.5", "{}=0.5"])):
        given = [word.format(tmp_path / "a.jsonl") for word in words]
        with pytest.raises(DataError, match=refused):
            prepare.main([name, *given, "--output", str(tmp_path / "c"), "--vocab-size", "300"])
    assert [*tmp_path.iterdir()] == [tmp_path / "a.jsonl"]
    said: list[str] = []
    (tmp_path / "b.txt").write_text("uno")
    assert find_files([tmp_path], said.append) == [tmp_path / "b.txt"]
    assert "1 other files" in said[0]
