"""The protocol of docs/attempts.md, with real processes, sockets and signals on loopback."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import process_group_worker
import psutil
import pytest
from aura.cluster import heartbeats
from aura.cluster import process_group as process_group_module
from aura.cluster.alike import check_versions
from aura.cluster.dist_env import DistEnv
from aura.cluster.failure_report import FailureReport
from aura.cluster.process_group import ProcessGroup
from aura.cluster.quorum import QuorumState, Record, Vote
from aura.cluster.rendezvous_store import Member
from aura.errors import EXIT_TEMPORARY, ConfigError
from ports import free_port
from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from trainers import Forked

# A server process that has imported torch once forks the ranks: importing it in each costs seconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torch.distributed"])


class Rank(Forked):
    def __init__(self, folder: Path, port: int, rank: int, world_size: int = 3, **more: object) -> None:
        """more: what process_group_worker.work takes."""
        self.rank, self.port = rank, port
        self.output = folder / f"rank{rank}-{time.monotonic_ns()}.txt"
        self.output.touch()
        given = (rank, world_size, port, str(self.output))
        self.process = PROCESSES.Process(
            target=process_group_worker.work, args=given, kwargs=more, daemon=True
        )
        self.process.start()

    def lines(self, word: str) -> list[str]:
        return [line.split(" ", 1)[1] for line in self.text.splitlines() if line.startswith(word + " ")]


Start = Callable[..., Rank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    port = free_port()
    started: list[Rank] = []

    def start_rank(rank: int, **more: Any) -> Rank:
        started.append(Rank(tmp_path, port, rank, **more))
        return started[-1]

    yield start_rank
    for rank in started:
        rank.process.kill()
        rank.process.join()


def working_gang(start: Start, faults: dict[int, str] | None = None, **more: float) -> list[Rank]:
    process_group = [start(rank, fault=(faults or {}).get(rank, ""), **more) for rank in range(3)]
    for rank in process_group:
        rank.says("WORKS", 30)
    return process_group


@pytest.mark.parametrize(
    ("number", "guilty"), [(signal.SIGKILL, 0), (signal.SIGKILL, 2), (signal.SIGSTOP, 1)]
)
def test_a_rank_that_is_killed_or_frozen_is_named_within_15_seconds_and_a_new_attempt_forms(
    start: Start, number: signal.Signals, guilty: int
) -> None:
    process_group = working_gang(start)
    os.kill(process_group[guilty].pid, number)
    deadline = time.monotonic() + 15
    survivors = [rank for rank in process_group if rank.rank != guilty]
    for survivor in survivors:
        assert survivor.end(max(0.1, deadline - time.monotonic())) == 75
        assert f"rank {guilty} on node{guilty}" in survivor.lines("BROKEN")[0]
    if number == signal.SIGSTOP:
        os.kill(process_group[guilty].pid, signal.SIGCONT)
        assert process_group[guilty].end(15) == 75, "it wakes up and goes on"

    again = [start(rank, seconds=1) for rank in range(3)]
    assert [rank.end(40) for rank in again] == [0, 0, 0]
    assert again[0].lines("ATTEMPT") != survivors[0].lines("ATTEMPT")


def test_rank_0_does_not_wait_for_the_dead_to_hear_the_verdict(start: Start) -> None:
    """It would wait for a minute for one that lives."""
    process_group = working_gang(start)
    for rank in process_group[1:]:
        rank.process.kill()
    assert process_group[0].end(20) == 75


def test_rank_0_that_waits_ends_when_its_own_store_gives_no_answer(start: Start) -> None:
    rank0 = start(0, fault="deaf-while-waiting")
    assert rank0.end(30) == 75
    assert "its store no longer answers" in rank0.lines("BROKEN")[0]


def test_who_waits_at_a_store_where_nobody_gathers_starts_again(start: Start) -> None:
    start(0, fault="stops-gathering")
    waiting = start(1)
    assert waiting.end(30) == 75
    assert "nobody gathers the ranks at 127.0.0.1" in waiting.lines("BROKEN")[0]


def test_a_rank_leaves_though_the_store_gives_no_answer(start: Start) -> None:
    process_group = [start(rank, seconds=1, fault="deaf-at-end" if rank == 1 else "") for rank in range(3)]
    assert [rank.end(50) for rank in process_group] == [0, 0, 0]


def test_a_duplicate_start_is_turned_away_and_disturbs_nobody(start: Start) -> None:
    process_group = working_gang(start)
    duplicate = start(1)
    duplicate.says("turned away")
    time.sleep(6)  # longer than the silence that is allowed to a rank with a claim
    assert [rank.process.exitcode for rank in process_group] == [None, None, None]
    assert not duplicate.lines("ATTEMPT")


def test_a_rank_that_restarts_before_the_seal_takes_its_own_place(start: Start) -> None:
    first = start(1)
    rank0 = start(0, seconds=1)
    first.says("has joined")
    first.process.kill()
    second = start(1, seconds=1)
    second.says("has joined")
    third = start(2, seconds=1)
    process_group = (rank0, second, third)
    assert [rank.end(40) for rank in process_group] == [0, 0, 0]
    assert len({rank.lines("ATTEMPT")[0] for rank in process_group}) == 1


def test_who_does_not_belong_is_refused_and_rank_0_waits_on(start: Start) -> None:
    """On the rendezvous address, and on no other."""
    rank0 = start(0)
    rank0.says("waits for")
    listening = [
        connection.laddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == rank0.port
    ]
    assert listening == ["127.0.0.1"]
    wrong_size, wrong_run, second = start(1, world_size=2), start(2, run="other"), start(0)
    assert wrong_size.end(20) == 64
    assert "3 ranks" in wrong_size.lines("MISMATCH")[0]
    assert wrong_run.end(20) == 64
    assert "'other'" in wrong_run.lines("MISMATCH")[0]
    assert second.end(20) == 75
    assert "cannot be opened" in second.lines("BROKEN")[0]
    assert rank0.process.exitcode is None


@pytest.mark.parametrize("guilty", [0, 2])
def test_a_rank_that_cannot_take_part_ends_all_with_its_sentence_and_code(start: Start, guilty: int) -> None:
    """Also those that come long after it: they would wait for ever."""
    early = [start(rank, fault="refuse" if rank == guilty else "") for rank in (0, 2)]
    time.sleep(3)
    for rank in (*early, start(1)):
        assert rank.end(30) == 65, rank.text
        assert f"rank {guilty} on node{guilty}" in rank.lines("REFUSED")[0]
        assert "cannot take part: its corpus is empty." in rank.lines("REFUSED")[0]


def test_a_refusal_does_not_wait_for_a_rank_that_never_comes(start: Start) -> None:
    """The others would wait 40 s for it."""
    rank0, rank2 = start(0, fault="impatient"), start(2, fault="refuse")
    assert [rank.end(20) for rank in (rank0, rank2)] == [65, 65], rank0.text
    assert "rank 1 did not come to hear it" in rank0.text


@pytest.mark.parametrize(
    ("fault", "guilty", "code", "sentence"),
    [
        ("deaf", 0, 75, ""),  # its own store gives it no answer any more
        ("give-up", 0, 64, " (127.0.0.1): out of memory"),
        ("give-up", 2, 64, " (127.0.0.1): out of memory"),
        # The main thread; its heartbeat goes on.
        ("hang", 0, 75, " (127.0.0.1) hangs: step 20 has not ended"),
        ("hang", 1, 75, " (127.0.0.1) hangs: step 20 has not ended"),
    ],
)
def test_a_member_that_fails_ends_all_with_its_sentence_and_code(
    start: Start, fault: str, guilty: int, code: int, sentence: str
) -> None:
    for rank in working_gang(start, {guilty: fault}, least=5 if fault == "hang" else 30):
        assert rank.end(25) == code, rank.text
        if fault != "give-up" or rank.rank != guilty:
            (said,) = rank.lines("BROKEN")
            assert f"rank {guilty} on node{guilty}{sentence}" in said


def test_a_rank_that_has_slept_ends_itself(start: Start) -> None:
    process_group = working_gang(start, {1: "sleep"})
    assert process_group[1].end(20) == 75
    assert "rank 1 on node1 (127.0.0.1) was frozen for 6" in process_group[1].lines("BROKEN")[0]


@pytest.mark.parametrize("is_committed", [False, True], ids=["while they meet", "while they work"])
def test_what_no_rank_has_written_in_the_store_ends_all_with_a_sentence(
    start: Start, is_committed: bool
) -> None:
    if is_committed:
        process_group, key = working_gang(start), "attempt"
    else:
        process_group = [start(rank) for rank in (0, 1)]
        process_group[1].says("has joined")
        key = f"{process_group[0].lines('Attempt')[0].split(':')[0]}/join/2"
    timeout = timedelta(seconds=10)
    base = TCPStore(
        "127.0.0.1", process_group[0].port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    PrefixStore("aura", base).set(key, "GET / HTTP/1.1")
    assert process_group[0].end(20) == 75
    assert "stands what no rank writes (b'GET / HTTP/1.1')" in process_group[0].lines("BROKEN")[0]
    for rank in process_group[1:] if is_committed else ():
        assert rank.end(20) == 75


@pytest.mark.parametrize(
    ("odd", "with_nccl", "sentence"),
    [
        ({"torch": "2.12.1"}, False, r"rank 1 on n1 \(a\) torch 2.12.1, .* torch 2.13.0:"),
        ({"nccl": "2.28.3"}, True, r"rank 1 on n1 \(a\) NCCL 2.28.3, .* NCCL 2.27.5:"),
        ({"nccl": "2.28.3"}, False, ""),
    ],
)
def test_an_unlike_version_is_named(odd: dict[str, str], with_nccl: bool, sentence: str) -> None:
    usual = {"torch": "2.13.0", "nccl": "2.27.5"}
    members = [Member(rank, f"n{rank}", "a", "t", **usual | (odd if rank == 1 else {})) for rank in range(3)]
    with pytest.raises(ConfigError, match=sentence) if sentence else contextlib.nullcontext():
        check_versions(members, with_nccl)


class Cable(threading.Thread):
    """Between a rank and rank 0. What goes over connections that stood when it was cut never arrives; new ones work."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.cuts = 0

    def run(self) -> None:
        while True:
            here, _ = self.listener.accept()
            there = socket.create_connection(("127.0.0.1", self.target))
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(*pair, self.cuts), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, cuts: int) -> None:
        with contextlib.suppress(OSError):  # one side has ended
            while data := source.recv(65536):
                if self.cuts == cuts:
                    sink.sendall(data)
            if self.cuts == cuts:
                sink.shutdown(socket.SHUT_WR)


