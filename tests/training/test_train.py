"""The trainer as a whole, with real processes, signals and sockets."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from aura.corpus.corpus import Corpus, sha256_of
from aura.corpus.sequences import Sequences
from aura.model.gpt import GPT
from aura.run import attempt
from aura.run.progress import Progress
from aura.strategy.sharded import Sharded
from conftest import flip_a_bit, prepare
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainers import (
    Fault,
    Trainer,
    at_step,
    before,
    before_micro_batch,
    both,
    complete,
    curve,
    send_self,
    start,
    stop_at,
)

GUIDE_TAGS = {
    *"Loss/train_step Loss/train_epoch Loss/val_epoch Time/epoch_seconds".split(),
    *"System/CPU_percent System/RAM_percent System/GPU_VRAM_MB".split(),
}


def test_a_run_without_interruption(reference: list[Trainer], corpus: Corpus) -> None:
    first, second = reference
    # What the guides show, word for word
    for rank, trainer in enumerate(reference):
        head = re.escape(f"[Rank {rank}/2 | Node node{rank} | Device cpu] ")
        for line in (
            r"Modo Distribuido\. Backend=gloo\. Sincronizando\.\.\.",
            r"Precisión activa: fp32 \| Autocast=OFF \| GradScaler=OFF",
            r"Config personalizada 'gpt2-nano': d_model=32, layers=1, heads=2, seq_len=16",
            r"Epoch 1 \| Step 5 \| Loss: \d\.\d{4} \| Sync=OK",
            r"Entrenamiento completado\. Gradientes sincronizados\.",
        ):
            assert re.search(f"^{head}{line}$", trainer.text, re.M), trainer.text
    epoch = r"Epoch 1/1 \| Loss entrenamiento: \d\.\d{4} \| Loss validación: \d\.\d{4} \| Duración epoch: \d+\.\ds"
    assert re.search(epoch, first.text)
    # It has learned, and says from where to where
    assert first.done["first_validation_loss"] == pytest.approx(math.log(300), abs=0.1)
    assert first.done["validation_loss"] < first.done["first_validation_loss"] - 0.3
    assert first.done["step"] == 20
    assert first.done["tokens_seen"] == 20 * 2 * 2 * 16
    saved = first.state("checkpoint-step-20")["progress"]
    assert saved["windows_seen"] == 20 * 2 * 2
    # Back and forth between releases (rollback.yml): one refuses what it does not know, another has written more.
    assert "validation_parts" not in saved
    assert Progress.of(saved | {"of_a_later_release": 1}) == Progress.of(saved)
    assert f"{corpus.unigram_entropy:.4f}" in first.text
    # Every node has the same, and can sample
    assert first.checkpoints() == second.checkpoints() == ["checkpoint-step-15", "checkpoint-step-20"]
    assert first.files("checkpoint-step-20") == second.files("checkpoint-step-20")
    assert (second.run_dir / "tokenizer.json").read_bytes() == (corpus.path / "tokenizer.json").read_bytes()
    for rank, trainer in enumerate(reference):
        status = trainer.status
        known = {"rank": rank, "world_size": 2, "node": f"node{rank}", "state": "done", "step": 20}
        known |= {"max_steps": 20, "sync": "OK", "setting": "strategy=sharded wire=fp32 delay=0.0"}
        assert {name: status[name] for name in known} == known
        assert status["tokens_per_second"] > 0 and status["waited"] > 0
        assert abs(time.time() - status["updated"]) < 600


def test_tensorboard_has_the_tags_of_the_guides(reference: list[Trainer]) -> None:
    events = EventAccumulator(str(reference[0].run_dir / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) >= GUIDE_TAGS
    assert list(curve(reference[0])) == list(range(1, 21))
    assert not (reference[1].run_dir / "tensorboard").exists(), "they may share a disk"


def test_a_finished_run_says_so_and_does_not_wait_for_others(
    reference: list[Trainer], corpus: Corpus, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(reference[0].run_dir.parents[1], folder)
    (again, _) = start(folder, corpus, 2, faults={1: send_self(signal.SIGKILL)})
    assert again.end() == 0
    assert "is done: 20 steps" in again.text
    assert again.done == reference[0].done
    # Another length is another run: it goes on, at the rate that it is given now.
    more = complete(start(folder, corpus, 2, "--steps 25 --lr 1e-2 --min-lr-ratio 1"))
    (changed,) = re.findall(r"Changed since step 20: (.*)\.$", more[0].text, re.M)
    assert {"steps 20 -> 25", "lr 0.002 -> 0.01"} <= set(changed.split(", "))
    assert more[0].done["step"] == 25
    with (more[0].run_dir / "training_log.csv").open() as file:
        assert [float(row["lr"]) for row in csv.DictReader(file)][-1] == 1e-2


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_ten_steps_an_end_and_ten_more_are_twenty_steps(
    ending: signal.Signals, reference: list[Trainer], corpus: Corpus, tmp_path: Path
) -> None:
    """Bit for bit: parameters, optimizer and every loss."""
    # A signal that comes during step 9 is agreed on in step 10.
    step = 9 if ending == signal.SIGTERM else 13
    ranks = start(tmp_path, corpus, 2, faults={1: at_step(step, send_self(ending))})
    if ending == signal.SIGTERM:
        # The one that was asked to stop has done so; the other has saved too, and wants to be started again.
        assert [trainer.end() for trainer in ranks] == [75, 0], ranks[0].text
        for trainer in ranks:
            assert trainer.status["state"] == "stopped"
            assert trainer.checkpoints() == ["checkpoint-step-5", "interrupt-step-10"]
    else:
        assert ranks[1].end() == -signal.SIGKILL
        ended = time.monotonic()
        assert ranks[0].end() == 75
        assert time.monotonic() - ended < 15
        assert "rank 1 on node1" in ranks[0].text.splitlines()[-1]
        assert ranks[0].status["state"] == "failed"
        assert "rank 1 on node1" in ranks[0].status["message"]
        assert ranks[0].checkpoints() == ["checkpoint-step-10", "checkpoint-step-5"]
    ranks = complete(start(tmp_path, corpus, 2))
    assert "Continuing after step 10." in ranks[0].text
    for trainer in ranks:
        assert trainer.files("checkpoint-step-20") == reference[0].files("checkpoint-step-20")
    assert curve(ranks[0]) == curve(reference[0])
    assert ranks[0].done["validation_loss"] == reference[0].done["validation_loss"]


def test_sigterm_while_waiting_for_the_others(corpus: Corpus, tmp_path: Path) -> None:
    (waiting, _) = start(tmp_path, corpus, 2, faults={1: send_self(signal.SIGKILL)})
    waiting.says("rank 0 waits")
    assert waiting.status["state"] == "joining"
    os.kill(waiting.pid, signal.SIGTERM)
    assert waiting.end(seconds=10) == 0
    assert waiting.status["state"] == "stopped"


def test_all_talk_gloo_where_one_rank_cannot_use_nccl(corpus: Corpus, tmp_path: Path) -> None:
    """A node whose driver is broken must not let the others wait for it in another language."""

    def have_a_gpu() -> None:
        attempt.choose_device = lambda place, backend: (torch.device("cpu"), "nccl")

    first, second = complete(start(tmp_path, corpus, 2, "--steps 5", faults={1: have_a_gpu}))
    assert re.search(r"Backend=gloo: rank 0 on node0 \(127\.0\.0\.1\) cannot use NCCL\.", second.text)
    assert first.files("checkpoint-step-5") == second.files("checkpoint-step-5")


def test_a_corpus_smaller_than_a_step_can_be_repeated(corpus: Corpus, tmp_path: Path) -> None:
    sequences = len(Sequences(corpus, "train", 16))
    settings = f"--batch-size {sequences + 1} --steps 1 --warmup-steps 0"
    (refused,) = start(tmp_path, corpus, 1, settings)
    assert refused.end() == 65
    assert f"takes {sequences + 1} (micro-batch" in refused.text
    (trainer,) = complete(start(tmp_path, corpus, 1, f"{settings} --allow-dataset-oversubscription"))
    assert trainer.done["tokens_seen"] == (sequences + 1) * 16


@pytest.mark.parametrize("settings", ["", "--optimizer muon"], ids=["adamw", "muon"])
def test_five_ranks_three_and_one_are_one_run(settings: str, corpus: Corpus, tmp_path: Path) -> None:
    """A checkpoint does not know how many have written it (tolerance 1e-4 nats); said in tokens, batch and length stay
    as they are."""
    settings += " --global-batch-tokens 480 --tokens 9600 --batch-size 30"
    (one,) = complete(start(tmp_path / "one", corpus, 1, settings))

    def until(step: int, world_size: int) -> str:
        # A signal that comes during a step is agreed on in the next one.
        stop = {0: at_step(step - 1, send_self(signal.SIGTERM))}
        ranks = start(tmp_path, corpus, world_size, settings, stop)
        assert [trainer.end() for trainer in ranks] == [0, *[75] * (world_size - 1)], ranks[0].text
        assert ranks[0].checkpoints()[-1] == f"interrupt-step-{step}"
        return ranks[0].text

    until(4, 5)
    assert "Changed since step 4: ranks 5 -> 3." in until(8, 3)
    assert "Changed since step 8: ranks 3 -> 1." in until(13, 1)
    five = complete(start(tmp_path, corpus, 5, settings))
    assert "Changed since step 13: ranks 1 -> 5." in five[0].text
    assert (five[0].done["step"], five[0].done["tokens_seen"]) == (20, 9600)
    sent = "sends step 13 to rank 1 on node1, rank 2 on node2, rank 3 on node3, rank 4 on node4"
    assert sent in five[4].text
    assert len({trainer.files("checkpoint-step-20") for trainer in five}) == 1
    assert curve(five[0]) == pytest.approx(curve(one), abs=1e-4)
    assert "Sync=-" in one.text  # with one rank there is nothing to compare, and nothing is claimed
    assert "Gradients synchronised" not in one.text


def test_a_checkpoint_of_a_strategy_that_is_gone_goes_on(
    reference: list[Trainer], corpus: Corpus, tmp_path: Path
) -> None:
    for trainer in stop_at(9, tmp_path, corpus, 2, "--strategy ddp"):
        assert "strategy=ddp is now strategy=sharded" in trainer.text
        state = trainer.state("interrupt-step-10")
        del state["config"]["wire"]
        assert state["config"]["strategy"] == "sharded"
        state["config"]["strategy"] = "ddp"
        file = trainer.run_dir / "checkpoints/interrupt-step-10/state.json"
        file.write_text(json.dumps(state))
        manifest = json.loads(file.with_name("manifest.json").read_text())
        manifest["files"]["state.json"] = {"sha256": sha256_of(file), "bytes": file.stat().st_size}
        file.with_name("manifest.json").write_text(json.dumps(manifest))
    ranks = complete(start(tmp_path, corpus, 2))
    (changes,) = [line for line in ranks[0].text.splitlines() if "Changed since step 10" in line]
    assert changes.endswith("Changed since step 10: strategy ddp -> sharded.")
    assert curve(ranks[0]) == pytest.approx(curve(reference[0]), abs=1e-4)


def test_later_steps_of_a_disk_that_was_away_do_not_come_back(corpus: Corpus, tmp_path: Path) -> None:
    """node1's disk is taken out after step 12; the others go back to step 5 and on from there; then it is put back."""
    settings = "--keep-checkpoints 9"
    for trainer in stop_at(11, tmp_path, corpus, 2, settings):
        checkpoints = trainer.run_dir / "checkpoints"
        shutil.copytree(checkpoints, tmp_path / "away", dirs_exist_ok=True)
        for name in ("interrupt-step-12", "checkpoint-step-10"):
            shutil.rmtree(checkpoints / name)
    (_, second) = stop_at(7, tmp_path, corpus, 2, settings)
    assert "Continuing after step 5." in second.text
    shutil.rmtree(second.run_dir / "checkpoints")
    (tmp_path / "away").rename(second.run_dir / "checkpoints")

    first, second = complete(start(tmp_path, corpus, 2, settings))
    assert "Continuing after step 8." in first.text
    assert "sends step 8 to rank 1 on node1" in second.text
    assert "interrupt-step-12 is of an attempt" in second.text
    aside = [name.rpartition("-")[0] for name in second.checkpoints() if name.startswith("superseded")]
    assert aside == ["superseded-checkpoint-step-10", "superseded-interrupt-step-12"]
    assert first.files("checkpoint-step-10") == second.files("checkpoint-step-10")


