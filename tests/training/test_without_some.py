"""A run goes on without whom it has lost, and with whom it gets back: real trainers on loopback, each on an address of
its own and started again as systemd would."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aura.cluster import peers, quorum, rendezvous_handler, rendezvous_server
from aura.cluster.dist_env import DistEnv
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus
from aura.errors import DataError
from aura.run import attempt, trainer
from aura.run.runlog import LOG
from aura.run.status import Status
from ports import free_port
from services import wait_until
from test_runlog import rows
from trainers import TINY, Fault, Trainer, at_step, curve, infinite_gradient, send_self

FOR_GOOD = (0, 64, 65, 69)
STEPS = 4000  # more than any of these tests waits for


def impatient(grace: float, steady: float) -> None:
    peers.GRACE = peers.GRACE_SILENT = grace
    peers.BOOTING = 0.0
    quorum.STEADY = steady
    peers.HOLDER = peers.HOLDER_SILENT = 2.0
    peers.PAUSE = 0.2
    rendezvous_server.SAY_EVERY = 2.0
    rendezvous_handler.NOBODY = 10.0


class Node:
    """One rank on a PC of its own: started again whenever its trainer ends with a code that asks for it."""

    def __init__(self, launch: Launch, rank: int, fault: Fault | None, settings: str) -> None:
        self.launch, self.rank, self.fault, self.settings = launch, rank, fault, settings
        self.started: list[Trainer] = []
        self.is_on = True
        self.thread = threading.Thread(target=self._supervise, daemon=True)
        self.thread.start()

    def _supervise(self) -> None:
        while self.is_on:
            self.started.append(self.launch.trainer(self.rank, self.fault, self.settings))
            self.fault = None
            process = self.started[-1].process
            process.join()
            if process.exitcode in FOR_GOOD:
                return

    def off(self) -> None:
        """Its power is gone."""
        self.is_on = False
        self.started[-1].process.kill()
        self.thread.join()

    def stop(self) -> None:
        """As systemctl stop does."""
        self.is_on = False
        self.started[-1].process.terminate()
        self.thread.join(30)

    @property
    def text(self) -> str:
        return "".join(trainer.text for trainer in self.started)

    def ends(self, *codes: int, seconds: float) -> None:
        self.thread.join(seconds)
        assert self.started[-1].process.exitcode in codes, self.text

    @property
    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.started[-1].run_dir / f"rank-{self.rank}/status.json").read_text())
        except (ValueError, OSError, IndexError):
            return {}

    def says(self, words: str, seconds: float = 60) -> None:
        wait_until(lambda: words in self.text, seconds, lambda: f"{words!r}:\n{self.text}")

    def trains(self, without: list[int], seconds: float) -> None:
        def does() -> bool:
            status = self.status
            is_training = status.get("state") == "training" and bool(status.get("loss"))
            return is_training and status.get("away") == without

        wait_until(does, seconds, lambda: f"{self.rank} without {without}: {self.status}\n{self.text}")


class Launch:
    def __init__(self, folder: Path, corpus: Corpus, ranks: int, settings: str, id: str = "first") -> None:
        self.folder, self.corpus, self.ranks, self.settings, self.id = folder, corpus, ranks, settings, id
        self.run = "run"
        self.port, self.grace, self.steady = free_port(), 4.0, 0.5
        self.shared: dict[int, int] = {}  # ranks on the PC of another one
        self.nodes: dict[int, Node] = {}
        for rank in range(ranks):
            self.give_book(rank)

    def pc(self, rank: int) -> int:
        return self.shared.get(rank, rank)

    def book(self, rank: int) -> Path:
        return self.folder / f"node{self.pc(rank)}/run/rank-{rank}/vote.json"

    def give_book(self, rank: int) -> None:
        self.book(rank).parent.mkdir(parents=True, exist_ok=True)
        self.book(rank).write_text(json.dumps({"launch": self.id}))

    def trainer(self, rank: int, fault: Fault | None, settings: str) -> Trainer:
        node, pcs = self.pc(rank), map(self.pc, range(self.ranks))
        environment = {
            **{"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": "0" if node == rank else "1"},
            **{"MASTER_ADDR": "127.0.1.0", "MASTER_PORT": str(self.port), "AURA_NODE": f"node{node}"},
            "AURA_PEERS": ",".join(f"127.0.1.{one}" for one in pcs),
            "AURA_LAUNCH": self.id,
        }
        words = ["--preset", "gpt2-nano", "--corpus", str(self.corpus.path), *TINY.split()]
        words += [*settings.split(), "--join-timeout", "60"]

        def apply_update() -> None:
            impatient(self.grace, self.steady)
            if fault:
                fault()

        return Trainer(self.folder / f"node{node}", environment, words, apply_update, self.run)

    def on(self, *ranks: int, fault: Fault | None = None, settings: str = "") -> None:
        for rank in ranks:
            self.nodes[rank] = Node(self, rank, fault, settings or self.settings)

    def trains(self, without: Collection[int] = (), seconds: float = 60) -> None:
        """All others do."""
        for rank in sorted(set(range(self.ranks)).difference(without)):
            self.nodes[rank].trains(sorted(without), seconds)

    def get_on(self) -> None:
        """All do another step."""
        nodes, before = self.nodes.values(), max(node.status["step"] for node in self.nodes.values())
        wait_until(
            lambda: all(node.status.get("step", 0) > before for node in nodes),
            60,
            lambda: "".join(node.text for node in nodes),
        )

    def trains_again(self, node: Node, without: Collection[int] = ()) -> None:
        """In another attempt than the one that this node knows now."""
        before = node.status["attempt"]
        wait_until(lambda: node.status.get("attempt") not in (None, before), 60, lambda: node.text)
        self.trains(without)

    def end(self) -> None:
        for node in self.nodes.values():
            if node.thread.is_alive():
                node.off()

    def done(self, *ranks: int) -> None:
        for rank in ranks:
            self.nodes[rank].ends(0, seconds=90)


SLOW = f"--steps {STEPS} --save-every 20"


@pytest.fixture
def launch(tmp_path: Path, corpus: Corpus) -> Iterator[Launch]:
    of_three = Launch(tmp_path / "launch", corpus, 3, SLOW)
    yield of_three
    of_three.end()


@pytest.fixture
def running(launch: Launch) -> Launch:
    """All three of them."""
    launch.on(0, 1, 2)
    launch.trains()
    return launch


def test_a_pc_that_stalls_for_nine_seconds_ends_nobodys_attempt(running: Launch) -> None:
    """A disk, a browser: rank 0, which holds the store, and another one. They train on with what they have learnt."""
    for stalled in (0, 2):
        pid = running.nodes[stalled].started[-1].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(9)
        os.kill(pid, signal.SIGCONT)
        running.get_on()
    assert [len(node.started) for node in running.nodes.values()] == [1, 1, 1], running.nodes[1].text


def test_the_first_rank_goes_for_good_and_comes_back(running: Launch) -> None:
    running.nodes[0].off()
    running.trains(without=[0])
    assert [running.nodes[rank].status["leads"] for rank in (1, 2)] == [True, False]
    assert "Training goes on without rank 0 (127.0.1.0)." in running.nodes[1].text
    assert "Of these two ranks, rank 1 goes on alone" in running.nodes[1].text
    running.on(0)
    running.trains()
    assert [running.nodes[rank].status["leads"] for rank in (0, 1, 2)] == [True, False, False]
    assert "rank 0 is back, and training goes on with it" in running.nodes[1].text
    for number in (1, 0):
        steps = [int(row["step"]) for row in rows(running.folder / f"node{number}/run" / LOG)]
        assert set(range(5, steps[-1] + 1, 5)) <= set(steps)
    drawn = curve(running.nodes[0].started[-1])
    assert set(steps[:-2]) <= set(drawn), "what it has missed is in its curves"


def test_three_become_one_after_the_other_and_three_again(running: Launch) -> None:
    """A book that is gone is no vote, but its rank takes part."""
    running.nodes[2].off()
    running.trains(without=[2])
    running.nodes[1].off()
    running.trains(without=[1, 2])
    running.book(2).unlink()
    running.on(1, 2)
    running.trains()


def test_the_smaller_part_waits_and_a_stopped_run_stays_stopped(running: Launch) -> None:
    running.nodes[1].off()
    running.trains(without=[1])
    for rank in (0, 2):
        running.nodes[rank].stop()
    running.on(1)
    running.nodes[1].says("are not more than half of the ranks that trained last", 30)
    time.sleep(3)
    assert running.nodes[1].status["state"] == "joining"


def test_who_is_stopped_alone_is_not_waited_for(launch: Launch) -> None:
    """However long the grace is."""
    launch.grace = 600.0
    launch.on(0, 1, 2)
    launch.trains()
    launch.nodes[1].stop()
    launch.nodes[1].ends(0, seconds=0)
    launch.trains(without=[1], seconds=30)
    for rank in (0, 2):
        assert json.loads(launch.book(rank).read_text())["record"] == [2, [0, 2]]


def fills_up_when_there_are_less(after: float = 0) -> Fault:
    """What each rank holds of the optimizer's state grows. after: seconds."""

    def apply_update() -> None:
        learning_rate = trainer.learning_rate

        def grows(config: TrainConfig, number: int) -> float:
            if dist.is_initialized() and dist.get_world_size() < 3:
                time.sleep(after)
                raise MemoryError
            return learning_rate(config, number)

        trainer.learning_rate = grows  # type: ignore[assignment]

    return apply_update