def test_a_rank_that_waited_when_the_cable_was_cut_joins_over_a_new_connection(start: Start) -> None:
    """TCP tries a connection that was cut ever more rarely: after 30 s without a cable it stays silent for 20 more."""
    rank0 = start(0, seconds=1)
    rank0.says("waits for")
    cable = Cable(rank0.port)
    cable.start()
    waiting = start(1, seconds=1, reached_at=cable.port)
    waiting.says("has joined")
    time.sleep(1)
    cable.cuts += 1
    time.sleep(1)
    third = start(2, seconds=1)
    assert [rank.end(40) for rank in (rank0, waiting, third)] == [0, 0, 0]


FIVE = [Member(rank, pc, pc, str(rank), "gloo") for rank, pc in enumerate("abbcd")]


def gang_of(
    place: int, store: Store, folder: Path, watch: Store | None = None
) -> tuple[ProcessGroup, QuorumState]:
    """As its member number `place` sees it; the first one is the host."""
    committed = {"attempt": "a", "run": "r", "launch": "l", "world_size": 5, "is_committed": True}
    store.set("attempt", json.dumps(committed))
    book = QuorumState(folder / "vote.json", "launch", Vote(Record(1, tuple(range(5)))))
    here = DistEnv(place, 0, 5, "a", 1, "")
    return ProcessGroup(FIVE[place], "a", FIVE, store, watch or store, FIVE[0], here, book), book


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    set_seconds(monkeypatch, BEAT=0.1, SILENCE=6.0, SILENCE_HURT=2.0, LINGER=0.5)


