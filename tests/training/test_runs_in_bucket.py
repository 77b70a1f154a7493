"""Runs are copied into object storage whole or not at all, and come back as they were."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aura.checkpoint import manifest
from aura.commands import cli
from aura.corpus.corpus import Corpus
from aura.errors import EXIT_OK, EXIT_TEMPORARY, EXIT_USAGE
from object_storage import KEY, SECRET, Storage
from spanish import english_in
from test_copy_runs import save, tree
from trainers import TINY, complete, start

WHERE = "s3://data/runs"
Told = tuple[int, str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs/first"
    save(run, 100)
    save(run, 200)
    (run / "final").mkdir()
    (run / "final/config.json").write_bytes(b"{}")
    (run / "final/model.safetensors").write_bytes(b"model")
    (run / "tokenizer.json").write_bytes(b"tokenizer")
    (run / "rank-0/status.json").write_bytes(b"{}")
    return run


@pytest.fixture
def copy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    def copy(*words: str) -> Told:
        code = cli.main(["copy-runs", "--runs", str(tmp_path / "runs"), "--target", WHERE, *words])
        output = capfd.readouterr()
        return code, output.out + output.err

    return copy


def share_of(bucket: Storage) -> Path:
    return bucket.files / "data/runs/first"


def test_what_is_finished_is_copied_once_and_its_manifest_last(
    run: Path, bucket: Storage, copy: Callable[..., Told]
) -> None:
    (run / "checkpoints/checkpoint-step-300.tmp-1").mkdir()
    code, said = copy()
    assert code == EXIT_OK
    assert f"{WHERE}/first/checkpoints/checkpoint-step-200: 0.0 MB copied in" in said
    share = share_of(bucket)
    assert tree(share / "checkpoints") == tree(run / "checkpoints")
    assert tree(share / "final") == tree(run / "final")
    assert (share / "tokenizer.json").read_bytes() == b"tokenizer"
    assert not (share / "rank-0").exists()
    of_200 = [path for path in bucket.of("PUT") if "checkpoint-step-200/" in path]
    assert len(of_200) == 4 and of_200[-1].endswith(manifest.MANIFEST)
    assert [path for path in bucket.of("PUT") if "/final/" in path][-1].endswith("config.json")

    bucket.mend()
    assert copy("--keep", "0") == (EXIT_OK, "")
    assert not [line for line in bucket.asked if not line.startswith("GET /data?list-type=2")]


def test_what_has_changed_is_copied_again(run: Path, bucket: Storage, copy: Callable[..., Told]) -> None:
    copy()
    shutil.rmtree(run / "checkpoints/checkpoint-step-200")
    save(run, 200, fill=2.0)  # the same step, computed again
    later = time.time() + 5
    (run / "final/model.safetensors").write_bytes(b"other")
    os.utime(run / "final/model.safetensors", (later, later))
    (run / "training_log.csv").write_bytes(b"1,2,3\n")
    bucket.mend()
    assert copy()[0] == EXIT_OK
    assert tree(share_of(bucket) / "checkpoints") == tree(run / "checkpoints")
    assert tree(share_of(bucket) / "final") == tree(run / "final")
    assert (share_of(bucket) / "training_log.csv").read_bytes() == b"1,2,3\n"
    # What makes the old one valid goes before anything of the new one comes.
    of_200 = [line.split()[0] for line in bucket.asked if "200/manifest.json" in line or "200/model" in line]
    assert of_200.index("DELETE") < of_200.index("PUT")


def test_older_ones_go_only_after_a_newer_one_has_come(
    run: Path, bucket: Storage, copy: Callable[..., Told]
) -> None:
    checkpoints, share = run / "checkpoints", share_of(bucket) / "checkpoints"

    def there() -> set[int]:
        return {manifest.step_of(path) for path in manifest.checkpoints(share)}

    for step in (300, 400):
        copy("--keep", "2")
        save(run, step)
        shutil.rmtree(checkpoints / f"checkpoint-step-{step - 200}")
        os.utime(share / f"checkpoint-step-{step - 200}/manifest.json", (step, step))  # it has come earlier
        bucket.settle()
    bucket.fail("PUT /data/runs/first/checkpoints/checkpoint-step-400", 500)
    assert copy("--keep", "2")[0] == EXIT_TEMPORARY
    assert there() >= {200, 300}
    bucket.mend()
    copy("--keep", "2")
    assert there() == {300, 400}
    gone = [path.rpartition("/")[2] for path in bucket.of("DELETE") if "checkpoint-step-200/" in path]
    assert gone[0] == manifest.MANIFEST and len(gone) == 4
    # A disk that was lost takes no copy with it, and neither does a new beginning.
    shutil.rmtree(checkpoints)
    copy("--keep", "1")
    assert there() == {300, 400}
    save(run, 10)
    copy("--keep", "2")
    assert 10 in there() and len(there()) == 2


def test_a_server_that_fails_for_a_while_is_one_sentence_and_then_it_goes_on(
    run: Path, bucket: Storage, copy: Callable[..., Told]
) -> None:
    bucket.fail("PUT /data/runs/first/checkpoints/checkpoint-step-200/optimizer", 500)
    code, said = copy()
    assert (code, said.count("\n")) == (EXIT_TEMPORARY, 1)
    assert said == f"{WHERE} does not answer as it should (InternalError). It is tried again.\n"
    assert not [*share_of(bucket).rglob(manifest.MANIFEST)]
    bucket.mend()
    assert copy()[0] == EXIT_OK
    assert tree(share_of(bucket) / "checkpoints") == tree(run / "checkpoints")
    # What had come was not sent again.
    assert "/data/runs/first/checkpoints/checkpoint-step-200/model.safetensors" not in bucket.of("PUT")


def test_a_cut_and_two_errors_are_overcome_at_once(
    run: Path, bucket: Storage, copy: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "4")
    bucket.cut("PUT /data/runs/first/checkpoints/checkpoint-step-200/model")
    bucket.fail("PUT /data/runs/first/checkpoints/checkpoint-step-200/optimizer", 503, times=2)
    assert copy()[0] == EXIT_OK
    assert tree(share_of(bucket) / "checkpoints") == tree(run / "checkpoints")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "the server refuses the key (SignatureDoesNotMatch)."),
        ({"AWS_ACCESS_KEY_ID": "NOBODY"}, "the server refuses the key (InvalidAccessKeyId)."),
        (
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
            "does not answer as it should (EndpointConnectionError).",
        ),
    ],
)
def test_a_wrong_key_is_one_sentence_without_it(
    changes: dict[str, str],
    sentence: str,
    run: Path,
    bucket: Storage,
    copy: Callable[..., Told],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(run.parent / "second", 100)  # of each run the same would be said
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    code, said = copy()
    assert (code, said.count("\n")) == (EXIT_TEMPORARY, 1), said
    assert sentence in said and said.endswith("It is tried again.\n")
    assert KEY not in said and SECRET not in said and "wrong" not in said
    assert not [*(bucket.files / "data").rglob("*")]


def test_what_is_damaged_is_not_copied(run: Path, bucket: Storage, copy: Callable[..., Told]) -> None:
    older = save(run, 50)
    copy()
    shutil.rmtree(older)
    shutil.rmtree(run / "checkpoints/checkpoint-step-200")
    save(run, 200, fill=2.0)
    bucket.mend()
    with (run / "checkpoints/checkpoint-step-200/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    code, said = copy("--keep", "0")
    assert code == EXIT_OK
    assert "REFUSED" in said and "the checksum of model.safetensors differs" in said
    there = {path.parent.name for path in share_of(bucket).rglob(manifest.MANIFEST)}
    # The older ones stay, and so does the one whose name it has.
    assert there == {"checkpoint-step-50", "checkpoint-step-100", "checkpoint-step-200"}
    assert "/data/runs/first/checkpoints/checkpoint-step-200/model.safetensors" not in bucket.of("PUT")


def test_a_killed_copy_is_no_checkpoint_and_is_done_again(run: Path, bucket: Storage, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    whole = save(run, 300, size=10 << 20)  # 40 MB, in parts
    command = [sys.executable, "-m", "aura", "copy-runs", "--runs", str(tmp_path / "runs"), "--target", WHERE]
    process = subprocess.Popen([*command, "--rate", "20"])
    deadline = time.monotonic() + 120
    while not any("partNumber=2" in line for line in bucket.asked):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    share = share_of(bucket) / "checkpoints/checkpoint-step-300"
    assert not (share / "manifest.json").exists() and not (share / "model.safetensors").exists()
    assert [*share.glob(".rclone_temp*")], "nothing was half-way"
    bucket.mend()
    subprocess.run(command, check=True)
    assert tree(share) == tree(whole), "what the first one has left was not cleared away"
    manifest.verify(share)


def test_in_spanish(
    run: Path, bucket: Storage, copy: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AURA_LANG", "es")
    said = copy()[1]
    assert f"{WHERE}/first/final: copiado." in said
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    said += copy()[1]
    assert "el servidor rechaza la clave (SignatureDoesNotMatch)." in said
    assert said.endswith("Se intenta de nuevo.\n")
    assert not english_in(said), said


def test_a_run_goes_on_from_there_on_another_machine(
    bucket: Storage, corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks fetch one corpus and one checkpoint, and learn what they would have learnt without."""
    (ours,) = complete(start(tmp_path / "one", corpus, 1))
    (tmp_path / "runs").mkdir()
    shutil.copytree(ours.run_dir, tmp_path / "runs/first")
    assert cli.main(["copy-runs", "--runs", str(tmp_path / "runs"), "--target", WHERE]) == EXIT_OK
    directory = bucket.files / "data/corpora/es"
    shutil.copytree(corpus.path, directory)
    bucket.settle()
    checkpoint = f"{WHERE}/first/checkpoints/checkpoint-step-15"

    other = tmp_path / "other"
    words = ["--preset", "gpt2-nano", "--corpus", "s3://data/corpora/es", *TINY.split()]
    words += ["--run-dir", str(other), "--join-timeout", "60"]
    command = [sys.executable, "-m", "aura", "launch-local", "--gpus", "2", "--"]
    bucket.mend()
    resumed = subprocess.run(
        [*command, *words, "--resume-from", checkpoint],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    asked = [path.rpartition("/")[2] for path in bucket.of("GET")]
    assert asked.count("train-00000.bin") == 1, "each rank has fetched it"
    assert asked.count("optimizer.safetensors") == 1
    assert (other / "checkpoints/checkpoint-step-20").is_dir()

    # The corpus is the one of before: alone, every bit is the same as without an interruption.
    alone = tmp_path / "alone"
    words[words.index(str(other))] = str(alone)
    assert cli.main(["train", *words, "--resume-from", checkpoint]) == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        whole = ours.run_dir / "checkpoints/checkpoint-step-20" / name
        assert (alone / "checkpoints/checkpoint-step-20" / name).read_bytes() == whole.read_bytes()

    assert cli.main(["export", "--checkpoint", checkpoint, "--output", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported/model.safetensors").is_file()
    capfd.readouterr()
    assert (
        cli.main(["export", "--checkpoint", f"{checkpoint}0", "--output", str(tmp_path / "x")]) == EXIT_USAGE
    )
    assert "is no checkpoint. There are: checkpoint-step-15, checkpoint-step-20." in capfd.readouterr().err


def test_a_checkpoint_that_is_torn_is_not_gone_on_from(
    run: Path, bucket: Storage, corpus: Corpus, copy: Callable[..., Told], tmp_path: Path
) -> None:
    copy()
    file = share_of(bucket) / "checkpoints/checkpoint-step-200/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    bucket.settle()
    words = [
        "train",
        "--preset",
        "gpt2-nano",
        "--corpus",
        str(corpus.path),
        "--run-dir",
        str(tmp_path / "new"),
    ]
    words += ["--resume-from", f"{WHERE}/first/checkpoints/checkpoint-step-200"]
    assert cli.main(words) != EXIT_OK
    assert not [*(tmp_path / "new").rglob("*step*")]