def test_who_has_no_room_since_another_is_away_ends_and_the_rest_goes_on(running: Launch) -> None:
    """Who is away may never come back."""
    running.nodes[1].fault = fills_up_when_there_are_less()
    running.nodes[2].off()
    running.nodes[1].ends(64, seconds=60)
    running.trains(without=[1, 2])


def test_where_too_many_have_no_room_they_wait_for_who_is_away(running: Launch) -> None:
    for rank in (0, 1):
        running.nodes[rank].fault = fills_up_when_there_are_less(after=1.0 - rank)
    running.nodes[2].off()
    for rank in (0, 1):
        running.nodes[rank].says("Out of memory")
    running.on(2)
    running.trains()


def test_what_all_meet_ends_all_though_some_of_them_meet_it_later(launch: Launch) -> None:
    """With 65: the slower ones do not take it for a fault of the fastest one, without which they would begin again."""
    not_finite = trainer.Trainer._not_finite

    def slowly(self: trainer.Trainer, key: str, where: str) -> DataError:
        time.sleep(10)
        return not_finite(self, key, where)

    def be_slow() -> None:
        trainer.Trainer._not_finite = slowly  # type: ignore[method-assign]

    launch.on(0, fault=infinite_gradient(30))
    launch.on(1, 2, fault=be_slow)
    for node in launch.nodes.values():
        node.ends(65, seconds=60)
        assert "The gradient is not finite at step 30 on rank 0 on node0." in node.text
        assert len(node.started) == 1