def set_seconds(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    for name, value in seconds.items():
        for module in (process_group_module, heartbeats):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def breaks(
    process_group: ProcessGroup, seconds: float, store: Store | None = None, beating: Collection[int] = ()
) -> bool:
    """Within so many, in which these ranks are heard of in the store."""
    is_over = threading.Event()
    process_group.watch(lambda sentence, code: is_over.set())  # type: ignore[arg-type,return-value]
    deadline = time.monotonic() + seconds
    while not is_over.wait(0.1) and time.monotonic() < deadline:
        for rank in beating:
            PrefixStore("a", store).add(f"beat/{rank}", 1)
    process_group.ends_itself()
    return is_over.is_set()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("silent", "blamed"), [([3], [3]), ([3, 4], [3, 4]), ([1, 2, 3], [])])
def test_who_is_silent_is_to_blame_and_nobody_where_too_many_are(
    silent: list[int], blamed: list[int], tmp_path: Path
) -> None:
    """It may be the switch then."""
    process_group, book = gang_of(0, store := HashStore(), tmp_path)
    assert breaks(process_group, 30, store, beating={1, 2, 3, 4}.difference(silent))
    assert sorted(book.stops) == blamed


@pytest.mark.parametrize(
    ("signs", "is_named"), [(["hurt", "claim/3"], True), (["hurt"], False), (["claim/3"], False)]
)
def test_who_was_started_again_after_an_exchange_failed_is_not_waited_for(
    signs: list[str], is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unit starts one at a time; one that was started twice by hand goes on beating."""
    set_seconds(monkeypatch, BEAT=0.1, SILENCE=60.0, SILENCE_HURT=60.0, SILENCE_BOTH=1.0, LINGER=60.0)
    process_group, book = gang_of(0, store := HashStore(), tmp_path)
    for sign in [*signs, "left/1", "left/2", "left/4"]:  # who lives has read the failure report
        store.set(f"a/{sign}", "yes")
    assert breaks(process_group, 30 if is_named else 3, store, beating=[1, 2, 4]) == is_named
    assert sorted(book.stops) == ([3] if is_named else [])


@pytest.mark.parametrize(("code", "blamed"), [(1, [4]), (EXIT_TEMPORARY, [])])
def test_who_asks_to_be_started_again_is_not_to_blame(code: int, blamed: list[int], tmp_path: Path) -> None:
    """It waits for others: it has too little memory without them, say."""
    store = HashStore()
    gang_of(4, store, tmp_path)[0].give_up("a reason", code)
    assert FailureReport.said(json.loads(PrefixStore("a", store).get("broken"))).causes == blamed


class NoAnswer(Store):
    """As over a cable that was cut."""

    def add(self, key: str, value: int) -> int:
        time.sleep(60)
        return value


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("others_answer", "blamed"), [(True, [0]), (False, [])])
def test_a_silent_host_is_to_blame_unless_all_are_silent(
    others_answer: bool, blamed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the own cable then, or the switch."""
    monkeypatch.setattr(process_group_module, "knock_at", lambda address, port: (False, others_answer))
    process_group, book = gang_of(1, HashStore(), tmp_path, NoAnswer())
    assert breaks(process_group, 30)
    assert sorted(book.stops) == blamed
