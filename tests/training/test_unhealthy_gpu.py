"""A rank whose GPU is called unhealthy: real trainers on the processor, which answers to "cpu" in place of a UUID."""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aura.corpus.corpus import Corpus
from aura.run import unhealthy_gpu
from aura.watch.faults import write_fault
from trainers import Fault, Trainer, at_step, complete, start

SAID = {"sentence": "GPU 0 of node1 has fallen off the bus (XID 79).", "remedy": "Restart node1."}


def found_at(step: int, folder: Path, hangs: bool = False) -> Fault:
    """In this step the watcher writes down a fault of this rank's GPU, and the rank has time to read it: what all are
    told at the end of the step is decided by then, so the next one is the last. Or it hangs, as with a GPU that is
    lost."""

    def apply_update() -> None:
        os.environ["AURA_FAULTS"] = str(folder)
        unhealthy_gpu.PAUSE = 0.05
        original, is_read = unhealthy_gpu.fault_of, threading.Event()

        def fault_of(*arguments: Any) -> Any:
            if fault := original(*arguments):
                is_read.set()
            return fault

        unhealthy_gpu.fault_of = fault_of
        if hangs:
            unhealthy_gpu.PATIENCE = 1.0

        def find() -> None:
            write_fault(folder, "cpu", SAID)
            assert is_read.wait(30)
            time.sleep(1000 if hangs else 0.2)

        at_step(step, find)()

    return apply_update


def ends(ranks: list[Trainer]) -> None:
    """All with 69; node1's own word for it, with the remedy, is what the other one says, too."""
    assert [rank.end() for rank in ranks] == [69, 69], ranks[0].text + ranks[1].text
    for rank in ranks:
        assert rank.status["state"] == "failed" and rank.status["exit_code"] == 69
        assert "has fallen off the bus (XID 79). Restart node1." in rank.status["message"]
    assert "rank 1 on node1" in ranks[0].status["message"]


def test_it_saves_as_suspect_and_all_end_for_good(corpus: Corpus, tmp_path: Path) -> None:
    settings = "--steps 12 --keep-checkpoints 1"
    faults = tmp_path / "faults"
    ranks = start(tmp_path, corpus, 2, settings, {1: found_at(8, faults)})
    ends(ranks)
    for rank in ranks:
        assert rank.checkpoints() == ["checkpoint-step-5", "suspect-step-9"], rank.text
        assert not (rank.run_dir / "done.json").exists()
    good = ranks[0].files("checkpoint-step-5")

    # Launched again before anything was repaired it does not begin; without that node it goes on from the good one.
    def still_there() -> None:
        os.environ["AURA_FAULTS"] = str(faults)

    again = start(tmp_path, corpus, 2, settings, {1: still_there})
    assert [rank.end() for rank in again] == [69, 69]
    assert "Restart node1." in again[0].text
    assert ranks[0].files("checkpoint-step-5") == good
    (alone,) = complete(start(tmp_path, corpus, 1, settings))
    assert "after step 5" in alone.text


def test_one_that_hangs_is_ended_without_a_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    ranks = start(tmp_path, corpus, 2, "--steps 12", {1: found_at(8, tmp_path / "faults", hangs=True)})
    ends(ranks)
    assert all(rank.checkpoints() == ["checkpoint-step-5"] for rank in ranks)


def test_on_a_slow_link_it_has_longer_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step, and a checkpoint that is collected over the link, take minutes each."""
    write_fault(tmp_path, "cpu", SAID)
    monkeypatch.setenv("AURA_FAULTS", str(tmp_path))
    slept: list[float] = []
    monkeypatch.setattr(unhealthy_gpu, "time", SimpleNamespace(sleep=slept.append))
    activity = SimpleNamespace(report=lambda: SimpleNamespace(usual=227.0))
    ended: queue.Queue[object] = queue.Queue()
    stop: Any = SimpleNamespace(unhealthy=None)
    unhealthy_gpu.watch(torch.device("cpu"), stop, activity, SimpleNamespace(seconds=200.0), ended.put)  # type: ignore[arg-type]
    assert ended.get(timeout=30) is stop.unhealthy
    assert slept == [120.0 + 2 * 427.0]


@pytest.mark.parametrize(
    ("said", "is_hardware"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be …", True),
        ("CUDA error: hardware stack error", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("CUDA error: device-side assert triggered", False),
        ("NCCL error in: ProcessGroupNCCL.cpp, remote process exited or there was a network error", False),
    ],
)
def test_only_hardware_is_an_unhealthy_gpu(said: str, is_hardware: bool) -> None:
    assert (unhealthy_gpu.fault_in(RuntimeError(said)) is not None) is is_hardware