def refuses(again: Launch, running: Launch, *ranks: int) -> None:
    """The later launch, those of the one before."""
    try:
        running.on(*ranks)
        for rank in ranks:
            running.nodes[rank].ends(64, seconds=30)
            assert "was launched again without this rank" in running.nodes[rank].text
    finally:
        again.end()


@pytest.mark.parametrize("away", [2, 0])
def test_a_later_launch_without_it_refuses_a_rank_of_the_one_before(
    running: Launch, tmp_path: Path, corpus: Corpus, away: int
) -> None:
    """Whose PC comes behind the first one, or before it."""
    running.nodes[away].off()
    others = [rank for rank in range(3) if rank != away]
    for rank in others:
        running.nodes[rank].stop()
    again = Launch(tmp_path / "launch", corpus, 3, SLOW, id="second")
    again.port = running.port
    again.on(*others)
    again.nodes[others[0]].says("waits for 2 other ranks")
    refuses(again, running, away)


def test_a_later_launch_of_one_rank_refuses_the_many_of_the_one_before(
    running: Launch, tmp_path: Path, corpus: Corpus
) -> None:
    """They would be enough to train by themselves."""
    for node in running.nodes.values():
        node.off()
    again = Launch(tmp_path / "launch", corpus, 1, SLOW, id="second")
    again.port = running.port
    again.on(0)
    again.trains()
    refuses(again, running, 1, 2)


