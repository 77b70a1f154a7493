from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aura import durable
from aura.checkpoint import manifest
from aura.checkpoint import store as checkpoint
from aura.checkpoint.newest import Ballot, newest_valid, next_writer, winner
from aura.cluster.ranks import Ranks
from aura.config import resolve
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError
from aura.optim.adamw import AdamW
from aura.run import memory_copy
from aura.strategy.state import copies
from conftest import flip_a_bit
from torch import nn
from trainers import FORK, before

ALONE = Ranks(0, ["node0"], torch.device("cpu"))


def trained(steps: int, width: int = 4) -> tuple[nn.Linear, AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    optimizer = AdamW(model, resolve("gpt2-nano"))
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(width)).square().sum().backward()
        optimizer.step(lr=0.1)
    return model, optimizer


def write(directory: Path, name: str, model: nn.Linear, optimizer: AdamW, state: checkpoint.State) -> Path:
    parameters = checkpoint.parameters_of(model)
    return checkpoint.write(directory, name, parameters, optimizer.tensors(), state)


def save(directory: Path, step: int, kind: str = "checkpoint", writer: manifest.Writer | None = None) -> Path:
    state = {"step": step} | (manifest.described(writer) if writer else {})
    return write(directory, f"{kind}-step-{step}", *trained(step), state)


def newest(directory: Path, say: Callable[[str], None] = print) -> str | None:
    found = newest_valid([directory], say)
    return found and found.path.name


def begin(saver: checkpoint.Saver, step: int) -> None:
    model, optimizer = trained(step)
    parameters = checkpoint.parameters_of(model)
    saver.begin(f"checkpoint-step-{step}", parameters, optimizer.tensors, {"step": step})


def into(optimizer: AdamW) -> Callable[[dict[str, torch.Tensor]], None]:
    def load(state: dict[str, torch.Tensor]) -> None:
        for name, tensor in optimizer.tensors().items():
            tensor.copy_(state[name])

    return load


def accept(state: checkpoint.State) -> None:
    pass


def test_what_is_loaded_is_what_was_saved_and_a_refused_state_touches_no_parameter(tmp_path: Path) -> None:
    """In tensors and plain JSON, which its group may read: what copies runs is another user than the trainer
    (roles/run_copies), and safetensors would keep them from him."""
    files = [*save(tmp_path, 3).iterdir()]
    assert {file.suffix for file in files} == {".safetensors", ".json"}
    assert all(file.stat().st_mode & 0o040 for file in files)
    (wanted_model, wanted), (model, optimizer) = trained(3), trained(0)

    def refuse(state: checkpoint.State) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        checkpoint.agree_and_load([tmp_path], model, into(optimizer), ALONE, refuse, print)
    assert torch.equal(model.weight, trained(0)[0].weight)
    state = checkpoint.agree_and_load([tmp_path], model, into(optimizer), ALONE, accept, print)
    assert state == {"step": 3}
    assert torch.equal(model.weight, wanted_model.weight)
    assert torch.equal(model.bias, wanted_model.bias)
    for name, tensor in wanted.tensors().items():
        assert torch.equal(optimizer.tensors()[name], tensor), name
    assert optimizer.steps["weight"] == 3


def test_the_newest_counts_whatever_its_kind_and_the_last_attempt_before_the_number_of_steps(
    tmp_path: Path,
) -> None:
    for step, kind in ((9, "checkpoint"), (10, "interrupt"), (2, "checkpoint")):
        save(tmp_path, step, kind)
    assert newest(tmp_path) == "interrupt-step-10"
    for step, number in ((30, 1), (12, 2), (11, 2)):
        save(tmp_path, step, writer=manifest.Writer(number, f"attempt-{number}"))
    found = newest_valid([tmp_path], print)
    assert found and (found.step, found.writer) == (12, manifest.Writer(2, "attempt-2"))
    flip_a_bit(tmp_path / "checkpoint-step-12" / "model.safetensors")
    assert newest(tmp_path) == "checkpoint-step-11"


def test_an_attempt_has_a_number_above_all_that_the_disk_knows(tmp_path: Path) -> None:
    assert next_writer([tmp_path / "none"], "first", ALONE) == manifest.Writer(1, "first", ())
    for step, number in ((5, 1), (9, 4)):
        save(tmp_path, step, writer=manifest.Writer(number, "before"))
    save(tmp_path, 3, writer=manifest.Writer(6, "last", ("another", "before")))
    assert newest(tmp_path) == "checkpoint-step-3"
    checkpoint.go_back_to(tmp_path / "checkpoint-step-5")  # leaves behind what a later attempt wrote
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-step-5"]
    assert next_writer([tmp_path], "now", ALONE) == manifest.Writer(7, "now", ("another", "before", "last"))