def test_one_node_that_went_on_alone_and_was_often_started_does_not_win(
    corpus: Corpus, tmp_path: Path
) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    stop_at(4, together, corpus, 3)
    (alone / "node0").mkdir(parents=True)
    (together / "node2" / "run").rename(alone / "node0" / "run")
    for step in (9, 12, 15):
        stop_at(step, alone, corpus, 1)
    stop_at(7, together, corpus, 2)
    (alone / "node0" / "run").rename(together / "node2" / "run")
    shutil.rmtree(together / "node2" / "run" / "rank-0")
    *_, third = complete(start(together, corpus, 3))
    assert "Continuing after step 8." in third.text
    assert "sends step 8 to rank 2 on node2" in third.text
    assert any(name.startswith("superseded-interrupt-step-16") for name in third.checkpoints())


def test_a_checkpoint_is_sent_only_to_the_rank_that_lacks_it(corpus: Corpus, tmp_path: Path) -> None:
    def note(rank: int) -> Fault:
        def write(name: str, tensor: torch.Tensor, other: int) -> None:
            with (tmp_path / f"moved-{rank}").open("a") as file:
                file.write(f"{name} {tensor.nbytes}\n")

        return both(*(before(dist, name, partial(write, name)) for name in ("send", "recv")))

    straight = complete(start(tmp_path / "straight", corpus, 3))
    stop_at(9, tmp_path / "run", corpus, 3)
    (tmp_path / "run/node0").rename(tmp_path / "broken-node0")
    ranks = complete(start(tmp_path / "run", corpus, 3, faults={rank: note(rank) for rank in range(3)}))
    assert "rank 1 on node1 sends step 10 to rank 0 on node0" in ranks[0].text
    for trainer in ranks:
        assert trainer.files("checkpoint-step-20") == straight[0].files("checkpoint-step-20")
    lines = [(tmp_path / f"moved-{rank}").read_text().split() for rank in (0, 1)]
    assert set(lines[0][::2]) == {"recv"} and set(lines[1][::2]) == {"send"}
    assert lines[0][1::2] == lines[1][1::2]
    checkpoint_size = sum(len(part) for part in ranks[0].files("checkpoint-step-20"))
    assert sum(map(int, lines[0][1::2])) == pytest.approx(checkpoint_size, rel=0.2)  # and the names in it
    assert not (tmp_path / "moved-2").exists()