def test_another_run_on_a_pc_that_was_left_out_disturbs_nobody(
    running: Launch, tmp_path: Path, corpus: Corpus
) -> None:
    """`stop.yml --limit node0`, then a launch there; it opens the store where the others look first."""
    running.nodes[0].stop()
    running.trains(without=[0])
    other = Launch(tmp_path / "other", corpus, 1, SLOW, id="second")
    other.port, other.run = running.port, "other"
    other.on(0)
    try:
        other.trains()
        running.nodes[1].started[-1].process.kill()
        running.trains_again(running.nodes[2], without=[0])
        assert other.nodes[0].status["state"] in ("training", "saving")
        assert len(other.nodes[0].started) == 1
    finally:
        other.end()


def test_a_pc_that_answers_and_hangs_is_not_waited_for(running: Launch) -> None:
    """Its kernel accepts connections to the store; nobody reads them."""
    hanging = running.nodes[0].started[-1]
    os.kill(hanging.pid, signal.SIGSTOP)
    running.trains(without=[0], seconds=120)
    assert "nothing has moved there for 10 s: the ranks meet without it" in running.nodes[1].text
    hanging.process.kill()
    running.trains()


def test_a_host_whose_disk_hangs_is_not_waited_for(launch: Launch) -> None:
    """Its store answers; it cannot end, since it cannot write down why."""

    def hang_at_the_end() -> None:
        write = Status.set

        def hang(self: Status, at_once: bool = False, **fields: object) -> None:
            if fields.get("state") == "failed":
                time.sleep(1000)
            write(self, at_once, **fields)

        Status.set = hang  # type: ignore[method-assign]

    launch.on(0, fault=hang_at_the_end)
    launch.on(1, 2)
    launch.trains()
    launch.nodes[2].started[-1].process.kill()
    launch.trains(without=[0], seconds=90)


def test_who_cannot_take_part_and_has_lost_its_book_ends_alone(running: Launch) -> None:
    """A new disk, while all start again: whoever has no book does not know that they have trained."""
    for node in running.nodes.values():
        node.off()
    running.book(0).unlink()
    running.on(0, settings=f"{SLOW} --corpus /nowhere")
    time.sleep(3)
    running.on(1, 2)
    running.trains(without=[0])
    running.nodes[0].ends(64, 65, seconds=30)


def test_what_is_learnt_does_not_depend_on_who_was_there(tmp_path: Path, corpus: Corpus) -> None:
    """The same sequences in every step, the same rates: the loss is that of an undisturbed run but for rounding."""
    settings = "--steps 400 --save-every 10 --validate-every 400"
    straight = Launch(tmp_path / "straight", corpus, 3, settings)
    straight.on(0, 1, 2)
    straight.done(0, 1, 2)
    less = Launch(tmp_path / "less", corpus, 3, settings)
    less.on(0, 1)
    less.on(2, fault=at_step(100, send_self(signal.SIGKILL)))
    less.nodes[2].is_on = False  # for good
    less.done(0, 1)
    one, other = straight.nodes[0].started[-1].done, less.nodes[0].started[-1].done
    assert "without rank 2" in less.nodes[0].text
    for done in (one, other):
        assert (done["step"], done["tokens_seen"]) == (400, 400 * 3 * 2 * 16)
    assert abs(one["validation_loss"] - other["validation_loss"]) < 1e-3


def test_who_comes_and_goes_disturbs_nobody(launch: Launch) -> None:
    launch.steady = 6.0
    launch.on(0, 1, 2)
    launch.trains()
    launch.nodes[2].off()
    launch.trains(without=[2])
    attempt = launch.nodes[0].status["attempt"]
    for _ in range(2):
        launch.on(2)
        launch.nodes[2].says("turned away")
        time.sleep(2)
        launch.nodes[2].off()
    assert launch.nodes[0].status["attempt"] == launch.nodes[1].status["attempt"] == attempt


@pytest.mark.parametrize("rank", [2, 0])
def test_who_stops_all_again_and_again_is_left_out(running: Launch, rank: int) -> None:
    """Though it is soon back each time; then it has to stay for longer. Rank 0 would hold the store."""
    node, other = running.nodes[rank], running.nodes[0 if rank else 1]
    for _ in range(2):
        node.started[-1].process.kill()
        running.trains_again(other)
    node.started[-1].process.kill()
    running.trains(without=[rank])
    assert f"Rank {rank} has been away 3 times within ten minutes" in other.text
    node.says(sentence := "it is taken back when it has stayed for 18 s")
    assert sentence in str(node.status["message"])
    running.trains()