OLD, STRAY, NEW = manifest.Writer(1, "old"), manifest.Writer(2, "stray"), manifest.Writer(2, "new")
FIRST, UNCOUNTED = manifest.Writer(1, "first", ()), manifest.Writer()
# Two that went on without each other, and the second was often started.
MANY, FEW = manifest.Writer(2, "many", ("first",)), manifest.Writer(9, "few", ("first",))
HEIR = manifest.Writer(10, "heir", ("few", "first", "many"))
BACK = manifest.Writer(3, "back", ("first", "many"))


@pytest.mark.parametrize(
    ("held", "nodes", "rank"),
    [
        # (attempt, step) of every rank
        ([None, None], "ab", None),
        ([None, (OLD, 5)], "ab", 1),
        # The most steps of one attempt, and the lowest rank that has them
        ([(OLD, 5), (OLD, 10), (OLD, 10)], "abc", 1),
        # Fewer steps of a later attempt, also where one disk alone has them
        ([(OLD, 12), (NEW, 8), (OLD, 12)], "abc", 1),
        ([(FIRST, 12), (MANY, 8), (FIRST, 12)], "abc", 1),
        # ... and of one before they were counted
        ([(UNCOUNTED, 12), (FIRST, 15), (UNCOUNTED, 12)], "abc", 1),
        # Two that went on without each other: what more nodes know, however many ranks one of them has
        ([(STRAY, 90), (NEW, 8), (NEW, 10), None], "abcd", 2),
        ([*[(STRAY, 90)] * 3, (NEW, 8), (NEW, 8)], "aaabc", 3),
        # ... whatever their numbers, and however many steps
        ([(FEW, 90), (FEW, 90), (MANY, 8), (MANY, 10), (MANY, 8)], "abcde", 3),
        ([(FEW, 90), (FIRST, 5), (MANY, 8), (MANY, 8)], "abcd", 2),
        # ... where a disk that stayed behind stands behind both, and one behind what came after it
        ([(FEW, 90), (BACK, 8), (MANY, 10)], "abc", 1),
        # ... and the number, then the most steps, where they know the same
        ([(MANY, 90), (FEW, 8)], "ab", 1),
        ([(NEW, 8), (STRAY, 90)], "ab", 1),
        # An attempt that knew of both is the newest, also where one disk alone has it
        ([(FEW, 90), (HEIR, 8), (MANY, 10), (MANY, 10)], "abcd", 1),
    ],
)
def test_which_checkpoint_wins(
    held: list[tuple[manifest.Writer, int] | None], nodes: str, rank: int | None
) -> None:
    ballots = [one and Ballot(*one, model="") for one in held]
    assert winner(ballots, list(nodes)) == rank


def test_what_lost_is_set_aside_and_only_so_much_of_it_is_kept(tmp_path: Path) -> None:
    for step, writer in ((5, FIRST), (7, FEW), (8, MANY), (12, FEW)):
        save(tmp_path, step, writer=writer)
    checkpoint.tidy(tmp_path, 8, MANY.number)
    assert sorted(checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)) == [5, 8]
    aside = {path.name.rpartition("-")[0] for path in tmp_path.glob("superseded-*")}
    assert aside == {"superseded-checkpoint-step-7", "superseded-checkpoint-step-12"}
    for step in (30, 20):
        checkpoint.go_back_to(tmp_path / "checkpoint-step-8")
        save(tmp_path, step, writer=HEIR)
    checkpoint.go_back_to(tmp_path / "checkpoint-step-8")
    checkpoint.rotate(tmp_path, keep=3, keep_every=0, newest=save(tmp_path, 9, writer=HEIR))
    kept = {path.name.rpartition("-")[0] for path in tmp_path.glob("superseded-*")}
    assert kept == {f"superseded-checkpoint-step-{step}" for step in (12, 20, 30)}


def test_of_what_is_set_aside_for_an_older_one_the_newest_stays_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    found = {path.name: path for path in checkpoint.checkpoints(tmp_path)}
    in_no_order = [found[f"checkpoint-step-{step}"] for step in (4, 1, 3, 2)]
    monkeypatch.setattr(checkpoint, "checkpoints", lambda directory: in_no_order)
    checkpoint.go_back_to(tmp_path / "checkpoint-step-1")
    aside = sorted(tmp_path.glob("superseded-*"), key=lambda path: path.name.rpartition("-")[2])
    assert [path.name.split("-")[3] for path in aside] == ["2", "3", "4"]


