"""One attempt of one rank: joins the process group, trains, and turns whatever happens into an exit code."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import threading
import traceback
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from aura.checkpoint import store
from aura.checkpoint.newest import next_writer
from aura.cluster.activity import Activity
from aura.cluster.dist_env import (
    check_compiler,
    choose_device,
    dist_env_from_environment,
    keep_freed_memory,
    versions,
)
from aura.cluster.process_group import ProcessGroup
from aura.cluster.ranks import CollectiveFailed, Ranks, collective
from aura.cluster.rendezvous_handler import join, keep_others_out
from aura.cluster.rendezvous_store import NoProcessGroup, card_of
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus, read_corpus
from aura.corpus.sequences import Sequences, check_corpus
from aura.errors import EXIT_OK, EXIT_TEMPORARY, AuraError, ConfigError, GpuFault, refusal_of
from aura.model.export import verified_state
from aura.plan import gpus
from aura.plan.shapes import with_vocabulary
from aura.run import compiled, memory_copy, unhealthy_gpu
from aura.run.directory import steps_done, taken
from aura.run.division import ActiveRanks
from aura.run.final import export_final, is_exported_since_done
from aura.run.out_of_memory import asks_for_less, gpu_of, is_out_of_memory, out_of_memory
from aura.run.progress import Progress
from aura.run.refusal import refuse, tell_the_others, write_down
from aura.run.start import Run, refuse_a_run_that_is_over, trainer_of, with_steps
from aura.run.status import Status
from aura.run.stop import StoppedWhileWaiting, StopSignal
from aura.texts import console

SAVE_PATIENCE = 300.0  # seconds that a broken attempt waits for a checkpoint that is being written
# Seconds before the others hear that this rank gives up: as long as all are there, what they collect for a checkpoint
# comes in. They would miss this rank after 20.
SAVE_FIRST = 5.0
STOPPED_TOO = 2.0  # seconds in which who has followed another that was stopped may be told the same


def run(
    config: TrainConfig,
    corpus_dir: Path,
    run_dir: Path,
    log_dir: Path,
    backend: str,
    join_timeout: float,
    resume_from: Path | None = None,
    activity: Activity | None = None,
    shares_from: Path | None = None,
) -> int:
    """Train as the rank that the environment says; the exit code (see aura/errors.py). `activity`: who else watches."""
    try:
        dist_env = dist_env_from_environment()
        alone = dist_env.world_size == 1
        # Without peers the ranks may share a disk, which rank 0 holds for all.
        with taken(run_dir, alone, holds=alone or (dist_env.rank == 0 and not dist_env.peers)):
            try:
                attempt = Attempt(config, run_dir, backend, activity or Activity(), shares_from)
            except AuraError as error:
                write_down(error, run_dir, dist_env)
                raise
            return attempt.run(corpus_dir, log_dir, join_timeout, resume_from)
    except AuraError as error:
        return refuse(error, run_dir, join_timeout)


class Attempt:
    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        backend: str,
        activity: Activity,
        shares_from: Path | None,
    ) -> None:
        """Raises ConfigError where this machine cannot do what is asked for."""
        self.config, self.run_dir, self.activity, self.shares_from = config, run_dir, activity, shares_from
        self.dist_env = dist_env_from_environment()
        self.device, self.backend = choose_device(self.dist_env, backend)
        if self.device.type == "cpu":
            keep_freed_memory()
        if fault := unhealthy_gpu.known_fault(self.device):
            raise fault
        if config.compile == "true":
            check_compiler(self.device)
            compiled.check_path_of_torch(self.device)
        rank, world_size, node = self.dist_env.rank, self.dist_env.world_size, self.dist_env.node
        self.own = run_dir / f"rank-{rank}"
        self.speaker = console.Console(rank, world_size, node, str(self.device))
        self.status = Status(
            self.own / "status.json",
            rank=rank,
            world_size=world_size,
            node=node,
            device=str(self.device),
            gpu=unhealthy_gpu.uuid_of(self.device),
            max_steps=config.steps,
        )
        self.saver = store.Saver(run_dir / "checkpoints", config.keep_checkpoints, config.keep_every)
        self.memory = memory_copy.directory_of(os.environ.get("AURA_MEMORY", ""), run_dir.absolute().name)
        if not (run_dir / "config.json").exists():  # the run was removed: what is in memory goes with it
            memory_copy.forget(self.memory)
        self.stop = StopSignal(self.speaker.line(console.text("stopping", pid=os.getpid())))
        self.members: ProcessGroup | None = None
        self.active_ranks = ActiveRanks.all(world_size)
        self.why_stopped = console.text("stopped_with_another")

    def run(self, corpus_dir: Path, log_dir: Path, join_timeout: float, resume_from: Path | None) -> int:
        """The exit code, whatever happens."""
        try:
            try:
                corpus = self._read(corpus_dir, resume_from)
            except (AuraError, OSError) as error:
                refusal = refusal_of(error)
                code = self._end("failed", str(refusal), refusal.exit_code)
                tell_the_others(refusal, self.run_dir, join_timeout)
                return code
            if not resume_from and (steps := steps_done(self.run_dir, self.config, corpus)):
                return self._already_done(steps)
            nodes = self._join(join_timeout, corpus)
            finished = self._train(corpus, log_dir, nodes, resume_from)
        except StoppedWhileWaiting:
            return self._end("stopped", console.text("stopped_waiting"), EXIT_OK)
        except NoProcessGroup as error:
            return self._end("failed", str(error), error.exit_code)
        except CollectiveFailed as error:
            assert self.members
            self.members.end(error)
        except AuraError as error:  # mostly raised by all ranks alike, by some of them seconds later
            code = self._end("failed", str(error), error.exit_code)
            if self.members:
                self.members.ends_itself()
            self.saver.wait(SAVE_FIRST)
            if self.members:
                self.members.give_up(str(error), code, alike=not is_own(error))
            self.saver.wait_without_others(SAVE_PATIENCE)
            leave(self.members)
            return code
        except Exception as error:
            self._end_alone(error)
        if not finished and self.members:
            self._hear_why()
        leave(self.members)
        return self._ended(finished)

    def _hear_why(self) -> None:
        """Before they part: the others do not wait for who was asked to stop."""
        assert self.members
        leaving, back = ([], []) if self.stop.requested else self.members.why_all_stop()
        if self.stop.requested or (leaving and self.stop.comes_within(STOPPED_TOO)):
            self.members.say_that_it_leaves()
        elif leaving:
            self.members.why_all_stop()  # some may have been told meanwhile
        elif back:
            self.why_stopped = console.text("stopped_for_one_back", ranks=", ".join(map(str, back)))

    def _read(self, corpus_dir: Path, resume_from: Path | None) -> Corpus:
        """The corpus, which says how many steps and words there are; and the checkpoint, whether the run can go on from
        it. Raises ConfigError and DataError."""
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            gpus.check_number_format(self.config, torch.cuda.get_device_capability(self.device), name)
        corpus, world_size = read_corpus(corpus_dir), self.dist_env.world_size
        config = with_vocabulary(self.config, corpus.vocab_size)
        shared = self.active_ranks.shared(config)
        check_corpus(corpus, shared, world_size)
        shared.batch_sizes(world_size)
        length = (len(Sequences(corpus, "train", config.seq_len)), sum(shared.shares(world_size)))
        if resume_from:
            # Before what is newer is set aside for a checkpoint that cannot be used
            state = verified_state(resume_from, "resume_unusable")
            store.check_resumable(state, config, corpus, world_size)
            progress = Progress.of(state["progress"])
            refuse_a_run_that_is_over(with_steps(config, progress, *length), progress)
        self.config = with_steps(config, Progress(), *length)
        return corpus

    def _join(self, timeout: float, corpus: Corpus) -> list[str]:
        """Wait for the other ranks; the node of every rank. Raises GangBroken, GangMismatch, CollectiveFailed,
        ConfigError."""
        dist_env, say = self.dist_env, self.speaker.say
        if dist_env.world_size == 1:
            say(console.text("alone"))
            self.store_of_one = keep_others_out(dist_env, self.run_dir.absolute().name, say)
            self.status.set(state="joining", attempt="alone", leads=True)
            self.stop.waiting = False
            return [dist_env.node]
        self.status.set(state="joining")
        run = self.run_dir.absolute().name
        told = versions(self.backend) | {"settings": self.config.digest(), "corpus": corpus.fingerprint}
        self.members = members = join(
            dist_env, run, timeout, self.backend, told, None, self.status.also(say), self.own
        )
        ranks = tuple(member.rank for member in members.members)
        self.active_ranks = replace(self.active_ranks, ranks=ranks)
        self.speaker.leads = members.rank == 0
        leads = members.rank == 0
        self.status.set(attempt=members.attempt, message="", away=members.absent, leads=leads)
        members.watch(self._end_now, self.activity, self.stop.for_one_that_is_back)
        self.stop.waiting = False
        for rank in members.absent:
            self.speaker.say_once(console.text("trains_without", rank=rank, address=dist_env.peers[rank]))
        if dist_env.peers and members.world_size > 1:
            self.speaker.say_once(console.who_goes_on(ranks))
        # A node without a usable GPU talks gloo only, and so do all with it.
        wish, self.backend = self.backend, members.agreed_backend()
        if wish == "nccl" and (slower := members.without_nccl()):
            say(console.text("backend_agreed", backend=self.backend, ranks=", ".join(map(str, slower))))
        say(console.text("distributed", backend=self.backend))
        self._begin_collectives(members)
        return [member.node for member in members.members]

    def _begin_collectives(self, members: ProcessGroup) -> None:
        if members.world_size == 1:
            return
        if self.backend == "nccl":
            # Waiting for an operation raises an error here; otherwise torch's watchdog ends the process by SIGABRT.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        # Otherwise gloo takes the card that the host name stands for, which on Ubuntu is often the loopback.
        if card := card_of(members.members[members.rank].address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", card)
        with collective():
            dist.init_process_group(
                self.backend,
                store=members.store,
                rank=members.rank,
                world_size=members.world_size,
                timeout=timedelta(seconds=self.config.collective_timeout),
            )

    def _train(self, corpus: Corpus, log_dir: Path, nodes: list[str], resume_from: Path | None) -> bool:
        """True when the run is complete; False when a rank was asked to stop."""
        ranks = Ranks(self.members.rank if self.members else 0, nodes, self.device, self.activity)
        saves = self._saves(nodes)
        attempt = self.members.attempt if self.members else f"alone-{secrets.token_hex(4)}"
        this_run = Run(
            config=self.config,
            corpus=corpus,
            directory=self.run_dir,
            log_dir=log_dir,
            resume_from=resume_from,
            shares_from=self.shares_from,
            saves=saves,
            logs=saves and (bool(self.dist_env.peers) or ranks.rank == 0),
            device=self.device,
            ranks=ranks,
            active_ranks=self.active_ranks,
            devices=[gpus.Gpu(**gpu) for gpu in ranks.all_of(asdict(gpu_of(self.device, self.own)))],
            speaker=self.speaker,
            status=self.status,
            stop=self.stop,
            saver=self.saver,
            memory=self.memory,
            writer=next_writer(memory_copy.places(self.saver.directory, self.memory), attempt, ranks),
        )
        unhealthy_gpu.watch(self.device, self.stop, self.activity, self.saver, self._end_unhealthy)
        return trainer_of(this_run).train()

    def _saves(self, nodes: list[str]) -> bool:
        """The first rank of a node that is there: all of them share its disk."""
        if not self.dist_env.peers or not self.members:
            return self.dist_env.local_rank == 0
        return nodes.index(self.dist_env.node) == self.members.rank

    def _already_done(self, steps: int) -> int:
        memory_copy.forget(self.memory)
        self.status.set(step=steps, max_steps=steps)
        # Where ranks do not know each other's addresses, nodes may share a disk.
        exports = self.dist_env.local_rank == 0 if self.dist_env.peers else self.dist_env.rank == 0
        if exports and not is_exported_since_done(self.run_dir):
            export_final(self.run_dir, self.speaker.say)
        return self._end("done", console.text("already_done", path=self.run_dir, steps=steps), EXIT_OK)

    def _ended(self, finished: bool) -> int:
        """In good order."""
        if finished and self.speaker.leads:
            export_final(self.run_dir, self.speaker.say)
        if finished:
            memory_copy.forget(self.memory)
            return self._end("done", console.completed(len(self.active_ranks.ranks) > 1), EXIT_OK)
        if self.stop.requested:
            memory_copy.forget(self.memory)
            return self._end("stopped", console.text("stopped"), EXIT_OK)
        return self._end("stopped", self.why_stopped, EXIT_TEMPORARY)

    def _end(self, state: str, sentence: str, code: int) -> int:
        self.speaker.say(sentence)
        self.status.set(state=state, message=sentence, exit_code=code)
        return code

    def _end_now(self, sentence: str, code: int = EXIT_TEMPORARY) -> NoReturn:
        """Without destructors: those of torch.distributed may wait for ranks that are gone."""
        exit_within(SAVE_PATIENCE + 30, code)
        self._end("failed", sentence, code)
        self.saver.wait_without_others(SAVE_PATIENCE)
        exit_now(code)

    def _end_unhealthy(self, fault: GpuFault) -> NoReturn:
        """Without a checkpoint: the GPU does not compute any more."""
        exit_within(SAVE_PATIENCE, fault.exit_code)
        code = self._end("failed", str(fault), fault.exit_code)
        if self.members:
            self.members.give_up(str(fault), code)
            self.members.leave()
        exit_now(code)

    def _end_alone(self, error: Exception) -> NoReturn:
        """What only this rank has met: the others hear of it, and where it is final they end with it."""
        if fault := unhealthy_gpu.fault_in(error):
            self._end_unhealthy(fault)
        if is_out_of_memory(error):
            mine, here = (self.device, self.own), {"rank": self.dist_env.rank, "node": self.dist_env.node}
            shared, ranks = self.active_ranks.shared(self.config), len(self.active_ranks.ranks)
            if less := asks_for_less(error, shared, ranks, *mine):
                sentence = console.text("asks_for_less", **here)
            else:
                sentence = out_of_memory(self.config, self.dist_env, *mine)
            # With all ranks each holds less of the optimizer's state: once they are back, it may fit again. Those that
            # have the room do not wait for that, where they may go on: nobody may ever come back.
            fits_later, members = less, self.members
            if members and members.absent and not less:
                fits_later = not members.can_go_on_without_who_is_full()
            code = EXIT_TEMPORARY if fits_later else ConfigError.exit_code
            exit_within(SAVE_PATIENCE + 60, code)
            self._end("failed", sentence, code)
        else:
            traceback.print_exc()
            sentence = f"{type(error).__name__}: {error}"
            exit_within(SAVE_PATIENCE + 60, 1)
            code = self._end("failed", sentence, 1)
        if self.members:
            self.members.give_up(sentence, code)
        if code == 1:
            # Made again: a power cut may have left half of a kernel there, which torch would read for ever.
            shutil.rmtree(self.run_dir / compiled.COMPILED, ignore_errors=True)
        self.saver.wait_without_others(SAVE_PATIENCE)
        if self.members:
            self.members.leave()
        exit_now(code)


def is_own(error: AuraError) -> bool:
    """Of what a member raises, does it alone raise this?"""
    return isinstance(error, GpuFault)


def leave(members: ProcessGroup | None) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if members:
        members.leave()


def exit_within(seconds: float, code: int) -> None:
    """A disk that hangs would keep this rank here, and with it the others, whose store it may hold."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
