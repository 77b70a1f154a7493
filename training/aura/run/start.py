"""Everything before the first step: what is trained, where it goes on, and who looks on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from aura.checkpoint import store
from aura.checkpoint.manifest import Writer, checkpoints, writer_of
from aura.cluster.dist_env import compiles, link_mbit, why_not_compiled
from aura.cluster.ranks import Ranks
from aura.config import TrainConfig, as_words
from aura.corpus.corpus import Corpus
from aura.corpus.sequences import Sequences
from aura.corpus.text_bytes import bits_per_byte
from aura.errors import ConfigError, DataError, NoRoom
from aura.model.family import model_of
from aura.model.forward import allow_tensor_cores, take_deterministic_kernels, validation_loss
from aura.model.language_model import LanguageModel
from aura.optim.loss_scale import LossScale
from aura.optim.schedule import warmup_steps
from aura.plan.gpus import Gpu
from aura.plan.memory import exchange_bytes, largest_micro_batch
from aura.plan.micro_batch import auto_micro_batch, filled_line
from aura.plan.plan import Plan, plan_for
from aura.plan.setting import CHOSEN
from aura.plan.units import in_short
from aura.run import compiled, directory, measure, memory_copy
from aura.run.balance import RECORD, Balance
from aura.run.batches import Batches
from aura.run.division import ActiveRanks, Division, tokens_of_step
from aura.run.memory_copy import MemoryCopy
from aura.run.meter import Meter
from aura.run.observers import ConsoleLogger, Curves, Epochs, Log, ReplicaCheck, Validation
from aura.run.pace import Pace
from aura.run.progress import Observer, Progress
from aura.run.runlog import LOG, RunLog
from aura.run.saving import Completion, Saving, Snapshot
from aura.run.setting import setting_of
from aura.run.status import Status
from aura.run.stop import StopSignal
from aura.run.tensorboard_logger import TensorBoardLogger
from aura.run.trainer import Trainer
from aura.strategy.alone import Alone
from aura.strategy.delayed import Delayed
from aura.strategy.interface import Strategy
from aura.strategy.rounds import Rounds
from aura.strategy.sharded import Sharded
from aura.texts import console
from aura.texts.console import Console


@dataclass(frozen=True)
class Run:
    """What one rank knows of the run that it takes part in. Only this module does: each of the others gets what it
    needs of it."""

    config: TrainConfig
    corpus: Corpus
    directory: Path
    log_dir: Path  # TensorBoard's
    resume_from: Path | None  # a checkpoint; otherwise the newest that any rank holds, or from the beginning
    shares_from: Path | None  # a record of decisions (balance.py) to take in place of measuring
    saves: bool  # the ranks of one node share a disk
    logs: bool  # and where the ranks do not know each other's addresses, nodes may share one: rank 0 alone
    device: torch.device
    ranks: Ranks
    active_ranks: ActiveRanks
    devices: list[Gpu]  # of every rank
    speaker: Console
    status: Status
    stop: StopSignal
    saver: store.Saver
    memory: Path | None  # where copies between two checkpoints are
    writer: Writer  # of its checkpoints: this attempt
    auto_micro_batch: dict[str, Any] = field(
        default_factory=dict
    )  # what micro_batch=auto is on these ranks' devices

    @property
    def checkpoints(self) -> Path:
        return self.saver.directory

    @property
    def shared(self) -> TrainConfig:
        """What the ranks that are there compute together. `config` is what the run was asked for."""
        return replace(self.active_ranks.shared(self.config), **self.auto_micro_batch)


def trainer_of(run: Run) -> Trainer:
    """What trains. Every rank has to ask at the same time. Raises ConfigError and DataError, on all ranks alike."""
    asked, ranks = run.config, run.ranks
    check_ranks_mean_the_same(ranks, run.active_ranks.of_launch(run.config), run.corpus)
    allow_tensor_cores(run.config, run.device)
    take_deterministic_kernels(run.config)
    if compiles(run.config, run.device):
        compiled.choose_directory(run.directory)
    run = replace(run, auto_micro_batch=auto_micro_batch(run.shared, run.devices))
    model = model_of(run.shared, run.device)
    if compiles(run.config, run.device):
        model.compile_blocks(lengths=run.shared.batch_sizes(ranks.world_size)[ranks.rank])
    sequences = Sequences(run.corpus, "train", run.config.seq_len)
    measured = partial(measure.cluster, run.shared, ranks, run.device, run.devices, model, sequences)
    where = (run.directory, run.saves, run.speaker)
    setting = setting_of(run.config, ranks, run.active_ranks, *where, measured)
    run = replace(run, config=setting.config)
    plan = plan_of(run, [*setting.lines, *step_kept(run)])
    check_main_memory(run)
    strategy = strategy_of(run.config, ranks, model)
    loss_scale = loss_scale_of(run.shared, delayed=isinstance(strategy, Delayed))
    batches = Batches(sequences, run.shared, Division(run.shared, ranks.nodes), ranks.rank, run.device)
    state = newest_state(run, model, strategy)
    progress = Progress.of(state["progress"]) if state else Progress()
    run = replace(run, config=with_steps(run.config, progress, len(sequences), batches.per_step))
    say_what_is_trained(run, model, batches)
    run.status.set(max_steps=run.config.steps)
    if state:
        refuse_a_run_that_is_over(run.config, progress)
        loss_scale.load(state["scaler"])
        batches.division.load(state.get("division", {}), progress.step)
        run.speaker.say(console.text("continuing", step=progress.step))
    strategy.start()
    if run.saves:
        take_directory(run, model, progress, writer_of(state or {}).number)
    parts = Sequences(run.corpus, "validation", run.config.seq_len).names
    step, kept = (progress.step, state.get("log")) if state else (None, None)
    log = RunLog(run.directory / LOG, run.logs, kept, step, run.speaker.say, parts)
    snapshot = Snapshot(
        run.config, run.corpus, ranks, run.writer, model, progress, loss_scale, batches.division, log
    )
    meter, pace = Meter(run.device, ranks.activity), Pace(plan, run.config, run.device, setting.chosen)
    observers = observers_of(run, asked, snapshot, strategy, batches, meter, pace)
    return Trainer(
        run.config, ranks, model, batches, strategy, loss_scale, progress, meter, run.stop, observers
    )


def check_ranks_mean_the_same(ranks: Ranks, config: TrainConfig, corpus: Corpus) -> None:
    """Raises the same error on all ranks."""
    if odd := ranks.odd_ones(int(config.digest()[:15], 16)):
        raise ConfigError("settings_differ", ranks=ranks.name(odd))
    if odd := ranks.odd_ones(int(corpus.fingerprint[:15], 16)):
        raise DataError("corpora_differ", ranks=ranks.name(odd))


def plan_of(run: Run, said: Sequence[str]) -> Plan:
    """The prediction, which rank 0 says, and what there is to say besides. Raises ConfigError."""
    plan = plan_for(
        run.shared,
        run.ranks.world_size,
        run.devices,
        nodes=len(set(run.ranks.nodes)),
        link_mbit=link_mbit(),
        corpus_tokens=run.corpus.tokens["train"],
    )
    if run.ranks.world_size > 1:
        chosen = {name: getattr(run.config, name) for name in CHOSEN}
        if not run.config.delay_after:
            del chosen["delay_after"]
        run.status.set(setting=as_words(chosen))
    if run.speaker.leads:
        lines = [*plan.lines(), *said]
        for line in lines:
            run.speaker.say(line)
        run.status.set(plan=lines)
    return plan


def check_main_memory(run: Run) -> None:
    """For the exchange, before anything is begun. Raises ConfigError, on all ranks alike; of a run that goes on NoRoom,
    for another program may have the memory for a moment only."""
    ranks = run.ranks
    needs = exchange_bytes(run.shared, ranks.world_size, len(set(ranks.nodes)))
    here = needs * ranks.nodes.count(ranks.nodes[ranks.rank])
    free = psutil.virtual_memory().available
    begun = any(checkpoints(place) for place in memory_copy.places(run.checkpoints, run.memory))
    said = ranks.all_of({"lacks": here > free, "begun": begun})
    if lacks := [rank for rank, one in enumerate(said) if one["lacks"]]:
        kind = NoRoom if any(one["begun"] for one in said) else ConfigError
        raise kind("no_main_memory", ranks=ranks.name(lacks), size=here / 1e9)


def step_kept(run: Run) -> Iterator[str]:
    """What there is to say of a step that is not the settings' own."""
    active_ranks = run.active_ranks
    if active_ranks.of_launch(run.config) != run.config:
        own = tokens_of_step(run.config, active_ranks.launched)
        yield console.text("step_kept", tokens=active_ranks.step_tokens, ranks=active_ranks.launched, own=own)


