"""A corpus or a checkpoint behind an URL: fetched once, whole, and never used when it is torn."""

from __future__ import annotations

import functools
import http.server
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from aura.checkpoint import manifest
from aura.checkpoint.remote import fetch
from aura.corpus.corpus import META, TOKENIZER_CONFIG, Corpus, fingerprint_of
from aura.corpus.listener import Silence
from aura.errors import EXIT_DATA, EXIT_TEMPORARY, EXIT_USAGE
from aura.storage import cache
from aura.storage.address import Address, place
from conftest import Aura, flip_a_bit
from object_storage import KEY, SECRET, Storage
from services import serving
from test_copy_runs import save
from trainers import complete, start

HERE = "data/corpora/es"
WHERE = f"s3://{HERE}"


def files_of(corpus: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.glob("*")}


@pytest.fixture
def stored(bucket: Storage, corpus: Corpus) -> Storage:
    """The bucket with a corpus in it."""
    shutil.copytree(corpus.path, bucket.files / HERE)
    bucket.settle()
    return bucket


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
    words = ("plan", "--preset", "gpt2-nano", "--corpus", WHERE, "--gpu", "3060", "--epochs", "2")
    aura_says(*words, "--vocab-size", "300")
    assert set(stored.of("GET") + stored.of("HEAD")) == {"/data/corpora/es/meta.json"}

    # A cache that somebody has damaged is mended, with what is missing only.
    (kept / "validation-00000.bin").write_bytes(b"")
    stored.mend()
    aura_says("fingerprint", WHERE)
    fetched = [path.rpartition("/")[2] for path in stored.of("GET")]
    assert fetched == [META, "validation-00000.bin", META]
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
        ({}, "s3://data", "s3://data is a whole bucket or server: name a directory in it, such as s3://data/aura."),
        ({}, "https://data/", "https://data is a whole bucket or server"),
        ({}, "s3:/data/es", "s3:/data/es is no address: it has to be like s3://"),
        ({}, "r2://data/es", "r2://data/es is no address"),
        ({}, "s3://data/../es", "s3://data/../es is no address"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_without_the_key(
    changes: dict[str, str], address: str, sentence: str, bucket: Storage, aura_says: Aura, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in changes.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name)
    said = aura_says("fingerprint", address, code=EXIT_USAGE)
    assert said.count("\n") == 1, said
    assert sentence in said
    assert SECRET not in said and KEY not in said
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_corpus_is_prepared_on_a_disk_and_copied(bucket: Storage, text: Path, aura_says: Aura) -> None:
    words = ["prepare", "--input", str(text), "--vocab-size", "300", "--output", WHERE]
    assert "rclone copy DIR s3:bucket/directory" in aura_says(*words, code=EXIT_USAGE)
    assert f"There is no corpus in {WHERE} (meta.json is missing)." in aura_says(
        "fingerprint", WHERE, code=EXIT_DATA
    )


def test_a_web_server_does_too(
    corpus: Corpus, aura_says: Aura, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AURA_CACHE", str(tmp_path / "cache"))

    class Files(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with serving(functools.partial(Files, directory=str(corpus.path.parent))) as port:  # type: ignore[arg-type]
        where = f"http://127.0.0.1:{port}/{corpus.path.name}"
        assert aura_says("fingerprint", where).endswith(f"{corpus.fingerprint}\n")
        said = aura_says("fingerprint", f"{where}/none", code=EXIT_DATA)
        assert said.startswith(f"There is no corpus in {where}/none ")
    assert "What was fetched before is taken: " in aura_says("fingerprint", where)
    said = aura_says("fingerprint", f"{where}/none", code=EXIT_TEMPORARY)
    assert said == f"{where}/none does not answer as it should (ClientConnectorError).\n"


def test_a_corpus_of_ones_own_directory(
    stored: Storage, corpus: Corpus, aura_says: Aura, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.fail("validation", 500)
    directory = tmp_path / "corpora/es"
    words = ("fetch", WHERE, "--output", str(directory))
    aura_says(*words, code=EXIT_TEMPORARY)
    assert not (directory / META).exists()
    stored.mend()
    aura_says(*words)
    assert "/data/corpora/es/train-00000.bin" not in stored.of("GET")
    assert files_of(directory) == files_of(corpus.path)
    stored.mend()
    assert aura_says(*words) == f"{directory} is up to date.\n{corpus.fingerprint}\n"
    assert len(stored.of("GET")) == 1

    # What is damaged is fetched again, and nothing else; also where its length is right.
    flip_a_bit(directory / "train-00000.bin")
    (directory / "validation-00000.bin").unlink()
    stored.mend()
    assert "is up to date" not in aura_says(*words)
    fetched = [path.rpartition("/")[2] for path in stored.of("GET")]
    assert sorted(fetched) == [META, META, "train-00000.bin", "validation-00000.bin"]
    assert files_of(directory) == files_of(corpus.path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    aura_says(*words)
    flip_a_bit(directory / "train-00000.bin")
    aura_says(*words, code=EXIT_TEMPORARY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", stored.environment["AWS_ENDPOINT_URL"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("Hola")
    aura_says("fetch", WHERE, "--output", str(tmp_path / "mine"), code=EXIT_DATA)
    assert files_of(tmp_path / "mine") == {"letter.txt": b"Hola"}


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
import aura.commands.prepare
print([name for name in ("s3fs", "fsspec", "botocore", "aiohttp") if name in sys.modules])
"""
    command = [sys.executable, "-c", script, str(corpus.path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines()[-1] == "[]"


def test_names_in_the_cache_do_not_meet() -> None:
    one, other = place("s3://data/a/b"), place("s3://data/a%2Fb/")
    assert isinstance(one, Address) and isinstance(other, Address)
    assert cache.directory_of("runs", one) != cache.directory_of("runs", other)
    assert place("a/b") == Path("a/b")
    assert str(other) == "s3://data/a%2Fb" and other.name == "a%2Fb" and str(one.parent) == "s3://data/a"


def test_a_run_goes_on_from_there_on_another_machine(
    bucket: Storage, corpus: Corpus, tmp_path: Path, aura_says: Aura
) -> None:
    """Two ranks fetch one corpus and one checkpoint, and learn what they would have learnt without."""
    (ours,) = complete(start(tmp_path / "one", corpus, 1))
    there = bucket.files / "data/runs/first"
    shutil.copytree(ours.run_dir, there)
    (there / TOKENIZER_CONFIG).write_text(json.dumps({"eos_token": "a"}))
    shutil.copytree(corpus.path, bucket.files / HERE)
    bucket.settle()
    checkpoint = "s3://data/runs/first/checkpoints/checkpoint-step-15"

    bucket.mend()
    settings = f"--corpus s3://data/corpora/es --resume-from {checkpoint} --join-timeout 60"
    (other, _) = complete(start(tmp_path / "other", corpus, 2, settings, one_disk=True))
    asked = [path.rpartition("/")[2] for path in bucket.of("GET")]
    assert asked.count("train-00000.bin") == 1, "each rank has fetched it"
    assert asked.count("optimizer.safetensors") == 1
    assert other.checkpoints()[-1] == "checkpoint-step-20"

    # The corpus is the one of before: alone, every bit is the same as without an interruption.
    (alone,) = complete(start(tmp_path / "alone", corpus, 1, settings))
    assert alone.files("checkpoint-step-20") == ours.files("checkpoint-step-20")

    aura_says("export", "--checkpoint", checkpoint, "--output", str(tmp_path / "exported"))
    assert (tmp_path / "exported/model.safetensors").is_file()
    special = json.loads((tmp_path / "exported" / TOKENIZER_CONFIG).read_text())
    assert (special["eos_token"], "bos_token" in special) == ("a", False), "not those of its run"
    words = ["export", "--checkpoint", f"{checkpoint}0", "--output", str(tmp_path / "x")]
    said = aura_says(*words, code=EXIT_USAGE)
    assert "is no checkpoint. There are: checkpoint-step-15, checkpoint-step-20." in said

    # One that was torn is not gone on from.
    flip_a_bit(there / "checkpoints/checkpoint-step-15/optimizer.safetensors")
    bucket.settle()
    words = ["train", "--preset", "gpt2-nano", "--corpus", str(corpus.path), "--resume-from", checkpoint]
    said = aura_says(*words, "--run-dir", str(tmp_path / "n"), code=EXIT_DATA)
    assert "optimizer.safetensors is damaged (its SHA-256 differs)" in said
    assert not [*(tmp_path / "n").rglob("*step*")]


def test_a_fetch_that_was_killed_leaves_nothing_in_the_way(bucket: Storage, tmp_path: Path) -> None:
    """In a container the next one has the same process number."""
    whole = save(tmp_path / "runs/first", 200)
    shutil.copytree(whole.parents[2], bucket.files / "data/runs")
    bucket.settle()
    checkpoints = tmp_path / "fetched"
    for pid in (os.getpid(), 99999):
        (checkpoints / f"{whole.name}{manifest.TEMPORARY}{pid}").mkdir(parents=True)
    address = place(f"s3://data/runs/first/checkpoints/{whole.name}")
    assert isinstance(address, Address)
    fetch(address, checkpoints, Silence())
    assert files_of(checkpoints / whole.name) == files_of(whole)
    assert {path.name for path in checkpoints.iterdir()} == {whole.name, ".lock"}
