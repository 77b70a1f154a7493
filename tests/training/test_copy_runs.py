"""What a run has finished is copied to a disk or into object storage by roles/run_copies, and comes back as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from aura.checkpoint import manifest
from aura.checkpoint import store as checkpoint
from aura.cluster import quorum
from aura.cluster.quorum import QuorumState, Record, Vote
from aura.errors import EXIT_OK, EXIT_TEMPORARY
from object_storage import KEY, SECRET, Storage
from services import wait_until

PROGRAM = Path(__file__).parents[2] / "roles/run_copies/files/copy-runs"
DAY = 86400


@dataclass
class Target:
    """Where runs are copied to; `files`: where that is on this machine. `bucket`: none on a disk."""

    name: str
    files: Path
    bucket: Storage | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, runs: Path, *words: str) -> list[str]:
        program = [sys.executable, str(PROGRAM), "--runs", str(runs), "--target", self.name]
        return [*program, *(words if "--days" in words else ("--days", "1", *words))]

    def copy(self, runs: Path, *words: str, code: int = EXIT_OK) -> str:
        if self.bucket:
            self.bucket.settle()
        command, environment = self.command(runs, *words), os.environ | self.environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done
        return done.stdout + done.stderr

    def checkpoints(self, run: str = "first") -> set[int]:
        """The steps of those that are there."""
        directory = self.files / run / "checkpoints"
        return {manifest.step_of(path) for path in manifest.checkpoints(directory) if [*path.glob("man*")]}


@pytest.fixture(params=["disk", "bucket"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param == "disk":
        return Target(str(tmp_path / "share"), tmp_path / "share")
    bucket: Storage = request.getfixturevalue("bucket")
    remote = {"type": "s3", "provider": "Other", "env_auth": "true", "no_check_bucket": "true"}
    remote["endpoint"] = bucket.environment["AWS_ENDPOINT_URL"]
    environment = {f"RCLONE_CONFIG_S3_{name.upper()}": value for name, value in remote.items()}
    return Target("s3:data/runs", bucket.files / "data/runs", bucket, environment)


on_a_disk = pytest.mark.parametrize("target", ["disk"], indirect=True)
in_a_bucket = pytest.mark.parametrize("target", ["bucket"], indirect=True)


def save(run: Path, step: int, age: float = 0, fill: float = 1.0, size: int = 1000) -> Path:
    """A checkpoint of so many seconds ago."""
    parameters, state = {"weight": torch.full((size,), fill)}, {"weight.step": torch.zeros(1)}
    (run / "rank-0").mkdir(parents=True, exist_ok=True)
    (run / "rank-0/status.json").write_bytes(b"{}")
    path = checkpoint.write(run / "checkpoints", f"checkpoint-step-{step}", parameters, state, {"step": step})
    for file in path.iterdir():
        os.utime(file, (time.time() - age,) * 2)
    return path


def tree(directory: Path) -> dict[str, bytes]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def run(runs: Path) -> Path:
    run = runs / "first"
    save(run, 100, age=600)
    save(run, 200, age=300)
    (run / "final").mkdir()
    (run / "final/model.safetensors").write_bytes(b"model")
    (run / "final/config.json").write_bytes(b"{}")
    for name in ("tokenizer.json", "tokenizer_config.json", "done.json"):
        (run / name).write_bytes(name.encode())
    return run


def test_what_is_finished_is_copied_once(run: Path, runs: Path, target: Target) -> None:
    (run / "checkpoints/checkpoint-step-300.tmp-1").mkdir()
    (run / "checkpoints/damaged-checkpoint-step-400").mkdir()
    shutil.copytree(run / "checkpoints/checkpoint-step-200", run / "checkpoints/suspect-step-200")
    assert f"{target.name}/first/checkpoints/checkpoint-step-200 is copied." in target.copy(runs)
    there = target.files / "first"
    assert {path.name for path in (there / "checkpoints").iterdir()} == {
        "checkpoint-step-100",
        "checkpoint-step-200",
    }
    for path in manifest.checkpoints(there / "checkpoints"):
        manifest.verify(path)
    assert tree(there / "final") == tree(run / "final")
    assert {path.name for path in there.iterdir() if path.is_file()} == {
        path.name for path in run.glob("*.json")
    }
    if target.bucket:
        sent = target.bucket.of("PUT")
        of_200 = [path for path in sent if "/checkpoint-step-200/" in path]
        assert len(of_200) == 4 and of_200[-1].endswith(manifest.MANIFEST)
        assert [path for path in sent if "/final/" in path][-1].endswith("config.json")
        target.bucket.mend()

    before = {path: path.stat().st_mtime_ns for path in target.files.rglob("*")}
    assert target.copy(runs) == ""
    assert {path: path.stat().st_mtime_ns for path in target.files.rglob("*")} == before
    assert not target.bucket or not target.bucket.of("PUT")


def test_what_has_changed_is_copied_again(run: Path, runs: Path, target: Target) -> None:
    target.copy(runs)
    shutil.rmtree(run / "checkpoints/checkpoint-step-200")
    save(run, 200, fill=2.0)  # the same step, computed again
    for name in ("model.safetensors", "config.json"):
        (run / "final" / name).write_bytes(b"other")
        os.utime(run / "final" / name, (time.time() + 5,) * 2)
    (run / "training_log.csv").write_bytes(b"1,2,3\n")
    target.copy(runs)
    there = target.files / "first"
    assert tree(there / "checkpoints") == tree(run / "checkpoints")
    assert tree(there / "final") == tree(run / "final")
    assert (there / "training_log.csv").read_bytes() == b"1,2,3\n"


def test_what_is_old_goes_and_what_is_needed_stays(runs: Path, target: Target) -> None:
    """Needed are the newest one, whatever its age, and those that the run keeps."""
    run = runs / "first"
    for step, days in ((10, 9), (20, 8), (30, 7)):
        save(run, step, age=days * DAY)
    target.copy(runs, "--days", "20")
    half = target.files / "first/checkpoints/checkpoint-step-15/model.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"begun, and never completed")
    os.utime(half, (time.time() - 9 * DAY,) * 2)
    shutil.rmtree(run / "checkpoints/checkpoint-step-20")
    target.copy(runs, "--days", "10")
    assert target.checkpoints() == {10, 20, 30}
    target.copy(runs)
    assert target.checkpoints() == {10, 30} and not half.exists()
    # A disk that was lost takes no copy with it; what is begun anew takes over in the course of time.
    shutil.rmtree(run / "checkpoints")
    target.copy(runs)
    assert target.checkpoints() == {10, 30}
    save(run, 5)
    target.copy(runs)
    assert target.checkpoints() == {5, 30}
    target.copy(runs)
    assert target.checkpoints() == {5}
    assert target.bucket or [path.name for path in (target.files / "first/checkpoints").iterdir()] == [
        "checkpoint-step-5"
    ]


def test_a_node_that_has_all_copies_is_not_behind(run: Path, runs: Path, target: Target) -> None:
    """In object storage an earlier release left the time of the copy, which is later than that of the checkpoint."""
    target.copy(runs)
    save(run, 300, age=200)
    for path in (target.files / "first").rglob("*"):
        os.utime(path)
    assert "checkpoint-step-300 is copied" in target.copy(runs)
    assert target.checkpoints() == {100, 200, 300}
    assert target.copy(runs) == ""


def test_a_killed_copy_is_no_checkpoint_and_goes_on(runs: Path, target: Target) -> None:
    whole = save(runs / "first", 300, size=10 << 20)  # 40 MB
    there = target.files / "first/checkpoints/checkpoint-step-300"

    def is_half_way() -> bool:
        assert process.poll() is None
        return any(path.stat().st_size for path in there.glob("*model*"))

    command, environment = target.command(runs, "--rate", "10"), os.environ | target.environment
    if target.bucket:
        target.bucket.settle()
    process = subprocess.Popen(command, env=environment, process_group=0)
    wait_until(is_half_way, 120, lambda: "nothing was half-way")
    os.killpg(process.pid, 9)
    process.wait()
    assert target.checkpoints() == set()
    target.copy(runs)
    manifest.verify(there)
    assert (there / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_the_node_of_the_lowest_rank_that_trains_copies(
    run: Path, runs: Path, target: Target, tmp_path: Path
) -> None:
    def votes(run: Path, rank: int, record: Record, launch: str = "20261121-1") -> None:
        (run / f"rank-{rank}").mkdir(exist_ok=True)
        QuorumState(run / f"rank-{rank}" / quorum.FILE, launch, Vote(record)).write(Vote(record))

    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(runs, elsewhere)
    other = elsewhere / "first"
    (other / "rank-0").rename(other / "rank-1")
    (runs / "link").symlink_to(other)
    for directory, rank in ((run, 0), (other, 1)):
        votes(directory, rank, Record(1, (0, 1, 2)))
    assert target.copy(elsewhere) == ""
    assert "is copied" in target.copy(runs)
    votes(other, 1, Record(2, (1, 2)))
    save(other, 300)
    shutil.rmtree(other / "rank-0")
    assert "checkpoint-step-300 is copied" in target.copy(elsewhere)
    # The first one was cut off, is on, and does not know: it neither copies nor deletes what the other keeps.
    shutil.rmtree(run / "checkpoints/checkpoint-step-100")
    save(run, 150, age=200)
    said = target.copy(runs, "--days", "0")
    assert said == f"first is not copied from here: {target.name} has newer checkpoints, of another node.\n"
    assert target.checkpoints() == {100, 200, 300}
    # It is launched anew, and has rank 0 again.
    (run / "rank-0/vote.json").write_text('{"launch": "20261123-1"}')
    save(run, 310, age=-5)
    assert "checkpoint-step-310 is copied" in target.copy(runs)


def test_one_run_holds_up_no_other(run: Path, runs: Path, target: Target) -> None:
    save(runs / "a-broken-one", 100)
    (runs / "a-broken-one/checkpoints/checkpoint-step-100/model.safetensors").chmod(0)
    (runs / "lost+found/rank-0").mkdir(parents=True)
    run = run.rename(run.with_name("rank {1} of [2]"))
    words = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    command = [*(words if os.getuid() == 0 else ()), *target.command(runs)]
    done = subprocess.run(command, env=os.environ | target.environment, capture_output=True, text=True)
    assert done.returncode == EXIT_TEMPORARY, done
    assert done.stdout.startswith("a-broken-one cannot be copied now: ") or "is copied" in done.stdout
    assert "a-broken-one cannot be copied now: " in done.stdout and "permission denied" in done.stdout
    assert target.checkpoints("a-broken-one") == set()
    assert target.checkpoints(run.name) == {100, 200}


def test_what_a_run_lets_go_meanwhile_holds_up_nothing(
    run: Path, runs: Path, target: Target, tmp_path: Path
) -> None:
    """It may save faster than it can be copied."""
    save(run, 300)
    rclone = shutil.which("rclone")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rclone").write_text(
        f'#!/bin/sh\ncase "$*" in *checkpoint-step-300*) rm -rf {run}/checkpoints/checkpoint-step-300;; esac\n'
        f'exec {rclone} "$@"\n'
    )
    (tmp_path / "bin/rclone").chmod(0o755)
    target.environment["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    assert "checkpoint-step-200 is copied" in target.copy(runs)
    assert target.checkpoints() == {100, 200}


@on_a_disk
def test_a_disk_that_is_full_or_away_is_for_later(run: Path, runs: Path, target: Target) -> None:
    target.files.write_text("not a directory")
    assert "It is tried again." in target.copy(runs, code=EXIT_TEMPORARY)
    target.files.unlink()
    said = target.copy(runs, "--leave-free", "1e9", code=EXIT_TEMPORARY)
    assert "1000000000.0 GB shall stay free: delete old runs there." in said
    assert target.checkpoints() == set()


@in_a_bucket
def test_a_server_that_fails_is_one_sentence_and_then_it_goes_on(
    run: Path, runs: Path, target: Target, bucket: Storage
) -> None:
    bucket.fail("PUT /data/runs/first/checkpoints/checkpoint-step-200/optimizer", 403)
    said = target.copy(runs, code=EXIT_TEMPORARY)
    sentence = said.splitlines()[-1]
    assert sentence.startswith("first cannot be copied now: ") and sentence.endswith("It is tried again.")
    assert "AccessDenied" in sentence
    assert target.checkpoints() == set()
    bucket.mend()
    # A cut and two errors are overcome at once.
    bucket.fail("PUT /data/runs/first/checkpoints/checkpoint-step-200/optimizer", 503, times=2)
    bucket.cut("PUT /data/runs/first/checkpoints/checkpoint-step-100/model")
    target.copy(runs)
    assert tree(target.files / "first/checkpoints") == tree(run / "checkpoints")


@in_a_bucket
@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wrong", "SignatureDoesNotMatch"),
        ("AWS_ACCESS_KEY_ID", "", "credential"),
        ("RCLONE_CONFIG_S3_ENDPOINT", "http://127.0.0.1:1", "connection refused"),
    ],
)
def test_a_wrong_key_is_one_sentence(
    name: str, value: str, sentence: str, run: Path, runs: Path, target: Target, bucket: Storage
) -> None:
    save(runs / "second", 100)
    target.environment |= {name: value, "AWS_MAX_ATTEMPTS": "1", "RCLONE_LOW_LEVEL_RETRIES": "1"}
    said = target.copy(runs, code=EXIT_TEMPORARY)
    assert said.count("\n") == 1, said
    assert sentence.lower() in said.lower()
    assert KEY not in said and SECRET not in said and "wrong" not in said
    assert not [*(bucket.files / "data").rglob("*")]


@in_a_bucket
def test_the_key_of_a_service_is_read_from_its_file(
    run: Path, runs: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd gives it: the environment names a directory, no key."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name)
    keys = f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    (tmp_path / "s3").write_text(keys)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert "is copied" in target.copy(runs)