def strategy_of(config: TrainConfig, ranks: Ranks, model: LanguageModel) -> Strategy:
    if ranks.world_size == 1:
        return Alone(model, config)
    if config.strategy == "rounds":
        return Rounds(model, ranks, config)
    return Delayed(model, ranks, config) if config.delay else Sharded(model, ranks, config)


def loss_scale_of(config: TrainConfig, delayed: bool) -> LossScale:
    # Losses are summed over a micro-batch, so that a scale that suits the mean has to be smaller by its tokens.
    first = 65536 / (largest_micro_batch(config) * config.seq_len)
    return LossScale(first, enabled=config.precision == "fp16", delayed=delayed)


def say_what_is_trained(run: Run, model: LanguageModel, batches: Batches) -> None:
    config, warmup, say = run.config, warmup_steps(run.config), run.speaker.say
    shown = ("preset", "d_model", "layers", "heads", "seq_len")
    say(console.text("model", **{name: getattr(config, name) for name in shown}))
    say(console.precision(config.precision))
    why = why_not_compiled(config, run.device)
    say(console.text("eager", why=why) if why else console.text("compiled", path=compiled.directory()))
    if run.speaker.leads:
        step = {"sequences": batches.per_step, "tokens": batches.per_step * config.seq_len}
        corpus = {"epoch": len(batches.sequences), "fingerprint": run.corpus.fingerprint[:12]}
        say(console.text("size", parameters=model.parameter_count(), **step, **corpus))
        for line in batch_lines(run, batches):
            say(line)
        if warmup >= config.steps:
            say(console.text("long_warmup", warmup=warmup, steps=config.steps))


