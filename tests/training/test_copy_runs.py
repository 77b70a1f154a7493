"""What a run has finished is copied whole or not at all, to a disk as into object storage, and comes back as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from aura.checkpoint import manifest
from aura.checkpoint import store as checkpoint
from aura.cluster import register
from aura.cluster.register import Book, Record, Vote
from aura.commands import cli
from aura.copies import copy_runs, on_disk
from aura.copies.fetch import fetch
from aura.corpus.corpus import TOKENIZER_CONFIG, Corpus
from aura.corpus.listener import Silence
from aura.durable import publish
from aura.errors import EXIT_OK, EXIT_TEMPORARY, EXIT_USAGE
from aura.storage.address import place
from conftest import Aura, flip_a_bit
from object_storage import KEY, SECRET, Storage
from services import wait_until
from trainers import complete, start

BUCKET = "s3://data/runs"
STEP_200 = "/data/runs/first/checkpoints/checkpoint-step-200/"


@dataclass
class Target:
    """Where runs are copied to. `share`: where the copy of the run `first` is then. `bucket`: none on a disk."""

    address: str
    share: Path
    bucket: Storage | None = None

    @property
    def checkpoints(self) -> Path:
        return self.share / "checkpoints"

    def settle(self) -> None:
        if self.bucket:
            self.bucket.settle()
            self.bucket.mend()


@pytest.fixture(params=["disk", "bucket"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param == "disk":
        return Target(str(tmp_path / "share"), tmp_path / "share/first")
    bucket = request.getfixturevalue("bucket")
    return Target(BUCKET, bucket.files / "data/runs/first", bucket)


on_a_disk = pytest.mark.parametrize("target", ["disk"], indirect=True)
in_a_bucket = pytest.mark.parametrize("target", ["bucket"], indirect=True)


@pytest.fixture
def copy(target: Target, tmp_path: Path, aura_says: Aura) -> Aura:
    words = ["copy-runs", "--runs", str(tmp_path / "runs"), "--target", target.address]
    return partial(aura_says, *words, *([] if target.bucket else ["--leave-free", "0"]))


def save(
    run: Path, step: int, fill: float = 1.0, size: int = 1000, writer: manifest.Writer | None = None
) -> Path:
    parameters, state = {"weight": torch.full((size,), fill)}, {"weight.step": torch.zeros(1)}
    (run / "rank-0").mkdir(parents=True, exist_ok=True)
    (run / "rank-0/status.json").write_bytes(b"{}")
    about = {"step": step, **(manifest.described(writer) if writer else {})}
    return checkpoint.write(run / "checkpoints", f"checkpoint-step-{step}", parameters, state, about)


def tree(directory: Path) -> dict[str, bytes]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs/first"
    save(run, 100)
    save(run, 200)
    (run / "final").mkdir()
    (run / "final/model.safetensors").write_bytes(b"model")
    (run / "final/config.json").write_bytes(b"{}")
    (run / "tokenizer.json").write_bytes(b"tokenizer")
    (run / "tokenizer_config.json").write_bytes(b"special")
    return run


@pytest.mark.parametrize("flag", ["keep", "rate", "leave-free"])
def test_what_is_negative_is_refused(flag: str, run: Path, target: Target, copy: Aura) -> None:
    assert f"--{flag} -1" in copy(f"--{flag}", "-1", code=EXIT_USAGE)
    assert not target.share.exists()


def test_what_is_finished_is_copied_once(run: Path, target: Target, copy: Aura) -> None:
    (run / "checkpoints/checkpoint-step-300.tmp-1").mkdir()
    (run / "checkpoints/damaged-checkpoint-step-400").mkdir()
    said = copy()
    assert f"{target.address}/first/checkpoints/checkpoint-step-200: 0.0 MB copied in" in said
    names = {"checkpoint-step-100", "checkpoint-step-200"}
    assert {path.name for path in target.checkpoints.iterdir()} == names
    for name in names:
        manifest.verify(target.checkpoints / name)
        assert tree(target.checkpoints / name) == tree(run / "checkpoints" / name)
    assert tree(target.share / "final") == tree(run / "final")
    assert (target.share / "tokenizer.json").read_bytes() == b"tokenizer"
    assert (target.share / "tokenizer_config.json").read_bytes() == b"special"
    assert not (target.share / "rank-0").exists()
    if target.bucket:
        sent = target.bucket.of("PUT")
        of_200 = [path for path in sent if path.startswith(STEP_200)]
        assert len(of_200) == 4 and of_200[-1].endswith(manifest.MANIFEST)
        assert [path for path in sent if "/final/" in path][-1].endswith("config.json")
        target.bucket.mend()

    before = {path: path.stat().st_mtime_ns for path in target.share.rglob("*")}
    # Nothing is written again, and what the run keeps stays.
    assert copy("--keep", "0") == ""
    assert {path: path.stat().st_mtime_ns for path in target.share.rglob("*")} == before
    asked = target.bucket.asked if target.bucket else []
    assert not [line for line in asked if not line.startswith("GET /data?list-type=2")]


def test_what_has_changed_is_copied_again(run: Path, target: Target, copy: Aura) -> None:
    copy()
    shutil.rmtree(run / "checkpoints/checkpoint-step-200")
    save(run, 200, fill=2.0)  # the same step, computed again
    (run / "final/model.safetensors").write_bytes(b"other")
    later = time.time() + 5
    os.utime(run / "final/model.safetensors", (later, later))
    (run / "training_log.csv").write_bytes(b"1,2,3\n")
    target.settle()
    copy()
    assert tree(target.checkpoints) == tree(run / "checkpoints")
    assert tree(target.share / "final") == tree(run / "final")
    assert (target.share / "training_log.csv").read_bytes() == b"1,2,3\n"
    assert not [path for path in target.share.rglob(".*")]
    if target.bucket:  # what makes the old one valid goes before anything of the new one comes
        asked = target.bucket.asked
        of_200 = [line.split()[0] for line in asked if "200/manifest.json" in line or "200/model" in line]
        assert of_200.index("DELETE") < of_200.index("PUT")


def test_older_ones_go_only_after_a_newer_one_has_come(run: Path, target: Target, copy: Aura) -> None:
    def there() -> set[int]:
        return {manifest.step_of(path) for path in manifest.checkpoints(target.checkpoints)}

    for step in (300, 400):
        copy("--keep", "2")
        save(run, step)
        shutil.rmtree(run / f"checkpoints/checkpoint-step-{step - 200}")
        earlier = target.checkpoints / f"checkpoint-step-{step - 200}"
        os.utime(earlier / manifest.MANIFEST if target.bucket else earlier, (step, step))
        target.settle()
    if target.bucket:
        target.bucket.fail("PUT /data/runs/first/checkpoints/checkpoint-step-400", 500)
        copy("--keep", "2", code=EXIT_TEMPORARY)
        assert there() >= {200, 300}
        target.bucket.mend()
    copy("--keep", "2")
    assert there() == {300, 400}
    if target.bucket:
        gone = [path.rpartition("/")[2] for path in target.bucket.of("DELETE") if path.startswith(STEP_200)]
        assert gone[0] == manifest.MANIFEST and len(gone) == 4
    # A disk that was lost takes no copy with it, and neither does a new beginning.
    shutil.rmtree(run / "checkpoints")
    copy("--keep", "1")
    assert there() == {300, 400}
    save(run, 10)
    copy("--keep", "2")
    assert 10 in there() and len(there()) == 2
    assert not list(target.checkpoints.glob(".*"))


def test_copies_of_a_run_go_for_those_of_the_same_one_only(run: Path, target: Target, copy: Aura) -> None:
    """Its name may be taken again, when a disk was lost for instance."""
    shutil.rmtree(run)

    def write(writer: manifest.Writer, *steps: int) -> set[int]:
        for step in steps:
            save(run, step, writer=writer)
            copy("--keep", "1")
            shutil.rmtree(run / f"checkpoints/checkpoint-step-{step}")
            path = target.checkpoints / f"checkpoint-step-{step}"
            os.utime(path / manifest.MANIFEST if target.bucket else path, (step, step))
            target.settle()
        return {manifest.step_of(path) for path in manifest.checkpoints(target.checkpoints)}

    assert write(manifest.Writer(7, "old", ("older",)), 1, 2, 3) == {3}
    assert write(manifest.Writer(1, "new", ()), 4, 5, 6) == {3, 6}
    assert write(manifest.Writer(2, "newer", ("new",)), 7, 8) == {3, 8}


def test_what_is_damaged_is_not_copied(run: Path, target: Target, copy: Aura) -> None:
    older = save(run, 50)
    copy()
    shutil.rmtree(older)
    for step in (100, 200):
        shutil.rmtree(run / f"checkpoints/checkpoint-step-{step}")
        save(run, step, fill=2.0)
    (run / "checkpoints/checkpoint-step-100/manifest.json").write_text("{}")
    flip_a_bit(run / "checkpoints/checkpoint-step-200" / "model.safetensors")
    before = tree(target.checkpoints)
    target.settle()
    said = copy("--keep", "0")
    assert "REFUSED" in said and "the checksum of model.safetensors differs" in said
    # The older ones stay, and so do those whose names they have.
    assert tree(target.checkpoints) == before
    assert not target.bucket or f"{STEP_200}model.safetensors" not in target.bucket.of("PUT")
    good = save(run, 250)
    copy()
    assert tree(target.checkpoints / good.name) == tree(good)


@in_a_bucket
def test_a_key_that_may_not_delete_holds_up_no_other_run(run: Path, target: Target, copy: Aura) -> None:
    copy()
    for step in (100, 200):
        shutil.rmtree(run / f"checkpoints/checkpoint-step-{step}")
    save(run, 300)
    (run / "final/config.json").write_bytes(b"{ }")  # exported anew: the old one is deleted before
    save(run.with_name("second"), 100)
    assert target.bucket
    target.settle()
    for line in ("DELETE", "?delete"):
        target.bucket.fail(line, 403)
    said = copy("--keep", "1", code=EXIT_TEMPORARY)
    assert "may the key read, write and delete there?" in said
    assert (target.share.with_name("second") / "checkpoints/checkpoint-step-100").is_dir()
    assert (target.checkpoints / "checkpoint-step-300").is_dir()


def test_a_copy_that_was_torn_is_made_again(run: Path, target: Target, copy: Aura) -> None:
    copy()
    for step, tear in ((100, lambda path: path.unlink()), (200, lambda path: path.write_bytes(b""))):
        tear(target.checkpoints / f"checkpoint-step-{step}" / manifest.MODEL)
    target.settle()
    copy("--keep", "0")
    assert tree(target.checkpoints) == tree(run / "checkpoints")


def test_a_killed_copy_is_no_checkpoint_and_goes_on(run: Path, target: Target, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    whole = save(run, 300, size=10 << 20)  # 40 MB, in parts
    command = [sys.executable, "-m", "aura", "copy-runs", "--runs", str(tmp_path / "runs")]
    command += ["--target", target.address, *([] if target.bucket else ["--leave-free", "0"])]
    begun: list[Path] = []

    def is_half_way() -> bool:
        assert process.poll() is None
        if target.bucket:
            return any("partNumber=2" in line for line in target.bucket.asked)
        begun[:] = target.share.rglob(".checkpoint-step-300.*/model*")
        return any(path.stat().st_size >= on_disk.CHUNK for path in begun)

    process = subprocess.Popen([*command, "--rate", "20"])
    wait_until(is_half_way, 120, lambda: "nothing was half-way")
    process.kill()
    process.wait()
    there = target.checkpoints / "checkpoint-step-300"
    assert not (there / "manifest.json").exists() and not (there / "model.safetensors").exists()
    if target.bucket:
        assert [*there.glob(".rclone_temp*")], "nothing was half-way"
        target.bucket.mend()
    else:
        (part,) = begun
        inode, size = part.stat().st_ino, part.stat().st_size
        assert 0 < size < (whole / "model.safetensors").stat().st_size
        with part.open("r+b") as file:
            file.write(b"\xff")  # a byte that did not arrive as it was
    subprocess.run(command, check=True)
    assert tree(there) == tree(whole), "what the first one has left was not cleared away"
    manifest.verify(there)
    assert target.bucket or (there / "model.safetensors").stat().st_ino == inode
    assert not list(target.share.rglob(".*"))


@on_a_disk
def test_runs_that_another_node_leads_are_not_copied(
    run: Path, target: Target, copy: Aura, tmp_path: Path
) -> None:
    shutil.move(run / "rank-0", run / "rank-1")
    (run.parent / "link").symlink_to(tmp_path)
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "rank-0/status.json").write_bytes(b"{}")
    assert copy() == ""
    # Rank 0 was here, and a launch since has put it elsewhere.
    (run / "rank-0").mkdir()
    assert copy() == ""
    assert not target.share.parent.exists()


def test_while_the_first_node_is_away_another_one_copies(
    run: Path, target: Target, copy: Aura, tmp_path: Path
) -> None:
    """The lowest of those that train, as the votes say it that ranks write; the one that was cut off knows less."""

    def votes(run: Path, rank: int, record: Record, launch: str = "20261121-1") -> None:
        (run / f"rank-{rank}").mkdir(exist_ok=True)
        Book(run / f"rank-{rank}" / register.FILE, launch, Vote(record)).write(Vote(record))

    def copied(said: str) -> bool:
        target.settle()
        return ": 0.0 MB copied in" in said

    other = tmp_path / "elsewhere"
    shutil.copytree(run.parent, other)
    (other / "first/rank-0").rename(other / "first/rank-1")
    for directory, rank in ((run, 0), (other / "first", 1)):
        votes(directory, rank, Record(1, (0, 1, 2)))
    assert not copied(copy("--runs", str(other)))
    assert copied(copy())
    (target.share / "launch.json").write_text('{"launch": "20261121-1"}')  # as an earlier release wrote it
    target.settle()
    votes(other / "first", 1, Record(2, (1, 2)))
    save(other / "first", 300)
    shutil.rmtree(other / "first/rank-0")
    assert copied(copy("--runs", str(other)))
    shutil.rmtree(run / "checkpoints/checkpoint-step-200")
    save(run, 200, fill=2.0)
    said = copy()
    assert "another node leads it by now (launch 20261121-1, record 2)" in said
    for directory, rank in ((run, 0), (other / "first", 1)):
        votes(directory, rank, Record(3, (0, 1, 2)))
    assert copied(copy()), "the first one is back"
    assert copy("--runs", str(other)) == ""

    # A later launch has left it out; it is on, and does not know. Each would replace the other's copies for ever.
    (other / "first/rank-1").rename(other / "first/rank-0")
    votes(other / "first", 0, Record(0, (0, 1)), "20261122-1")
    save(other / "first", 200, fill=3.0)
    assert copied(copy("--runs", str(other)))
    said = copy()
    assert said.count("\n") <= 1
    assert "first is not copied from here: another node leads it by now (launch 20261122-1, " in said
    assert copy("--runs", str(other)) == ""
    assert tree(target.checkpoints) == tree(other / "first/checkpoints")
    (run / "rank-0/vote.json").write_text('{"launch": "20261123-1"}')  # it has rank 0 again
    assert copied(copy())
    assert tree(target.checkpoints / "checkpoint-step-200") == tree(run / "checkpoints/checkpoint-step-200")


@on_a_disk
def test_a_disk_that_cannot_be_written_is_for_later(run: Path, target: Target, copy: Aura) -> None:
    target.share.parent.write_text("not a directory")
    said = copy(code=EXIT_TEMPORARY)
    assert "first cannot be copied now: " in said and "tried again" in said
    target.share.parent.unlink()
    said = copy("--leave-free", "1e9", code=EXIT_TEMPORARY)
    assert "shall stay free. Delete old runs there. It is tried again." in said
    assert not [path for path in target.share.rglob("*step*")]


@on_a_disk
def test_where_nothing_can_be_copied_it_is_said(
    run: Path, target: Target, copy: Aura, tmp_path: Path
) -> None:
    assert "is no directory" in copy("--runs", str(tmp_path / "none"), code=EXIT_USAGE)
    said = copy("--runs", str(run), code=EXIT_USAGE)
    assert "is a run. It is the directory" in said and f"--runs {tmp_path / 'runs'}" in said
    said = copy("--runs", str(tmp_path), code=EXIT_TEMPORARY)
    assert f"no run in {tmp_path} has begun on this machine" in said
    assert not target.share.exists()
    (tmp_path / "empty").mkdir()
    assert copy("--runs", str(tmp_path / "empty")) == ""


def test_a_run_that_cannot_be_read_holds_up_no_other_one(run: Path, target: Target, copy: Aura) -> None:
    """Nor what is a disk's own, nor a run with a name like a rank's directory."""
    save(run.parent / "a-broken-one", 100)
    (run.parent / "a-broken-one/tokenizer.json").mkdir()
    unreadable = run.parent / "lost+found/rank-0/vote.json"
    unreadable.parent.mkdir(parents=True)
    unreadable.symlink_to(unreadable)
    run = run.rename(run.with_name("rank-study"))
    said = copy(code=EXIT_TEMPORARY)
    assert "a-broken-one cannot be copied now: " in said
    assert "lost+found" not in said, said
    assert tree(target.share.with_name("rank-study") / "checkpoints") == tree(run / "checkpoints")
    shutil.rmtree(run.parent / "a-broken-one")
    assert "lost+found" not in copy()


@in_a_bucket
def test_a_server_that_fails_for_a_while_is_one_sentence_and_then_it_goes_on(
    run: Path, target: Target, copy: Aura, bucket: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.fail(f"PUT {STEP_200}optimizer", 500)
    said = copy(code=EXIT_TEMPORARY)
    assert said == f"{BUCKET} does not answer as it should (InternalError). It is tried again.\n"
    assert not [*target.share.rglob(manifest.MANIFEST)]
    bucket.mend()
    # A cut and two errors are overcome at once.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "4")
    bucket.fail(f"PUT {STEP_200}optimizer", 503, times=2)
    bucket.cut("PUT /data/runs/first/checkpoints/checkpoint-step-100/model")
    copy()
    assert tree(target.checkpoints) == tree(run / "checkpoints")
    # What had come was not sent again.
    assert f"{STEP_200}model.safetensors" not in bucket.of("PUT")


@in_a_bucket
def test_a_wrong_key_is_one_sentence_whatever_the_number_of_runs(
    run: Path, copy: Aura, bucket: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run.parent / "second", 100)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    said = copy(code=EXIT_TEMPORARY)
    assert said.count("\n") == said.count("the server refuses the key") == 1, said
    assert "the server refuses the key (SignatureDoesNotMatch)." in said
    assert said.endswith("It is tried again.\n")
    assert not [*(bucket.files / "data").rglob("*")]
    assert KEY not in said and SECRET not in said and "wrong" not in said


@in_a_bucket
def test_a_checkpoint_that_is_torn_is_not_gone_on_from(
    run: Path, target: Target, copy: Aura, corpus: Corpus, tmp_path: Path
) -> None:
    copy()
    flip_a_bit(target.checkpoints / "checkpoint-step-200" / "model.safetensors")
    target.settle()
    words = ["train", "--preset", "gpt2-nano", "--corpus", str(corpus.path), "--run-dir", str(tmp_path / "n")]
    words += ["--resume-from", f"{BUCKET}/first/checkpoints/checkpoint-step-200"]
    assert cli.main(words) != EXIT_OK
    assert not [*(tmp_path / "n").rglob("*step*")]


@in_a_bucket
def test_a_fetch_that_was_killed_leaves_nothing_in_the_way(run: Path, copy: Aura, tmp_path: Path) -> None:
    """In a container the next one has the same process number."""
    copy()
    checkpoints, name = tmp_path / "fetched", "checkpoint-step-200"
    for pid in (os.getpid(), 99999):
        (checkpoints / f"{name}{manifest.TEMPORARY}{pid}").mkdir(parents=True)
    fetch(place(f"{BUCKET}/first/checkpoints/{name}"), checkpoints, Silence())
    assert tree(checkpoints / name) == tree(run / "checkpoints" / name)
    assert {path.name for path in checkpoints.iterdir()} == {name, ".lock"}


def test_a_run_goes_on_from_there_on_another_machine(
    bucket: Storage, corpus: Corpus, tmp_path: Path, aura_says: Aura
) -> None:
    """Two ranks fetch one corpus and one checkpoint, and learn what they would have learnt without."""
    (ours,) = complete(start(tmp_path / "one", corpus, 1))
    (tmp_path / "runs").mkdir()
    shutil.copytree(ours.run_dir, tmp_path / "runs/first")
    (tmp_path / "runs/first" / TOKENIZER_CONFIG).write_text(json.dumps({"eos_token": "a"}))
    aura_says("copy-runs", "--runs", str(tmp_path / "runs"), "--target", BUCKET)
    directory = bucket.files / "data/corpora/es"
    shutil.copytree(corpus.path, directory)
    bucket.settle()
    checkpoint = f"{BUCKET}/first/checkpoints/checkpoint-step-15"

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


@pytest.mark.parametrize("step", [100, 200], ids=["of-one-that-is-gone", "of-the-same"])
def test_what_an_interrupted_copy_left_takes_no_room(step: int, small_disk: Path, tmp_path: Path) -> None:
    """The disk has room for one and a half."""
    whole, there = save(tmp_path / "runs/first", 200, size=10_000), small_disk / "first/checkpoints"
    left = there / f".checkpoint-step-{step}.me"
    left.mkdir(parents=True)
    shutil.copy(whole / manifest.MODEL, left)
    said: list[str] = []
    disk = on_disk.Disk(small_disk, 0, copy_runs.Pace(0), "me")
    copy_runs.Copier(disk, 1, said.append).copy_all(tmp_path / "runs")
    assert tree(there) == tree(whole.parent), said


@in_a_bucket
def test_what_was_begun_long_ago_and_is_gone_here_is_cleared_away(
    run: Path, target: Target, copy: Aura
) -> None:
    copy()
    for step in (300, 400):
        left = target.checkpoints / f"checkpoint-step-{step}" / manifest.MODEL
        left.parent.mkdir()
        left.write_bytes(b"part")
    long_ago = time.time() - 2 * 86400
    os.utime(target.checkpoints / "checkpoint-step-300" / manifest.MODEL, (long_ago, long_ago))
    target.settle()
    copy()
    assert not [*(target.checkpoints / "checkpoint-step-300").glob("*")]
    assert left.exists(), "somebody may be sending the rest of it"


def test_what_a_run_lets_go_meanwhile_keeps_nothing_older(tmp_path: Path) -> None:
    """It may save faster than it can be copied."""
    run, target = tmp_path / "runs/first", tmp_path / "share"

    class Meanwhile(copy_runs.Pace):
        def passed(self, count: int) -> None:
            shutil.rmtree(run / "checkpoints/checkpoint-step-300", ignore_errors=True)

    def copied(pace: copy_runs.Pace) -> list[int]:
        copy_runs.Copier(on_disk.Disk(target, 0, pace), 2, print).copy_all(run.parent)
        return sorted(map(manifest.step_of, manifest.checkpoints(target / "first/checkpoints")))

    for step in (100, 200):
        save(run, step)
    assert copied(copy_runs.Pace(0)) == [100, 200]
    for step in (100, 200):
        shutil.rmtree(run / f"checkpoints/checkpoint-step-{step}")
        os.utime(target / f"first/checkpoints/checkpoint-step-{step}", (step, step))
        save(run, step + 200)
    assert copied(Meanwhile(0)) == [200, 400]


def test_a_model_that_is_replaced_while_it_is_copied_is_copied_again(tmp_path: Path) -> None:
    """With one of the same size, as another training of the same model is."""
    final, target = tmp_path / "runs/first/final", tmp_path / "share"

    def export(content: bytes, when: float) -> None:
        new = final.with_name("new")
        new.mkdir(parents=True)
        (new / "model.safetensors").write_bytes(content)
        os.utime(new / "model.safetensors", (when, when))
        publish(new, final)

    class Meanwhile(copy_runs.Pace):
        def passed(self, count: int) -> None:
            if (final / "model.safetensors").read_bytes() == b"old":
                export(b"new", 2e9)

    (tmp_path / "runs/first/rank-0").mkdir(parents=True)
    (tmp_path / "runs/first/rank-0/status.json").write_bytes(b"{}")
    export(b"old", 1e9)
    copier = copy_runs.Copier(on_disk.Disk(target, 0, Meanwhile(0)), 1, print)
    for _ in range(2):
        copier.copy_all(tmp_path / "runs")
    assert (target / "first/final/model.safetensors").read_bytes() == b"new"


def test_a_slow_pace_is_kept() -> None:
    pace, began = copy_runs.Pace(1e6), time.monotonic()
    for _ in range(4):
        pace.passed(50_000)
    assert time.monotonic() - began >= 0.2
