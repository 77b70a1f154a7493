"""One rank's training, from the first line to the last.

`run` joins the gang and turns whatever happens into an exit code; `train` reads from top to bottom.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from aura import checkpoint, console, gang
from aura.board import Board
from aura.config import TrainConfig
from aura.corpus import TOKENIZER, Corpus, read_corpus
from aura.data import Order, Windows, check_corpus, even_share, share_of
from aura.errors import EXIT_OK, EXIT_TEMPORARY, AuraError, ConfigError, DataError
from aura.model import GPT
from aura.optimizer import AdamW
from aura.place import Place, choose_device, place_from_environment
from aura.status import Status, write_atomically
from aura.sync import CollectiveFailed, DataParallel, Ranks, checksum, collective

# A checkpoint of a run with other values of these is another model or another order of the data.
FIXED = ("layers", "heads", "d_model", "seq_len", "vocab_size", "seed", "strategy")
SMALLEST_LOSS_SCALE = 2.0**-20  # fp16: gradients that are not finite at this scale are not finite at any


@dataclass
class Progress:
    """How far the run has come; part of every checkpoint. Losses are nats per token."""

    step: int = 0
    windows_seen: int = 0  # the position in the data
    tokens_seen: int = 0
    epoch_loss_sum: float = 0.0  # of the epoch that is under way
    epoch_tokens: float = 0.0
    epoch_seconds: float = 0.0
    loss: float | None = None
    validation_loss: float | None = None
    first_validation_loss: float | None = None


class StoppedWhileWaiting(BaseException):
    """SIGTERM or SIGINT came while nothing was under way that would have to be saved."""


class StopSignal:
    """SIGTERM and SIGINT. All ranks agree on it at the end of a step; while waiting for the gang it acts at once."""

    def __init__(self) -> None:
        self.requested = False
        self.waiting = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self.waiting:
            self.waiting = False
            raise StoppedWhileWaiting


def run(
    config: TrainConfig, corpus_dir: Path, run_dir: Path, log_dir: Path, backend: str, join_timeout: float
) -> int:
    """Train as the rank that the environment says; the exit code (see aura/errors.py)."""
    place = place_from_environment()
    device, backend = choose_device(place, backend)
    speaker = console.Console(place.rank, place.world_size, place.node, str(device))
    status = Status(
        run_dir / f"rank-{place.rank}" / "status.json",
        rank=place.rank,
        world_size=place.world_size,
        node=place.node,
        device=str(device),
        max_steps=config.steps,
    )

    def end(state: str, sentence: str, code: int) -> int:
        speaker.say(sentence)
        status.set(state=state, message=sentence)
        return code

    def end_now(sentence: str) -> NoReturn:
        """Without destructors: those of torch.distributed may wait for ranks that are gone."""
        end("failed", sentence, EXIT_TEMPORARY)
        exit_now(EXIT_TEMPORARY)

    stop = StopSignal()
    members: gang.Gang | None = None
    try:
        corpus = read_corpus(corpus_dir)
        windows_per_step = sum(config.shares(place.world_size))
        check_corpus(corpus, config.vocab_size, config.preset, config.seq_len, windows_per_step)
        if is_done(run_dir, config, corpus):
            status.set(step=config.steps)
            return end("done", f"{run_dir} is done: {config.steps} steps of this configuration.", EXIT_OK)
        if place.world_size > 1:
            speaker.say(console.distributed(backend))
            status.set(state="joining", message="waiting for the other ranks")
            members = gang.join(
                rank=place.rank,
                world_size=place.world_size,
                master_address=place.master_address,
                master_port=place.master_port,
                run=run_dir.absolute().name,
                node=place.node,
                join_timeout=join_timeout,
                report=speaker.say,
            )
            status.set(attempt=members.attempt, message="")
            members.watch(end_now)
            stop.waiting = False
            with collective():
                timeout = timedelta(seconds=config.collective_timeout)
                dist.init_process_group(
                    backend,
                    store=members.store,
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout=timeout,
                )
        else:
            speaker.say(console.alone())
            status.set(state="joining", attempt="alone")
            stop.waiting = False
        nodes = [member.node for member in members.members] if members else [place.node]
        ranks = Ranks(place.rank, nodes, device)
        finished = train(config, corpus, run_dir, log_dir, place, device, ranks, stop, speaker.say, status)
    except StoppedWhileWaiting:
        return end("stopped", "Stopped while waiting for the other ranks; nothing was lost.", EXIT_OK)
    except gang.GangBroken as error:
        return end("failed", str(error), EXIT_TEMPORARY)
    except gang.GangMismatch as error:
        return end("failed", str(error), ConfigError.exit_code)
    except CollectiveFailed as error:
        assert members
        end_now(members.explain(error))
    except AuraError as error:  # once the gang is there, these are raised by all ranks alike
        code = end("failed", str(error), error.exit_code)
        leave(members)
        return code
    except Exception as error:
        traceback.print_exc()
        end("failed", f"{type(error).__name__}: {error}", 1)
        exit_now(1)  # the gang notices
    leave(members)
    if finished:
        return end("done", console.completed(ranks_compared=place.world_size > 1), EXIT_OK)
    if stop.requested:
        return end("stopped", "Saved and stopped.", EXIT_OK)
    return end("stopped", "Saved and stopped, because another rank was asked to.", EXIT_TEMPORARY)


def train(
    config: TrainConfig,
    corpus: Corpus,
    run_dir: Path,
    log_dir: Path,
    place: Place,
    device: torch.device,
    ranks: Ranks,
    stop: StopSignal,
    say: Callable[[str], None],
    status: Status,
) -> bool:
    """Train until `config.steps`, or until a rank is asked to stop; True when the run is complete."""
    check_ranks_mean_the_same(ranks, config, corpus)

    # What is trained, and on what
    torch.manual_seed(config.seed)
    model = GPT(config).to(device)
    optimizer = AdamW(model, config.beta1, config.beta2, config.weight_decay)
    # Losses are summed over a micro-batch, so that a scale that suits the mean has to be smaller by its tokens.
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=65536 / (config.batch_size * config.seq_len),
        enabled=config.precision == "fp16",
    )
    strategy = DataParallel(model, ranks)
    data, validation = (Windows(corpus, split, config.seq_len) for split in ("train", "validation"))
    order = Order(len(data), config.seed)
    shares = config.shares(place.world_size)
    offset, share = share_of(place.rank, shares)
    micro_batch = config.batch_sizes(place.world_size)[place.rank]
    say(console.model(config))
    say(console.precision(config.precision))
    if place.rank == 0:
        say(
            f"{model.parameter_count():,} parameters; {sum(shares)} sequences = {sum(shares) * config.seq_len:,} "
            f"tokens per step, {len(data):,} sequences per epoch, corpus {corpus.fingerprint[:12]}"
        )
        if config.warmup_steps >= config.steps:
            say(
                f"Note: the warm-up ({config.warmup_steps} steps) is not shorter than the run ({config.steps})."
            )

    # Where it goes on
    def check(state: checkpoint.State) -> None:
        changes = check_resumable(state, config, corpus, place.world_size)
        if changes and place.rank == 0:
            say(f"Changed since step {state['step']}: {', '.join(changes)}.")

    checkpoints = run_dir / "checkpoints"
    state = checkpoint.agree_and_load(checkpoints, model, optimizer, ranks, check, say)
    progress = Progress(**state["progress"]) if state else Progress()
    if state:
        scaler.load_state_dict(state["scaler"])
        say(f"Continuing after step {progress.step}.")
    strategy.start()
    saves = place.local_rank == 0  # the ranks of one node share a disk
    if saves:
        (run_dir / "done.json").unlink(missing_ok=True)
        checkpoint.tidy(checkpoints, progress.step)
        write_atomically(run_dir / "config.json", asdict(config))
        shutil.copyfile(corpus.path / TOKENIZER, run_dir / TOKENIZER)
    board = Board(log_dir, place.rank, progress.step, say)

    def compare() -> str:
        """'OK' when the parameters of all ranks have been compared and are bit-equal."""
        if place.world_size == 1:
            return "-"
        if odd := ranks.odd_ones(checksum(model.parameters())):
            status.set(sync="FAILED")
            raise DataError(
                f"Sync=FAILED at step {progress.step}: the parameters of {ranks.name(odd)} differ from the others'. "
                "Stopped; nothing was saved. Check the memory of that node, and that all nodes run the same release."
            )
        return "OK"

    def validate() -> float:
        status.set(message="validating")
        loss = validation_loss(model, validation, config, ranks, device)
        status.set(message="", validation_loss=loss)
        board.add("Loss/validation", loss, progress.step)
        return loss

    def end_epoch(epoch: int) -> None:
        """Sum up the epoch and begin the next. The last one may be cut short by the end of the run."""
        assert progress.validation_loss is not None
        loss, seconds = progress.epoch_loss_sum / progress.epoch_tokens, progress.epoch_seconds
        if place.rank == 0:
            say(console.epoch(epoch, epochs, loss, progress.validation_loss, seconds))
        board.add_epoch(epoch, loss, progress.validation_loss, seconds)
        progress.epoch_loss_sum = progress.epoch_tokens = progress.epoch_seconds = 0.0

    def state_now() -> dict[str, Any]:
        return {
            "step": progress.step,
            "progress": asdict(progress),
            "scaler": scaler.state_dict(),
            "config": asdict(config),
            "corpus": corpus.fingerprint,
            "world_size": place.world_size,
            "parameters_checksum": f"{checksum(model.parameters()) & (2**64 - 1):016x}",
        }

    def save(kind: str) -> None:
        status.set(state="saving")
        state = state_now()
        save_on_every_node(
            checkpoints, f"{kind}-step-{progress.step}", model, optimizer, state, config, saves, ranks, say
        )
        status.set(state="training")

    if strategy.agrees_after(progress.step):
        compare()
    if progress.first_validation_loss is None:
        progress.first_validation_loss = progress.validation_loss = validate()
        if place.rank == 0:
            say(
                f"Validation loss at start: {progress.first_validation_loss:.4f} "
                f"(ln({config.vocab_size}) = {math.log(config.vocab_size):.4f})"
            )
    status.set(state="training", step=progress.step)
    epochs = math.ceil((progress.windows_seen + (config.steps - progress.step) * sum(shares)) / len(data))
    first_step, busy_seconds, busy_tokens = progress.step + 1, 0.0, 0.0
    stopping = False

    while progress.step < config.steps and not stopping:
        started = time.perf_counter()
        epoch = progress.windows_seen // len(data)
        if config.dropout:
            torch.manual_seed(_seed(config.seed, progress.step, place.rank))

        # Forward and backward over this rank's share of the step
        strategy.zero_gradients()
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        mine = order.at(progress.windows_seen + offset, share)
        for first in range(0, share, micro_batch):
            inputs, targets = data.read(mine[first : first + micro_batch])
            with autocast(config, device):
                loss = model.loss_sum(inputs.to(device), targets.to(device))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()

        # What all ranks have to know before anything is changed
        local = loss_sum.item()
        not_finite_here = [0.0] * place.world_size
        not_finite_here[place.rank] = float(not math.isfinite(local))
        total_loss, tokens, stop_requests, *bad = ranks.total(
            [local, share * config.seq_len, float(stop.requested), *not_finite_here]
        )
        if any(bad):
            guilty = [rank for rank, flag in enumerate(bad) if flag]
            raise not_finite("loss", progress.step + 1, ranks.name(guilty))
        stopping = stop_requests > 0

        # The optimizer step
        strategy.reduce_gradients(tokens)
        scaler.unscale_(optimizer)  # type: ignore[arg-type]
        norm = strategy.gradient_norm()
        if not math.isfinite(norm) and (not scaler.is_enabled() or scaler.get_scale() < SMALLEST_LOSS_SCALE):
            raise not_finite("gradient", progress.step + 1, "the sum over all ranks")
        if math.isfinite(norm) and norm > config.clip:
            strategy.scale_gradients(config.clip / norm)
        # In fp16, a gradient that is not finite changes nothing but the scale.
        scaler.step(optimizer, lr=learning_rate(config, progress.step))  # type: ignore[arg-type]
        scaler.update()

        seconds = time.perf_counter() - started
        busy_seconds, busy_tokens = busy_seconds + seconds, busy_tokens + tokens
        progress.step += 1
        progress.windows_seen += sum(shares)
        progress.tokens_seen += int(tokens)
        progress.loss = total_loss / tokens
        progress.epoch_loss_sum += total_loss
        progress.epoch_tokens += tokens
        progress.epoch_seconds += seconds
        step, last = progress.step, progress.step == config.steps
        epoch_ended = progress.windows_seen // len(data) > epoch

        # What people and later attempts see of it
        board.add("Loss/train_step", progress.loss, step)
        if step % config.log_every == 0 or step == first_step or last or stopping:
            sync = compare() if strategy.agrees_after(step) else "-"
            say(console.step(epoch + 1, step, progress.loss, sync))
            status.set(sync=sync, tokens_per_second=round(busy_tokens / busy_seconds, 1))
            busy_seconds, busy_tokens = 0.0, 0.0
            board.add_system(step, device)
        status.set(at_once=step == first_step, step=step, epoch=epoch + 1, loss=progress.loss)
        if step % config.validate_every == 0 or epoch_ended or last:
            progress.validation_loss = validate()
        if epoch_ended or last:
            end_epoch(epoch + 1)
        if stopping and not last:
            save("interrupt")
        elif step % config.save_every == 0 or last:
            if strategy.agrees_after(step):
                compare()
            save("checkpoint")

    board.close()
    if progress.step < config.steps:
        return False
    if place.rank == 0:
        say(
            f"Validation loss at the end: {progress.validation_loss:.4f}; at start: "
            f"{progress.first_validation_loss:.4f}; unigram entropy of the corpus: {corpus.unigram_entropy:.4f}"
        )
    status.set(sync=compare())
    if saves:
        write_done(run_dir, config, corpus, state_now())
    return True


def check_ranks_mean_the_same(ranks: Ranks, config: TrainConfig, corpus: Corpus) -> None:
    """Raises the same error on all ranks."""
    if odd := ranks.odd_ones(int(config.digest()[:15], 16)):
        raise ConfigError(
            f"The settings of {ranks.name(odd)} differ from the others': start all with the same ones."
        )
    if odd := ranks.odd_ones(int(corpus.fingerprint[:15], 16)):
        raise DataError(f"The corpus of {ranks.name(odd)} differs from the others': copy one to every node.")


def check_resumable(
    state: checkpoint.State, config: TrainConfig, corpus: Corpus, world_size: int
) -> list[str]:
    """Refuse a checkpoint of another model or other data; the other changes. Raises ConfigError."""
    before, now = state["config"], asdict(config)
    way_out = "use another --run-dir for a new run."
    for name in FIXED:
        if before[name] != now[name]:
            raise ConfigError(
                f"The checkpoint of step {state['step']} has {name}={before[name]}, this run asks for "
                f"{now[name]}: {way_out}"
            )
    if state["corpus"] != corpus.fingerprint:
        raise ConfigError(
            f"The checkpoint of step {state['step']} was trained on corpus {state['corpus'][:12]}, "
            f"{corpus.path} is {corpus.fingerprint[:12]}: {way_out}"
        )
    changes = [f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name) != now[name]]
    if state["world_size"] != world_size:
        changes.append(f"ranks {state['world_size']} -> {world_size}")
    return changes


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then half a cosine down to min_lr_ratio. `step` counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
    return torch.autocast(device.type, dtype=dtype, enabled=config.precision != "fp32")


@torch.no_grad()
def validation_loss(
    model: GPT, windows: Windows, config: TrainConfig, ranks: Ranks, device: torch.device
) -> float:
    """Mean loss over the same windows whatever the number of ranks [nats per token]."""
    count = min(len(windows), config.validation_windows)
    share = even_share(ranks.rank, ranks.world_size, count)
    chosen = np.array([i * len(windows) // count for i in share], dtype=np.int64)
    model.eval()
    loss_sum = 0.0
    for first in range(0, len(chosen), config.batch_size):
        inputs, targets = windows.read(chosen[first : first + config.batch_size])
        with autocast(config, device):
            loss_sum += model.loss_sum(inputs.to(device), targets.to(device)).item()
    model.train()
    total, tokens = ranks.total([loss_sum, float(len(chosen) * config.seq_len)])
    return total / tokens


def save_on_every_node(
    directory: Path,
    name: str,
    model: GPT,
    optimizer: AdamW,
    state: checkpoint.State,
    config: TrainConfig,
    saves: bool,
    ranks: Ranks,
    say: Callable[[str], None],
) -> None:
    """One node without space does not end a run that the others have saved. Raises DataError when nobody could."""
    saved = False
    if saves:
        try:
            path = checkpoint.save(directory, name, model, optimizer, state)
            checkpoint.rotate(directory, config.keep_checkpoints, path)
            saved = True
        except OSError as error:
            say(
                f"{directory / name} could not be written: {error.strerror}. Older checkpoints are untouched."
            )
    if ranks.total([float(saved)])[0] == 0:
        raise DataError(f"No rank could write {name}: stopped. Make space and start again.")


def not_finite(what: str, step: int, where: str) -> DataError:
    return DataError(
        f"The {what} is not finite at step {step} on {where}. Stopped before the optimizer step; nothing was changed. "
        "Continue with a lower --lr, or with --precision fp32 or bf16."
    )


def is_done(run_dir: Path, config: TrainConfig, corpus: Corpus) -> bool:
    """Has this very run been completed here? If only the mark of it is missing, put it there."""
    try:
        done = json.loads((run_dir / "done.json").read_text(encoding="utf-8"))
        return bool(done["config_digest"] == config.digest() and done["corpus"] == corpus.fingerprint)
    except (OSError, ValueError, KeyError):
        pass
    # A rank that ended between its last checkpoint and its done.json must not wait for ranks that are done.
    last = run_dir / "checkpoints" / f"checkpoint-step-{config.steps}"
    try:
        checkpoint.verify(last)
    except checkpoint.Damaged:
        return False
    state = checkpoint.read_state(last)
    if state["config"] != asdict(config) or state["corpus"] != corpus.fingerprint:
        return False
    write_done(run_dir, config, corpus, state)
    return True


def write_done(run_dir: Path, config: TrainConfig, corpus: Corpus, state: dict[str, Any]) -> None:
    shown = ("step", "tokens_seen", "loss", "validation_loss", "first_validation_loss")
    done = {
        "config_digest": config.digest(),
        "corpus": corpus.fingerprint,
        "world_size": state["world_size"],
        "vocab_size": config.vocab_size,
        "unigram_entropy": corpus.unigram_entropy,
        "parameters_checksum": state["parameters_checksum"],
        "finished": time.time(),
        **{key: state["progress"][key] for key in shown},
    }
    write_atomically(run_dir / "done.json", done)


def leave(members: gang.Gang | None) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if members:
        members.leave()


def exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