def batch_lines(run: Run, batches: Batches) -> Iterator[str]:
    """Guide 002's block: ranks, batch and steps. Where ranks are unlike, one number for each."""
    division, sequences = batches.division, batches.per_step
    if run.ranks.world_size > 1:
        gpus = sum(device.is_gpu for device in run.devices)
        yield console.text("launched", ranks=run.ranks.world_size, gpus=gpus, backend=dist.get_backend())
    pairs = zip(division.first, division.sizes, strict=True)
    counts = [math.ceil(share / size) for share, size in pairs]
    shown = {"sizes": in_short(division.sizes), "counts": in_short(counts)}
    yield console.text("batches", **shown, sequences=sequences)
    if run.auto_micro_batch:
        yield filled_line(run.active_ranks.shared(run.config), run.shared, run.ranks.world_size)
    yield console.text("length", steps=run.config.steps, epoch=len(batches.sequences) / sequences)


def newest_state(run: Run, model: LanguageModel, strategy: Strategy) -> store.State | None:
    """Put all ranks on one checkpoint; its state, or None where the run begins."""

    def check(state: store.State) -> None:
        if changes := store.check_resumable(state, run.config, run.corpus, run.ranks.world_size):
            run.speaker.say_once(console.text("changed", step=state["step"], changes=", ".join(changes)))

    if run.resume_from:
        if run.saves:
            store.go_back_to(run.checkpoints / run.resume_from.name)
            memory_copy.forget(run.memory)
        run.ranks.total([0.0])  # nobody looks at a disk before its newer checkpoints are out of the way
    places = memory_copy.places(run.checkpoints, run.memory)
    return store.agree_and_load(places, model, strategy.load, run.ranks, check, run.speaker.say)


