"""The training loop of one rank: `train` reads from top to bottom."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aura.checkpoint import manifest
from aura.checkpoint import store as checkpoint
from aura.cluster.place import Place
from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.corpus.corpus import TOKENIZER, Corpus
from aura.corpus.windows import Order, Windows, share_of
from aura.errors import ConfigError, DataError
from aura.model.forward import autocast, to_device, validation_loss
from aura.model.gpt import GPT
from aura.optim.muon import check_devices, optimizer_of
from aura.optim.schedule import learning_rate, warmup_steps
from aura.plan.plan import Plan
from aura.run.board import Board
from aura.run.pace import Pace
from aura.run.runlog import LOG, Row, RunLog, write_model_config
from aura.run.status import Status, write_atomically
from aura.run.stop import StopSignal
from aura.strategy.data_parallel import DataParallel, checksum
from aura.texts import console

DONE = "done.json"
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
    validated_step: int = -1
    first_validation_loss: float | None = None


def train(
    config: TrainConfig,
    corpus: Corpus,
    run_dir: Path,
    log_dir: Path,
    place: Place,
    device: torch.device,
    ranks: Ranks,
    stop: StopSignal,
    saver: checkpoint.Saver,
    plan: Plan,
    speaker: console.Console,
    status: Status,
    resume_from: Path | None = None,
) -> bool:
    """Train until `config.steps`, or until a rank is asked to stop; True when the run is complete."""
    say = speaker.say
    check_ranks_mean_the_same(ranks, config, corpus)
    if config.optimizer == "muon":
        check_devices(ranks, device)

    # What is trained, and on what
    model = GPT(config, device)
    optimizer = optimizer_of(model, config)
    # Losses are summed over a micro-batch, so that a scale that suits the mean has to be smaller by its tokens.
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=65536 / (max(config.batch_sizes(place.world_size)) * config.seq_len),
        enabled=config.precision == "fp16",
    )
    strategy = DataParallel(model, ranks, in_buckets=place.world_size > 1)
    data, validation = (Windows(corpus, split, config.seq_len) for split in ("train", "validation"))
    order = Order(len(data), config.seed)
    shares = config.shares(place.world_size)
    offset, share = share_of(place.rank, shares)
    micro_batch = config.batch_sizes(place.world_size)[place.rank]
    loss_sum_of: Callable[..., torch.Tensor] = model.loss_sum
    if config.compile:
        loss_sum_of = torch.compile(model.loss_sum, dynamic=False)
    say(console.model(config))
    say(console.precision(config.precision))
    if place.rank == 0:
        tokens_per_step = sum(shares) * config.seq_len
        parameters = model.parameter_count()
        say(console.size(parameters, sum(shares), tokens_per_step, len(data), corpus.fingerprint))
        if warmup_steps(config) >= config.steps:
            say(console.long_warmup(warmup_steps(config), config.steps))

    # Where it goes on
    def check(state: checkpoint.State) -> None:
        changes = checkpoint.check_resumable(state, config, corpus, place.world_size)
        if changes and place.rank == 0:
            say(console.changed(state["step"], changes))

    checkpoints = run_dir / "checkpoints"
    saves = place.local_rank == 0  # the ranks of one node share a disk
    if resume_from:
        if saves:
            checkpoint.supersede(checkpoints, manifest.step_of(resume_from))
        ranks.total([0.0])  # nobody looks at a disk before its newer checkpoints are out of the way
    state = checkpoint.agree_and_load(checkpoints, model, optimizer, ranks, check, say)
    progress = Progress(**state["progress"]) if state else Progress()
    config = with_steps(config, progress, len(data), sum(shares))
    status.set(max_steps=config.steps)
    if state:
        if progress.step >= config.steps:
            raise ConfigError(
                f"This run has {progress.step} steps and {config.steps} are asked for: nothing is left to train. "
                "More --steps (or --epochs) go on from here; another --run-dir (launch.yml: -e run=NAME) begins anew."
            )
        if state["scaler"]:  # empty, where the run was not in fp16 before
            scaler.load_state_dict(state["scaler"])
        say(console.continuing(progress.step))
    strategy.start()
    if saves:
        (run_dir / DONE).unlink(missing_ok=True)
        checkpoint.tidy(checkpoints, progress.step)
        with without_stopping(run_dir, say):
            describe(run_dir, config, corpus, model.parameter_count())
    board = Board(log_dir, place.rank, progress.step, say)
    log = RunLog(run_dir / LOG, place.rank, progress.step if state else None, say)

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
        progress.validation_loss, progress.validated_step = loss, progress.step
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
            # Of these very parameters: rotation keeps the best.
            "validation_loss": progress.validation_loss if progress.validated_step == progress.step else None,
        }

    saving = ""  # the checkpoint that is under way

    def save(kind: str, wait: bool) -> None:
        nonlocal saving
        finish_save()
        status.set(state="saving")
        saving = f"{kind}-step-{progress.step}"
        if saves:
            saver.begin(saving, model, optimizer, state_now())
        if wait:
            finish_save()
        status.set(state="training")

    def finish_save() -> None:
        """Wait for the save that is under way. One node without space does not end a run that others have saved."""
        nonlocal saving
        if not saving:
            return
        saved = saves and saver.wait()
        if saves and saver.error:
            say(
                f"{checkpoints / saving} could not be written: {reason_of(saver.error)}. "
                "Older checkpoints are untouched."
            )
        if ranks.total([float(saved)])[0] == 0:
            raise DataError(f"No rank could write {saving}: stopped. Make space and start again.")
        if saved and place.rank == 0:
            say(console.saved(saving, saver.stall, saver.seconds))
            board.add("Time/save_stall_seconds", saver.stall, progress.step)
        saving = ""

    if strategy.agrees_after(progress.step):
        compare()
    if progress.first_validation_loss is None:
        progress.first_validation_loss = validate()
        if place.rank == 0:
            uniform = math.log(config.vocab_size)
            say(console.validation_at_start(progress.first_validation_loss, config.vocab_size, uniform))
    status.set(state="training", step=progress.step)
    epochs = math.ceil((progress.windows_seen + (config.steps - progress.step) * sum(shares)) / len(data))
    first_step, busy_seconds, busy_tokens = progress.step + 1, 0.0, 0.0
    pace = Pace(plan, config, device)
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
        scale = torch.tensor(scaler.get_scale(), device=device) if scaler.is_enabled() else None
        for first in range(0, share, micro_batch):
            inputs, targets = to_device(data.batch(mine[first : first + micro_batch]), device)
            with autocast(config, device):
                loss = loss_sum_of(inputs, targets, scale)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()

        # What all ranks have to know before anything is changed
        local = loss_sum.item()
        of_rank = [[0.0] * place.world_size for _ in range(2)]  # whose loss, whose gradient is not finite
        of_rank[0][place.rank] = float(not math.isfinite(local))
        of_rank[1][place.rank] = float(not strategy.gradient_is_finite())
        total_loss, tokens, stop_requests, *flags = ranks.total(
            [local, share * config.seq_len, float(stop.requested), *of_rank[0], *of_rank[1]]
        )
        bad_loss, bad_gradient = (
            [rank for rank in range(place.world_size) if part[rank]]
            for part in (flags[: place.world_size], flags[place.world_size :])
        )
        if bad_loss:
            raise not_finite("loss", progress.step + 1, ranks.name(bad_loss))
        stopping = stop_requests > 0

        # The optimizer step
        strategy.reduce_gradients()
        scaler.unscale_(optimizer)  # type: ignore[arg-type]
        norm = strategy.gradient_norm() / tokens
        if not math.isfinite(norm) and (not scaler.is_enabled() or scaler.get_scale() < SMALLEST_LOSS_SCALE):
            guilty = bad_gradient if place.world_size > 1 else [0]
            where = ranks.name(guilty) or "no single rank, but in the sum over all"
            raise not_finite("gradient", progress.step + 1, where)
        # From the sum to the mean over all tokens, and clipped, in one pass over the gradients
        if math.isfinite(norm):
            strategy.scale_gradients(min(1.0, config.clip / norm) / tokens if norm else 1 / tokens)
        # In fp16, a gradient that is not finite changes nothing but the scale.
        lr = learning_rate(config, progress.step)
        scale_before = scaler.get_scale()
        scaler.step(optimizer, lr=lr)  # type: ignore[arg-type]
        scaler.update()
        if not math.isfinite(norm) and place.rank == 0:
            say(console.left_out(progress.step + 1, scale_before, scaler.get_scale()))

        seconds = time.perf_counter() - started
        busy_seconds, busy_tokens = busy_seconds + seconds, busy_tokens + tokens
        pace.add(seconds, tokens)
        if speaker.is_live:
            speaker.show(pace.line(progress.step + 1))
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
        row = Row(step, epoch + 1, progress.tokens_seen, progress.loss, lr=lr, gradient_norm=norm)
        logged = step % config.log_every == 0 or step == first_step or last or stopping
        if logged:
            sync, rate = compare() if strategy.agrees_after(step) else "-", busy_tokens / busy_seconds
            say(console.step(epoch + 1, step, progress.loss, sync))
            if place.rank == 0:
                say(pace.line(step))
            status.set(sync=sync, tokens_per_second=round(rate, 1))
            row = replace(row, tokens_per_second=round(rate, 1), seconds=round(progress.epoch_seconds, 3))
            busy_seconds, busy_tokens = 0.0, 0.0
            board.add_system(step, device)
        status.set(at_once=step == first_step, step=step, epoch=epoch + 1, loss=progress.loss)
        if step % config.validate_every == 0 or epoch_ended or last:
            row = replace(row, validation_loss=validate())
        if logged or row.validation_loss is not None:
            log.add(row)
        if epoch_ended or last:
            end_epoch(epoch + 1)
        if stopping and not last:
            save("interrupt", wait=True)
        elif step % config.save_every == 0 or last:
            if strategy.agrees_after(step):
                compare()
            save("checkpoint", wait=last)

    finish_save()
    board.close()
    log.close()
    if progress.step < config.steps:
        return False
    if place.rank == 0:
        assert progress.validation_loss is not None
        start, end = progress.first_validation_loss, progress.validation_loss
        say(console.validation_at_end(end, start, corpus.unigram_entropy))
        say(outcome := pace.compared())
        status.set(outcome=outcome)
    status.set(sync=compare())
    if saves:
        with without_stopping(run_dir, say):
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


def with_steps(config: TrainConfig, progress: Progress, windows: int, per_step: int) -> TrainConfig:
    """The length of the run in steps, where it was given in epochs of `windows`: what is left, at `per_step`."""
    if not config.epochs:
        return config
    left = max(0, math.ceil(config.epochs * windows) - progress.windows_seen)
    return replace(config, steps=progress.step + math.ceil(left / per_step))


def reason_of(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def not_finite(what: str, step: int, where: str) -> DataError:
    return DataError(
        f"The {what} is not finite at step {step} on {where}. Stopped before the optimizer step; nothing was changed. "
        "Continue with a lower --lr, or with --precision fp32 or bf16."
    )


@contextmanager
def without_stopping(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """A full disk of one node does not end a run that others save."""
    try:
        yield
    except OSError as error:
        say(f"{run_dir} does not get all of its files: {reason_of(error)}.")


def describe(run_dir: Path, config: TrainConfig, corpus: Corpus, parameters: int) -> None:
    """config.json, model_config.json and the tokenizer. Raises OSError."""
    write_atomically(run_dir / "config.json", asdict(config))
    write_model_config(run_dir, config, corpus, parameters)
    if not (run_dir / TOKENIZER).exists():  # the corpus of a run, and so its tokenizer, never changes
        copied = run_dir / f"{TOKENIZER}.tmp"
        shutil.copyfile(corpus.path / TOKENIZER, copied)
        copied.replace(run_dir / TOKENIZER)


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
    write_atomically(run_dir / DONE, done)


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
