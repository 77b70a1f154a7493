"""One attempt of one rank: joins the gang, trains, and turns whatever happens into an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from aura.checkpoint import manifest
from aura.checkpoint import store as checkpoint
from aura.cluster import gang
from aura.cluster.devices import of_all_ranks
from aura.cluster.place import Place, check_compiler, choose_device, link_mbit, place_from_environment
from aura.cluster.ranks import CollectiveFailed, Ranks, collective
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus, read_corpus
from aura.corpus.windows import Windows, check_corpus
from aura.errors import EXIT_OK, EXIT_TEMPORARY, AuraError, ConfigError, DataError
from aura.model.export import export_checkpoint
from aura.plan import gpus
from aura.plan.memory import largest_micro_batch, memory_of, settings_that_fit, with_vocabulary
from aura.plan.plan import plan_for
from aura.run.status import Status
from aura.run.stop import StoppedWhileWaiting, StopSignal
from aura.run.trainer import DONE, Progress, train, with_steps, write_done
from aura.texts import console

FINAL = "final"  # in the run directory: the model as `aura export` writes it
SAVE_PATIENCE = 300.0  # seconds that a broken attempt waits for a checkpoint that is being written


def run(
    config: TrainConfig,
    corpus_dir: Path,
    run_dir: Path,
    log_dir: Path,
    backend: str,
    join_timeout: float,
    resume_from: Path | None = None,
) -> int:
    """Train as the rank that the environment says; the exit code (see aura/errors.py)."""
    place = place_from_environment()
    device, backend = choose_device(place, backend)
    if config.compile:
        check_compiler(device)
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
        saver.wait(SAVE_PATIENCE)
        exit_now(EXIT_TEMPORARY)

    saver = checkpoint.Saver(run_dir / "checkpoints", config.keep_checkpoints, config.keep_every)
    stop = StopSignal()
    members: gang.Gang | None = None
    try:
        if device.type == "cuda":
            name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
            gpus.check_number_format(config, capability, name)
        corpus = read_corpus(corpus_dir)
        config = with_vocabulary(config, corpus.vocab_size)
        check_corpus(corpus, config, place.world_size)
        windows = len(Windows(corpus, "train", config.seq_len))
        config = with_steps(config, Progress(), windows, sum(config.shares(place.world_size)))
        if resume_from:
            verify_first(resume_from)
        elif steps := steps_done(run_dir, config, corpus):
            status.set(step=steps, max_steps=steps)
            if place.rank == 0 and not (run_dir / FINAL).exists():
                export_final(run_dir, speaker.say)
            return end("done", console.text("already_done", path=run_dir, steps=steps), EXIT_OK)
        if place.world_size > 1:
            status.set(state="joining", message="waiting for the other ranks")
            members = gang.join(
                rank=place.rank,
                world_size=place.world_size,
                master_address=place.master_address,
                master_port=place.master_port,
                run=run_dir.absolute().name,
                node=place.node,
                backend=backend,
                join_timeout=join_timeout,
                report=speaker.say,
            )
            status.set(attempt=members.attempt, message="")
            members.watch(end_now)
            stop.waiting = False
            # A node without a usable GPU talks gloo only, and so do all with it.
            if backend == "nccl" and (slower := members.without_nccl()):
                backend = "gloo"
                speaker.say(console.backend_agreed(backend, ", ".join(map(str, slower))))
            speaker.say(console.distributed(backend))
            if backend == "nccl":
                # Waiting for an operation raises an error here; otherwise torch's watchdog ends the process by SIGABRT.
                os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
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
        plan = plan_for(
            *(config, place.world_size, of_all_ranks(ranks, gpu_of(device))),
            nodes=len(set(nodes)),
            link_mbit=link_mbit(),
            corpus_tokens=corpus.tokens["train"],
        )
        if place.rank == 0:
            for line in plan.lines():
                speaker.say(line)
            status.set(plan=plan.lines())
        finished = train(
            *(config, corpus, run_dir, log_dir, place, device, ranks, stop, saver, plan),
            *(speaker, status, resume_from),
        )
    except StoppedWhileWaiting:
        return end("stopped", console.text("stopped_waiting"), EXIT_OK)
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
        if is_out_of_memory(error):
            code = end("failed", out_of_memory(config, place, device), ConfigError.exit_code)
        else:
            traceback.print_exc()
            code = end("failed", f"{type(error).__name__}: {error}", 1)
        saver.wait(SAVE_PATIENCE)
        exit_now(code)  # the gang notices
    leave(members)
    if finished and place.rank == 0:
        export_final(run_dir, speaker.say)
    if finished:
        return end("done", console.completed(ranks_compared=place.world_size > 1), EXIT_OK)
    if stop.requested:
        return end("stopped", console.stopped(), EXIT_OK)
    return end("stopped", console.text("stopped_with_another"), EXIT_TEMPORARY)


def export_final(run_dir: Path, say: Callable[[str], None]) -> None:
    """The trained model for `transformers`; the run is complete also where this cannot be written.

    From the last checkpoint, and when the ranks have parted: the others must not wait for this disk.
    """
    try:
        steps = json.loads((run_dir / DONE).read_text(encoding="utf-8"))["step"]
        export_checkpoint(run_dir / "checkpoints" / f"checkpoint-step-{steps}", run_dir / FINAL)
    except (AuraError, OSError) as error:
        say(f"{error} Later: aura export --run-dir {run_dir} --output DIR")
    else:
        say(console.final(run_dir / FINAL))


def verify_first(resume_from: Path) -> None:
    """Before what is newer is set aside for a checkpoint that cannot be used."""
    try:
        manifest.verify(resume_from)
    except manifest.Damaged as reason:
        raise DataError(f"--resume-from {resume_from} cannot be used: {reason}.") from None


def gpu_of(device: torch.device) -> gpus.Gpu:
    if device.type == "cpu":
        return gpus.cpu()
    properties = torch.cuda.get_device_properties(device)
    return gpus.called(properties.name, properties.total_memory)


def is_out_of_memory(error: Exception) -> bool:
    # On the CPU torch raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    )


def out_of_memory(config: TrainConfig, place: Place, device: torch.device) -> str:
    """What to do about it: the least harmful changes with which the same step fits, by the plan's memory model."""
    size, on_gpu = config.batch_sizes(place.world_size)[place.rank], device.type == "cuda"
    room, needed = gpu_of(device).memory, memory_of(config, largest_micro_batch(config), on_gpu).total
    what = f"Out of memory on rank {place.rank} on {place.node} with a micro-batch of {size} x {config.seq_len} tokens."
    # The model has just been too hopeful, or somebody else uses the memory: leave more of it.
    changes = settings_that_fit(config, min(0.95 * room, 0.9 * needed), on_gpu)
    if not changes:
        return f"{what} Nothing that the plan knows makes it fit: take a smaller model (`aura plan --preset auto`)."
    smaller = replace(config, **changes)
    flags = " ".join(f"--{name.replace('_', '-')} {str(value).lower()}" for name, value in changes.items())
    now = memory_of(smaller, largest_micro_batch(smaller), on_gpu).total
    # What a run has begun with, it keeps.
    where = " and another --run-dir" if any(name in checkpoint.FIXED for name in changes) else ""
    return f"{what} The same step needs {now / needed:.0%} of the memory with {flags}{where}"


def steps_done(run_dir: Path, config: TrainConfig, corpus: Corpus) -> int:
    """The steps of this very run, if it has been completed here, else 0. A mark of it that is missing is set."""
    try:
        done = json.loads((run_dir / DONE).read_text(encoding="utf-8"))
        same = done["config_digest"] == config.digest() and done["corpus"] == corpus.fingerprint
        return int(done["step"]) if same else 0
    except (OSError, ValueError, KeyError):
        pass
    # A rank that ended between its last checkpoint and its done.json must not wait for ranks that are done.
    last = run_dir / "checkpoints" / f"checkpoint-step-{config.steps}"
    try:
        manifest.verify(last)
    except manifest.Damaged:
        return 0
    state = checkpoint.read_state(last)
    if state["config"] != asdict(config) or state["corpus"] != corpus.fingerprint:
        return 0
    write_done(run_dir, config, corpus, state)
    return config.steps


def leave(members: gang.Gang | None) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if members:
        members.leave()


def exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