def test_a_copy_may_have_any_name_and_a_checkpoint_only_its_own(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    for name in ("suspect-step-3", "superseded-checkpoint-step-3-17", "best"):
        path = path.rename(tmp_path / name)
        assert manifest.verify(path)["step"] == 3
    path = path.rename(tmp_path / "checkpoint-step-4")
    with pytest.raises(manifest.Damaged):
        manifest.verify(path)


def test_a_file_server_without_fsync_of_directories_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    durable.flush(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Invalid argument"):
        durable.flush(tmp_path / "file")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, Path.unlink])
@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
def test_any_damage_is_refused_loudly(file: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    damage(tmp_path / "checkpoint-step-2" / file)
    said: list[str] = []
    assert newest(tmp_path, said.append) == "checkpoint-step-1"
    assert len(said) == 1
    assert said[0].startswith("REFUSED: checkpoint-step-2 is damaged")


@pytest.mark.parametrize(
    "other", [{"format": "another"}, {"files": {}}, {"step": 3}, {"writer": {"who": "?"}}], ids=str
)
def test_a_manifest_of_something_else_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    file = save(tmp_path, 2) / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | other))
    with pytest.raises(manifest.Damaged):
        manifest.read(file.parent)


def test_rotation_keeps_as_many_as_it_is_told_and_what_is_not_ours(tmp_path: Path) -> None:
    mine = {"best-so-far", "checkpoint-step-1 (copy)"}
    for name in (*mine, "checkpoint-step-2.tmp-77"):
        (tmp_path / name).mkdir()
    for step in range(1, 8):
        newest = save(tmp_path, step)
        checkpoint.rotate(tmp_path, keep=4, keep_every=0, newest=newest)
        kept = {path.name for path in tmp_path.iterdir()} - mine
        assert kept == {f"checkpoint-step-{i}" for i in range(max(1, step - 3), step + 1)}
    assert all((tmp_path / name).exists() for name in mine)


def test_a_save_that_fails_for_whatever_reason_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(checkpoint, "save_tensors", fail)
    saver = checkpoint.Saver(tmp_path, keep=1, keep_every=0)
    begin(saver, 1)
    assert not saver.wait()
    assert str(saver.error) == "out of pinned memory"
    assert not [*tmp_path.iterdir()]


def test_rotation_keeps_the_best_and_every_mth(tmp_path: Path) -> None:
    losses = {10: 5.0, 20: 3.0, 25: None, 30: 4.0, 40: 4.5, 50: 4.2}
    for step, loss in losses.items():
        state = {"step": step, "validation_loss": loss}
        newest = write(tmp_path, f"checkpoint-step-{step}", *trained(1), state)
    checkpoint.rotate(tmp_path, keep=1, keep_every=15, newest=newest)
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-step-{step}" for step in (20, 30, 50)}


def test_a_save_in_the_background_holds_what_was_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, disk_is_free, original = threading.Event(), threading.Event(), checkpoint.write

    def write_late(*arguments: Any) -> Path:
        is_writing.set()
        assert disk_is_free.wait(30) and not saver.collecting
        return original(*arguments)

    monkeypatch.setattr(checkpoint, "write", write_late)
    saver = checkpoint.Saver(tmp_path, keep=2, keep_every=0)
    model, optimizer = trained(3)
    wanted = model.weight.detach().clone()
    parameters = copies(checkpoint.parameters_of(model))
    saver.begin("checkpoint-step-3", parameters, optimizer.tensors, {"step": 3})
    assert not saver.wait(0)
    model.weight.data.zero_()
    assert is_writing.wait(30)
    disk_is_free.set()
    saver.wait_without_others(30)  # which it does not need any more
    assert saver.wait(0)
    manifest.verify(tmp_path / "checkpoint-step-3")
    checkpoint.load_parameters(tmp_path / "checkpoint-step-3", model)
    assert torch.equal(model.weight, wanted)