def with_steps(config: TrainConfig, progress: Progress, sequences: int, per_step: int) -> TrainConfig:
    """The length of the run in steps, where it was given in tokens or in epochs of `sequences`: what is left, at
    `per_step`."""
    if config.tokens:
        wanted = math.ceil(config.tokens / config.seq_len)
    elif config.epochs:
        wanted = math.ceil(config.epochs * sequences)
    else:
        return config
    left = max(0, wanted - progress.windows_seen)
    return replace(config, steps=progress.step + math.ceil(left / per_step))


def refuse_a_run_that_is_over(config: TrainConfig, progress: Progress) -> None:
    if progress.step >= config.steps:
        raise ConfigError("run_is_over", step=progress.step, steps=config.steps)


def take_directory(run: Run, model: LanguageModel, progress: Progress, number: int) -> None:
    """The run directory says what this run is, and holds nothing that comes after its step, of attempt `number`."""
    (run.directory / directory.DONE).unlink(missing_ok=True)
    if run.memory:
        memory_copy.tidy(run.memory, progress.step, number)
    with directory.without_stopping(run.directory, run.speaker.say):
        store.tidy(run.checkpoints, progress.step, number)
        step = tokens_of_step(run.shared, run.ranks.world_size)
        directory.describe(run.directory, run.config, run.corpus, model.parameter_count(), step)


def copies_of(run: Run, step: int) -> MemoryCopy | None:
    """Where all nodes have a place for them."""
    places = run.ranks.total([float(run.memory is not None)])
    if run.memory is None or places != [run.ranks.world_size]:
        return None
    return MemoryCopy(run.memory, run.ranks, run.config.save_every, step)


def observers_of(
    run: Run,
    asked: TrainConfig,
    snapshot: Snapshot,
    strategy: Strategy,
    batches: Batches,
    meter: Meter,
    pace: Pace,
) -> list[Observer]:
    """In the order in which they are told: what one finds out, those behind it write down."""
    config, ranks, speaker, status = run.config, run.ranks, run.speaker, run.status
    progress, step = snapshot.progress, snapshot.progress.step
    board = TensorBoardLogger(run.log_dir, run.logs, step, speaker.say)
    sequences = Sequences(run.corpus, "validation", config.seq_len)
    validate = partial(validation_loss, snapshot.model, sequences, run.shared, ranks, run.device)
    bits = bits_per_byte(run.corpus, speaker.say_once)
    comparison = ReplicaCheck(ranks, strategy, progress, status)
    observers = [
        comparison,
        ConsoleLogger(pace, speaker, status),
        Validation(config, validate, bits, strategy, progress, speaker, status),
        Curves(board, bits, progress, run.device, snapshot.log.missed),
        Log(snapshot.log, bits, progress),
        Epochs(config.steps, batches, progress, board, speaker, bits),
    ]
    if batches.division.by_speed:
        record = run.directory / RECORD
        shared = (ranks, strategy, batches.division, meter, speaker, status)
        # They were written down for all.
        given = run.shares_from if ranks.world_size == run.active_ranks.launched else None
        observers.append(Balance(record, given, step, *shared))
    copies = copies_of(run, step)
    return [
        *observers,
        Saving(
            run.saver, run.saves, snapshot, strategy, comparison, board, run.stop, speaker, status, copies
        ),
        Completion(run.directory, asked, run.saves, snapshot, comparison, pace, bits, speaker, status),
    ]