def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(corpus: Corpus, tmp_path: Path) -> None:
    complete(start(tmp_path, corpus, 2, "--steps 15"))
    for node in ("node0", "node1"):
        flip_a_bit(tmp_path / node / "run/checkpoints/checkpoint-step-15/optimizer.safetensors")
    for trainer in complete(start(tmp_path, corpus, 2)):
        assert "REFUSED: checkpoint-step-15 is damaged" in trainer.text
        assert "Continuing after step 10." in trainer.text
        *good, damaged = trainer.checkpoints()
        assert good == ["checkpoint-step-15", "checkpoint-step-20"]
        assert damaged.startswith("damaged-checkpoint-step-15-")


def drift_in_a_step(model: GPT, number: int) -> None:
    """One bit of one number; the very last ones may be rounded away by the next update."""
    if number == 7:
        model.wte.weight.data.view(torch.int32)[3, 3] ^= 1 << 12


COMPARED = itertools.count(1)


def drift_after_the_owners_have_sent_their_weights(strategy: Sharded) -> None:
    """Before that, they come over it."""
    if next(COMPARED) == 5:  # at the start, after steps 1, 5 (and before it is saved) and 10
        strategy.complete()
        strategy.parameters["wte.weight"].data.view(torch.int32)[3, 3] ^= 1


