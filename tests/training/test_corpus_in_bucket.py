"""A corpus in object storage: there whole or not at all, fetched once, and never used when it is torn."""

from __future__ import annotations

import json
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from aura.corpus import remote
from aura.corpus.corpus import META, Corpus, fingerprint_of
from aura.errors import EXIT_DATA, EXIT_TEMPORARY, EXIT_USAGE
from aura.storage import cache
from aura.storage.address import Address, place
from conftest import Aura, flip_a_bit
from object_storage import KEY, SECRET, Storage

HERE = "data/corpora/es"
WHERE = f"s3://{HERE}"


def preparing(text: Path, address: str = WHERE) -> list[str]:
    words = ["prepare", "--input", str(text), "--vocab-size", "300", "--validation-fraction", "0.1"]
    return [*words, "--output", address]


def files_of(corpus: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.glob("*")}


def there(bucket: Storage) -> dict[str, bytes]:
    return files_of(bucket.files / HERE)


@pytest.fixture
def stored(bucket: Storage, corpus: Corpus) -> Storage:
    """The bucket with a corpus in it, as `aura prepare` leaves it."""
    shutil.copytree(corpus.path, bucket.files / HERE)
    bucket.settle()
    return bucket


def test_what_is_prepared_is_there_whole_and_is_left_alone(
    bucket: Storage, text: Path, corpus: Corpus, aura_says: Aura, tmp_path: Path
) -> None:
    said = aura_says(*preparing(text))
    assert f"{WHERE} is complete." in said and corpus.fingerprint in said
    assert there(bucket) == files_of(corpus.path)
    assert bucket.of("PUT")[-1].endswith(META), "what makes it a corpus went before something else"

    bucket.mend()
    said = aura_says(*preparing(text))
    assert bucket.of("PUT") == []
    assert f"{WHERE} is up to date." in said and corpus.fingerprint in said

    (tmp_path / "other.txt").write_text("Un texto distinto.\n\nY otro.\n" * 200, encoding="utf-8")
    said = aura_says(*preparing(tmp_path / "other.txt"), code=EXIT_DATA)
    assert bucket.of("PUT") == []
    assert "holds a corpus from other text or settings" in said
    assert there(bucket) == files_of(corpus.path)

    # Whoever has prepared it has it already.
    bucket.mend()
    assert aura_says("fingerprint", WHERE) == f"{corpus.fingerprint}\n"
    assert bucket.of("GET") == ["/data/corpora/es/meta.json"]