def another_torch() -> None:
    attempt.versions = lambda backend: {"torch": "1.0", "nccl": ""}  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("gone", "fault", "more", "sentence"),
    [
        ([], another_torch, "", "rank 0 on node0 (127.0.1.0) torch 1.0"),
        ([2], None, " --lr 0.1", "The settings of rank 0 on node0 (127.0.1.0) differ from the others'"),
    ],
    ids=["another torch", "other settings, and only one that trained"],
)
def test_who_comes_back_as_another_ends_alone_though_it_holds_the_store(
    running: Launch, gone: list[int], fault: Fault | None, more: str, sentence: str
) -> None:
    running.nodes[0].off()
    running.trains(without=[0])
    for rank in gone:
        running.nodes[rank].off()
    running.trains(without=[0, *gone])
    running.on(0, fault=fault, settings=SLOW + more)
    running.nodes[0].ends(64, seconds=40)
    assert sentence in running.nodes[0].text
    running.trains(without=[0, *gone])


def test_builds_whose_nccl_differs_take_one_back_where_they_talk_gloo(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with cu126 beside others with cu130: between PCs auto is gloo."""
    choose, versions = attempt.choose_device, attempt.versions

    def like_a_card(place: DistEnv, backend: str) -> tuple[torch.device, str]:
        return choose(place, backend)[0], backend

    monkeypatch.setattr(attempt, "choose_device", like_a_card)
    monkeypatch.setattr(
        attempt, "versions", lambda _: versions("gloo") | {"nccl": "3" if os.environ["RANK"] == "2" else "7"}
    )
    launch.on(0, 1, 2)
    launch.trains()
    launch.nodes[2].started[-1].process.kill()
    launch.trains_again(launch.nodes[0])


def test_who_cannot_write_its_vote_takes_part_without_one(launch: Launch) -> None:
    """Its disk is full, say."""

    def full_disk() -> None:
        def refuse(*arguments: object, **named: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        quorum.write_atomically = refuse  # type: ignore[assignment]

    launch.on(0, fault=full_disk)
    launch.on(1, 2)
    launch.trains()
    assert "cannot write down its vote (No space left on device)" in launch.nodes[0].text
    assert json.loads(launch.book(0).read_text()) == {"launch": "first"}


def test_of_two_ranks_on_a_pc_the_second_saves_when_the_first_is_gone(launch: Launch) -> None:
    launch.shared = {1: 0}
    launch.give_book(1)
    launch.on(0, 2, 1)
    launch.trains()
    launch.nodes[0].off()
    launch.trains(without=[0])
    second = launch.nodes[1]
    saved = set(second.started[-1].checkpoints())
    wait_until(lambda: bool(set(second.started[-1].checkpoints()) - saved), 60, lambda: second.text)


def test_peers_that_are_not_as_many_as_ranks_are_refused(tmp_path: Path, corpus: Corpus) -> None:
    launch = Launch(tmp_path, corpus, 3, SLOW)
    launch.ranks = 2
    trainer = launch.trainer(1, lambda: os.environ.update(WORLD_SIZE="3"), SLOW)
    assert trainer.end() == 64
    assert "AURA_PEERS names 2 addresses for 3 ranks" in trainer.text


@pytest.mark.parametrize(
    ("up", "is_waited_for"), [(100.0, True), (300.0, False)], ids=["just booted", "up for a while"]
)
def test_after_a_power_cut_everywhere_who_boots_more_slowly_is_waited_for(
    up: float, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a newer checkpoint than all that are there."""
    address = "192.0.2.1"
    monkeypatch.setattr(peers, "now", lambda: up - 60)
    monkeypatch.setattr(peers, "knock_at", lambda *_: (False, False))
    knocking = peers.Peers([address], 1)
    knocking.wait_for_first_answers()
    knocking.close()
    assert knocking.grace(address) == (math.inf if is_waited_for else peers.GRACE)  # nobody knows yet
    monkeypatch.setattr(peers, "now", lambda: up)
    assert knocking.is_silent(address)
    assert (knocking.grace(address) > 3600) == is_waited_for
    monkeypatch.setattr(knocking, "began", up)
    assert knocking.was_silent(address) == (not is_waited_for)