@pytest.mark.parametrize(
    ("settings", "drift"),
    [
        ("--wire bf16", before_micro_batch(drift_in_a_step)),
        ("", before(Sharded, "compare", drift_after_the_owners_have_sent_their_weights)),
    ],
    ids=["in a step", "after it"],
)
def test_ranks_that_have_drifted_apart_stop(
    settings: str, drift: Fault, corpus: Corpus, tmp_path: Path
) -> None:
    ranks = start(tmp_path, corpus, 3, settings, faults={1: drift})
    assert [trainer.end() for trainer in ranks] == [65, 65, 65], ranks[0].text
    for trainer in ranks:
        assert "Sync=FAILED at step 10: the parameters of rank 1 on node1 differ" in trainer.text
        assert "Step 10 |" not in trainer.text
        assert trainer.checkpoints() == ["checkpoint-step-5"]
        assert trainer.status["sync"] == "FAILED"


def test_ranks_that_mean_something_else_are_refused(corpus: Corpus, text: Path, tmp_path: Path) -> None:
    other = prepare([text], tmp_path / "other", 290, 0.1)
    ranks = start(tmp_path / "a", [corpus, other], 2)
    assert [trainer.end() for trainer in ranks] == [65, 65], ranks[0].text
    assert "The corpus of rank 1 on node1 differs" in ranks[0].text
    # A run directory that was trained on something else is left as it is.
    complete(start(tmp_path / "b", corpus, 1, "--steps 5"))

    def files() -> dict[Path, bytes]:
        found = (path for path in (tmp_path / "b").rglob("*.json") if "status" not in path.name)
        return {path: path.read_bytes() for path in found}

    kept = files()
    for changed, settings, code in ((other, "--steps 6", 64), (corpus, "--steps 6 --d-model 64", 64)):
        (trainer,) = start(tmp_path / "b", changed, 1, settings)
        assert trainer.end() == code
        assert "use another --run-dir" in trainer.text
    assert files() == kept