def test_a_mixture_goes_there_and_comes_back(
    bucket: Storage, text: Path, aura_says: Aura, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "\n\n".join(f"Un texto distinto, el {number}." for number in range(2000))
    (tmp_path / "other.txt").write_text(other, encoding="utf-8")
    parts = [f"{text}=0.7", f"{tmp_path}/other.txt=0.3"]
    words = ["prepare", "--dataset", *parts, "--vocab-size", "300", "--validation-fraction", "0.3"]
    aura_says(*words, "--output", WHERE)
    assert {"validation-0-00000.bin", "validation-1-00000.bin"} < there(bucket).keys()
    monkeypatch.setenv("AURA_CACHE", str(tmp_path / "another"))
    aura_says("fingerprint", WHERE)
    (fetched,) = (tmp_path / "another").rglob(META)
    assert files_of(fetched.parent) == there(bucket)


def test_an_upload_that_breaks_off_leaves_no_corpus_and_goes_on(
    bucket: Storage, text: Path, corpus: Corpus, aura_says: Aura
) -> None:
    bucket.fail("PUT /data/corpora/es/validation", 500)
    said = aura_says(*preparing(text), code=EXIT_TEMPORARY)
    assert "does not answer as it should (InternalError)" in said
    assert "the same command sends what is missing" in said
    assert "train-00000.bin" in there(bucket) and META not in there(bucket)
    assert aura_says("fingerprint", WHERE, code=EXIT_DATA) == (
        f"There is no corpus in {WHERE} (meta.json is missing); make one with: aura prepare --output {WHERE} …\n"
    )

    bucket.mend()
    aura_says(*preparing(text))
    assert [path.rpartition("/")[2] for path in bucket.of("PUT")] == ["validation-00000.bin", META]
    assert there(bucket) == files_of(corpus.path)


def test_it_is_fetched_once_with_every_byte(
    stored: Storage, corpus: Corpus, aura_says: Aura, tmp_path: Path
) -> None:
    said = aura_says("fingerprint", WHERE)
    assert said.endswith(f"{corpus.fingerprint}\n")
    assert "the next start fetches nothing" in said
    (kept,) = [path.parent for path in (tmp_path / "cache").rglob(META)]
    assert files_of(kept) == files_of(corpus.path)

    stored.mend()
    assert aura_says("fingerprint", WHERE) == f"{corpus.fingerprint}\n"
    assert set(stored.of("GET") + stored.of("HEAD")) == {"/data/corpora/es/meta.json"}

    # A cache that somebody has damaged is mended, with what is missing only.
    (kept / "validation-00000.bin").write_bytes(b"")
    aura_says("fingerprint", WHERE)
    fetched = [path.rpartition("/")[2] for path in stored.of("GET")]
    assert fetched[1:] == [META, "validation-00000.bin", META]
    assert files_of(kept) == files_of(corpus.path)


def test_what_is_torn_is_not_used_and_not_fetched_twice(
    stored: Storage, aura_says: Aura, tmp_path: Path
) -> None:
    stored.cut("validation-00000.bin", times=1000)
    said = aura_says("fingerprint", WHERE, code=EXIT_TEMPORARY)
    assert said.count("\n") == 1, said
    assert f"{WHERE} does not answer as it should" in said
    assert not [*(tmp_path / "cache").rglob(META)]

    # A cut and an error now and then are overcome at once.
    stored.mend()
    stored.cut("validation-00000.bin", times=2)
    stored.fail("meta.json", 503, times=1)
    aura_says("fingerprint", WHERE)
    fetched = stored.of("GET")
    assert "/data/corpora/es/train-00000.bin" not in fetched
    assert fetched.count("/data/corpora/es/validation-00000.bin") == 3


def test_other_bytes_than_those_that_were_prepared_are_refused(
    stored: Storage, aura_says: Aura, tmp_path: Path
) -> None:
    directory = stored.files / HERE
    flip_a_bit(directory / "train-00000.bin")
    stored.settle()
    said = aura_says("fingerprint", WHERE, code=EXIT_DATA)
    assert f"{WHERE}/train-00000.bin is damaged (its SHA-256 differs): it is not used." in said
    assert not [*(tmp_path / "cache").rglob(META)]
    # Names that lead elsewhere are refused before anything is fetched, also with the fingerprint that is theirs.
    meta = json.loads((directory / META).read_text())
    meta["files"]["train"][0]["name"] = "../../../../.ssh/authorized_keys"
    for known, sentence in (
        (meta["fingerprint"], "does not match its own fingerprint"),
        (fingerprint_of(meta), "which no corpus has: it is not used"),
    ):
        (directory / META).write_text(json.dumps(meta | {"fingerprint": known}))
        stored.settle()
        stored.mend()
        assert sentence in aura_says("fingerprint", WHERE, code=EXIT_DATA)
        assert stored.of("GET") == ["/data/corpora/es/meta.json"]


def test_without_a_server_the_one_of_before_is_taken(
    stored: Storage, corpus: Corpus, aura_says: Aura, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    said = aura_says("fingerprint", WHERE, code=EXIT_TEMPORARY)
    assert said == f"{WHERE} does not answer as it should (EndpointConnectionError).\n"
    monkeypatch.setenv("AWS_ENDPOINT_URL", stored.environment["AWS_ENDPOINT_URL"])
    aura_says("fingerprint", WHERE)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    said = aura_says("fingerprint", WHERE)
    assert said.endswith(f"{corpus.fingerprint}\n")
    assert "What was fetched before is taken: " in said


def test_a_full_disk_is_one_sentence(
    stored: Storage, aura_says: Aura, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AURA_CACHE", str(small_disk))
    said = aura_says("fingerprint", WHERE, code=EXIT_DATA)
    assert said.count("\n") == 1
    assert "make room, or name another place with AURA_CACHE. Nothing was fetched." in said
    monkeypatch.setattr(cache, "check_room", lambda *_: None)  # somebody else has filled it meanwhile
    said = aura_says("fingerprint", WHERE, code=EXIT_DATA)
    assert said.count("\n") == 1, said
    assert "is full. What has come is kept there" in said
    assert not [*small_disk.rglob(META)]


def test_a_user_without_a_home_names_the_cache(
    stored: Storage, corpus: Corpus, aura_says: Aura, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `setpriv --reuid 12345` and containers have it: no HOME, and no entry in passwd."""

    def nobody(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert aura_says("fingerprint", WHERE).endswith(f"{corpus.fingerprint}\n")
    monkeypatch.delenv("AURA_CACHE")
    said = aura_says("fingerprint", WHERE, code=EXIT_USAGE)
    assert said.count("\n") == 1 and "name a directory for them with AURA_CACHE" in said
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache of mine"))
    assert aura_says("fingerprint", WHERE).endswith(f"{corpus.fingerprint}\n")
    assert [*(tmp_path / "cache of mine/aura").rglob(META)]


@pytest.mark.parametrize(
    ("changes", "address", "sentence"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, WHERE, "the server refuses the key ("),
        ({"AWS_ACCESS_KEY_ID": "NOBODY"}, WHERE, "the server refuses the key ("),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, WHERE, "with which key. Put one"),
        ({"AWS_PROFILE": "none-such"}, WHERE, "the settings of AWS cannot be used (The config profile"),
        ({"AWS_ENDPOINT_URL": "127.0.0.1"}, WHERE, "the settings of AWS cannot be used (Invalid endpoint"),
        ({}, "s3://nobody-has-it/corpora/es", "there is no bucket nobody-has-it."),
        ({}, "s3://data", "s3://data is a whole bucket: name a directory in it, such as s3://data/aura."),
        ({}, "s3:/data/es", "s3:/data/es is no address in object storage: it has to be like s3://"),
        ({}, "r2://data/es", "r2://data/es is no address in object storage"),
        ({}, "s3://data/../es", "s3://data/../es is no address in object storage"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_the_work_begins(
    changes: dict[str, str], address: str, sentence: str, bucket: Storage, text: Path, aura_says: Aura,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in changes.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name)
    said = aura_says(*preparing(text, address), code=EXIT_USAGE)
    assert said.count("\n") == 1, said
    assert sentence in said
    assert SECRET not in said and KEY not in said
    assert there(bucket) == {}
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_corpus_of_ones_own_directory(
    stored: Storage, corpus: Corpus, aura_says: Aura, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.fail("validation", 500)
    words = ("fetch", WHERE, "--output", str(tmp_path / "corpora/es"))
    aura_says(*words, code=EXIT_TEMPORARY)
    assert not (tmp_path / "corpora/es").exists()
    stored.mend()
    aura_says(*words)
    assert "/data/corpora/es/train-00000.bin" not in stored.of("GET")
    assert files_of(tmp_path / "corpora/es") == files_of(corpus.path)
    stored.mend()
    assert aura_says(*words) == f"{tmp_path}/corpora/es is up to date.\n{corpus.fingerprint}\n"
    assert len(stored.of("GET")) == 1

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    said = aura_says("fetch", WHERE, "--output", ".", code=EXIT_USAGE)
    assert said.count("\n") == 1 and "the directory in which you are" in said
    monkeypatch.chdir(tmp_path / "corpora/es")
    aura_says("fetch", WHERE, "--output", ".")  # it is there
    monkeypatch.chdir(tmp_path)

    # What is damaged is fetched again, and nothing else; also where its length is right.
    flip_a_bit(tmp_path / "corpora/es/train-00000.bin")
    (tmp_path / "corpora/es/validation-00000.bin").unlink()
    stored.mend()
    assert "is up to date" not in aura_says(*words)
    fetched = [path.rpartition("/")[2] for path in stored.of("GET")]
    assert sorted(fetched) == [META, META, "train-00000.bin", "validation-00000.bin"]
    assert files_of(tmp_path / "corpora/es") == files_of(corpus.path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    aura_says(*words)
    flip_a_bit(tmp_path / "corpora/es/train-00000.bin")
    aura_says(*words, code=EXIT_TEMPORARY)


def test_the_key_of_a_service_is_read_from_its_file(
    stored: Storage, aura_says: Aura, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd gives it: the environment names a directory, no key."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    keys = f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    (tmp_path / "s3").write_text(keys)
    (tmp_path / "config").write_text(f"[default]\nendpoint_url = {stored.environment['AWS_ENDPOINT_URL']}\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    aura_says("fingerprint", WHERE)


def test_who_names_no_address_does_not_load_the_libraries(corpus: Corpus) -> None:
    script = """
import sys
from aura.commands import cli
assert cli.main(["fingerprint", sys.argv[1]]) == 0
import aura.commands.copy_runs, aura.commands.prepare
print([name for name in ("s3fs", "fsspec", "botocore", "aiohttp") if name in sys.modules])
"""
    command = [sys.executable, "-c", script, str(corpus.path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines()[-1] == "[]"


def test_a_plan_reads_what_the_corpus_says_only(stored: Storage, aura_says: Aura) -> None:
    words = ("plan", "--preset", "gpt2-nano", "--corpus", WHERE, "--gpu", "3060", "--epochs", "2")
    aura_says(*words, "--vocab-size", "300")
    assert set(stored.of("GET") + stored.of("HEAD")) == {"/data/corpora/es/meta.json"}


def test_names_in_the_cache_do_not_meet() -> None:
    one, other = place("s3://data/a/b"), place("s3://data/a%2Fb/")
    assert isinstance(one, Address) and isinstance(other, Address)
    assert remote.prepared(one) != remote.prepared(other)
    assert place("a/b") == Path("a/b")
    assert str(other) == "s3://data/a%2Fb" and other.name == "a%2Fb" and str(one.parent) == "s3://data/a"