def test_where_memory_is_short_copies_are_files_that_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def anonymous() -> int:
        return int(re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024

    size, before = 64 << 20, anonymous()
    monkeypatch.setattr(checkpoint, "has_room", lambda size: False)
    allocate = checkpoint.room_for(size, tmp_path)
    taken = allocate(size).fill_(7)
    assert anonymous() - before < size / 4, "of the process' own memory"
    assert not [*tmp_path.iterdir()] and taken.sum() == 7 * size
    with pytest.raises(OSError, match=r"No space left|File too large"):
        allocate(1 << 60)
    monkeypatch.undo()
    own = checkpoint.room_for(size, tmp_path)(size).fill_(7)
    assert anonymous() - before > size / 2 and len(own) == size


@pytest.mark.parametrize("ending", ["killed", "error"])
@pytest.mark.parametrize("moment", range(6))
def test_an_end_at_any_moment_of_a_save_loses_that_save_at_most(
    moment: int, ending: str, tmp_path: Path
) -> None:
    """When the files are written, each time before the next is flushed, and after the rename."""
    save(tmp_path, 1)

    def work() -> None:
        count = 0

        def end(path: Path) -> None:
            nonlocal count
            if count == moment and ending == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if count == moment:
                raise OSError(5, "Input/output error", str(path))
            count += 1

        before(durable, "flush", end)()
        saver = checkpoint.Saver(tmp_path, keep=1, keep_every=0)
        begin(saver, 2)
        os._exit(0 if saver.wait() else 75)

    process = FORK.Process(target=work)
    process.start()
    process.join(30)
    assert process.exitcode == (-signal.SIGKILL if ending == "killed" else 75)
    assert newest(tmp_path) == f"checkpoint-step-{2 if moment == 5 else 1}"
    assert ending == "killed" or not list(tmp_path.glob("*.tmp-*"))
    checkpoint.tidy(tmp_path, step=2, number=0)
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_damaged_newer_one_does_not_push_out_good_ones_nor_is_it_deleted(tmp_path: Path) -> None:
    """Its disk may have been away for a moment. Of all that was set aside as many are kept as of good ones."""
    for step in (1, 2, 9):
        save(tmp_path, step)
    flip_a_bit(tmp_path / "checkpoint-step-9" / "model.safetensors")
    checkpoint.tidy(tmp_path, step=2, number=0)
    (aside,) = tmp_path.glob("damaged-checkpoint-step-9-*")
    (tmp_path / "superseded-checkpoint-step-8-2").mkdir()
    (tmp_path / "damaged-checkpoint-step-8-1").mkdir()
    checkpoint.rotate(tmp_path, 2, 0, newest=save(tmp_path, 3))
    kept = {"checkpoint-step-2", "checkpoint-step-3", aside.name, "superseded-checkpoint-step-8-2"}
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize(
    ("remove", "left"),
    [
        (lambda there: checkpoint.rotate(there, 1, 0, newest=there / "checkpoint-step-2"), 2),
        (lambda there: memory_copy.tidy(there, step=1, number=0), 1),
        (memory_copy.forget, None),
    ],
    ids=["rotated", "tidied", "forgotten"],
)
def test_what_was_killed_while_it_removed_one_leaves_no_damaged_one(
    remove: Callable[[Path], None], left: int | None, tmp_path: Path
) -> None:
    """The next start would say that it is, which no disk is to blame for; and a run that has no other would not
    begin."""
    for step in (1, 2):
        save(tmp_path, step)
    with pytest.MonkeyPatch.context() as patch:  # as far as it came
        patch.setattr(shutil, "rmtree", lambda path, **_: [file.unlink() for file in path.rglob("model.*")])
        remove(tmp_path)
    assert newest(tmp_path, pytest.fail) == (left and f"checkpoint-step-{left}")
    if left:
        checkpoint.tidy(tmp_path, step=2, number=0)
        assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-step-{left}"]
    checkpoint.tidy(tmp_path / "new", step=0, number=0)
    assert (tmp_path / "new").is_dir()  # how much room it has may be asked before it holds anything


def test_a_step_that_is_computed_again_replaces_the_old_one(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    flip_a_bit(path / "model.safetensors")
    save(tmp_path, 3)
    manifest.verify(path)


def test_a_full_disk_is_an_error_of_the_disk_and_leaves_the_older_one_alone(small_disk: Path) -> None:
    save(small_disk, 1)
    with pytest.raises(OSError, match="No space left on device"):
        write(small_disk, "checkpoint-step-2", *trained(1, width=100), {"step": 2})
    assert [path.name for path in small_disk.iterdir()] == ["checkpoint-step-1"]
    manifest.verify(small_disk / "checkpoint-step-1")


def test_a_checkpoint_from_before_a_setting_existed_can_be_resumed(corpus: Corpus) -> None:
    config = resolve("gpt2-nano")
    saved = asdict(config)
    for setting in ("optimizer", "keep_every"):
        del saved[setting]
    state = {"step": 3, "config": saved, "corpus": corpus.fingerprint, "world_size": 1}
    assert checkpoint.check_resumable(state, config, corpus, 1) == ["keep_every None -> 0"]
    with pytest.raises(ConfigError, match="optimizer=adamw, this run asks for muon"):
        checkpoint.check_resumable(state, replace(config, optimizer="muon"), corpus, 1)
