"""One attempt, one gang: who trains together, and how they notice that one is missing.

The protocol is described in docs/attempts.md. `join` blocks until every rank of this attempt has
come, `Gang.watch` starts the heartbeat, `Gang.explain` turns a failed collective into a sentence
that names the node at fault, `Gang.leave` ends in good order.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

BEAT = 1.0  # seconds between two heartbeats of a member
SILENCE = 8.0  # seconds without a heartbeat after which a member counts as gone
SILENCE_HURT = 4.0  # the same, once a collective has failed or the rank has been started again
LINGER = 2.5  # seconds that rank 0 keeps the store up after a verdict, so that all can read it
CONNECT_TIMEOUT = 10.0  # seconds for one try to reach the store


class GangBroken(Exception):
    """The gang cannot go on; a new attempt may. The text is a sentence for a person."""


class GangMismatch(Exception):
    """This rank and rank 0 do not mean the same run: trying again does not help."""


@dataclass(frozen=True)
class Member:
    rank: int
    node: str
    address: str
    token: str
    backend: str = ""  # nccl where this rank can use it, else gloo

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node} ({self.address})"


def join(
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    run: str,
    node: str,
    backend: str = "gloo",
    join_timeout: float = 600.0,
    report: Callable[[str], None] = print,
) -> Gang:
    """Wait until all `world_size` ranks of one attempt have come, and return the gang.

    Raises GangBroken when they have not come within `join_timeout` seconds or the port is taken,
    GangMismatch when rank 0 has another run or another world size.
    """
    deadline = time.monotonic() + join_timeout
    me = Member(rank, node, _own_address(master_address, master_port), secrets.token_hex(8), backend)
    if rank == 0:
        return _open_attempt(me, world_size, master_address, master_port, run, deadline, report)
    return _join_attempt(me, world_size, master_address, master_port, run, deadline, report)


class Gang:
    """The members of one sealed attempt. `store` holds keys of this attempt only."""

    def __init__(self, me: Member, attempt: str, members: list[Member], base: Store, watch: Store) -> None:
        self.attempt = attempt
        self.rank = me.rank
        self.world_size = len(members)
        self.members = members
        self.store = PrefixStore(f"{attempt}/group", base)
        self._me = me
        self._base = base  # keeps rank 0's server alive
        self._watch_store = watch
        self._verdict: str | None = None
        self._verdict_known = threading.Event()
        self._leaving = threading.Event()
        self._store_answered = time.monotonic()
        self._on_broken: Callable[[str], None] | None = None
        self._lock = threading.Lock()

    def without_nccl(self) -> list[Member]:
        return [member for member in self.members if member.backend != "nccl"]

    def watch(self, on_broken: Callable[[str], None]) -> None:
        """Start the heartbeat. `on_broken` gets the verdict, once, from a thread; it must end the process."""
        self._on_broken = on_broken
        self._store_answered = time.monotonic()
        threading.Thread(target=self._beat_loop, name="gang-beat", daemon=True).start()
        if self.rank != 0:
            threading.Thread(target=self._guard_loop, name="gang-guard", daemon=True).start()

    def explain(self, exc: BaseException, timeout: float = 15.0) -> str:
        """After a failed collective: wait for the verdict, at most `timeout` seconds, and return it."""
        try:
            hurt = PrefixStore(self.attempt, self._base)
            hurt.set("hurt", str(self.rank))
        except RuntimeError:
            pass  # the store is gone: the watching threads say so
        if self._verdict_known.wait(timeout):
            return self._verdict or ""
        return f"A collective operation failed, and every rank still answers: {exc}"

    def leave(self, timeout: float = 15.0) -> None:
        """End in good order: nobody is blamed any more, and rank 0 keeps the store up until all have left."""
        self._leaving.set()
        left = PrefixStore(self.attempt, self._base)
        try:
            left.add("left", 1)
            deadline = time.monotonic() + timeout
            while self.rank == 0 and left.add("left", 0) < self.world_size and time.monotonic() < deadline:
                time.sleep(0.05)
        except RuntimeError:
            pass  # rank 0 has gone before us; we are leaving anyway

    def _beat_loop(self) -> None:
        """Beat, read the verdict; on rank 0 also watch everybody else's beat."""
        store = PrefixStore(self.attempt, self._watch_store)
        seen: dict[int, tuple[int, float]] = {}
        previous = time.monotonic()
        while not self._leaving.wait(BEAT):
            now = time.monotonic()
            if now - previous > SILENCE:
                self._broken(
                    f"{self._me} was frozen for {now - previous:.0f} s; the others have gone on without it."
                )
                return
            previous = now
            try:
                store.add(f"beat/{self._me.token}", 1)
                current = json.loads(self._watch_store.get("attempt"))["attempt"]
                if current != self.attempt:
                    self._broken(f"Attempt {current} has begun; {self._me} belongs to {self.attempt}.")
                    return
                if store.check(["broken"]):
                    self._broken(store.get("broken").decode())
                    return
                if self.rank == 0 and (verdict := self._find_silent(store, seen)):
                    store.compare_set("broken", "", verdict)
                    time.sleep(LINGER)
                    self._broken(verdict)
                    return
            except RuntimeError as exc:
                if not self._leaving.is_set():
                    self._broken(
                        f"{self.members[0]} has ended: its store no longer answers ({_first_line(exc)})."
                    )
                return
            self._store_answered = time.monotonic()

    def _find_silent(self, store: Store, seen: dict[int, tuple[int, float]]) -> str | None:
        """Rank 0: the sentence about the first member whose heartbeat has stopped, or None."""
        now = time.monotonic()
        hurt = store.check(["hurt"])
        for member in self.members[1:]:
            beats = store.add(f"beat/{member.token}", 0)
            count, since = seen.get(member.rank, (-1, now))
            if beats != count:
                seen[member.rank] = (beats, now)
                continue
            claimed = store.check([f"claim/{member.rank}"])
            if now - since > (SILENCE_HURT if hurt or claimed else SILENCE):
                started_again = " and has been started again" if claimed else ""
                return f"{member} has not answered for {now - since:.0f} s{started_again}."
        return None

    def _guard_loop(self) -> None:
        """A store operation can hang when rank 0's node loses power; this thread never touches the store."""
        while not self._leaving.wait(BEAT):
            silent = time.monotonic() - self._store_answered
            if silent > SILENCE:
                self._broken(f"{self.members[0]} has not answered for {silent:.0f} s.")
                return

    def _broken(self, sentence: str) -> None:
        with self._lock:
            if self._verdict is not None or self._leaving.is_set():
                return
            self._verdict = sentence
        self._verdict_known.set()
        if self._on_broken is not None:
            self._on_broken(sentence)


def _open_attempt(
    me: Member,
    world_size: int,
    address: str,
    port: int,
    run: str,
    deadline: float,
    report: Callable[[str], None],
) -> Gang:
    """Rank 0: hold the store, issue the attempt's id, wait for everybody, seal."""
    agent_holds_store = _agent_holds_store()
    try:
        base = TCPStore(
            address,
            port,
            is_master=not agent_holds_store,
            timeout=timedelta(seconds=CONNECT_TIMEOUT),
            wait_for_workers=False,
        )
    except RuntimeError as exc:
        raise GangBroken(
            f"Port {port} on {me.node} cannot be opened ({_first_line(exc)}). "
            "Another run may be active there; choose another rendezvous port or stop it."
        ) from exc
    store = _scoped(base)
    attempt = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    store.set("attempt", json.dumps({"attempt": attempt, "run": run, "world_size": world_size}))
    keys = PrefixStore(attempt, store)
    keys.set("join/0", json.dumps(asdict(me)))
    report(f"Attempt {attempt}: rank 0 waits for {world_size - 1} other ranks on port {port}.")

    seen: dict[str, tuple[int, float]] = {}
    next_report = time.monotonic() + 10
    while True:
        now = time.monotonic()
        alive, missing = [me], []
        for rank in range(1, world_size):
            member = _joined(keys, rank)
            if member is None:
                missing.append(rank)
                continue
            beats = keys.add(f"beat/{member.token}", 0)
            count, since = seen.get(member.token, (0, now))
            if beats != count:
                seen[member.token] = (beats, now)
                alive.append(member)
            elif count > 0 and now - since < SILENCE_HURT:
                alive.append(member)
            else:
                missing.append(rank)
        if not missing:
            break
        if now > deadline:
            raise GangBroken(f"Attempt {attempt}: {_ranks(missing)} did not come in time.")
        if now > next_report:
            report(f"Attempt {attempt}: still waiting for {_ranks(missing)}.")
            next_report = now + 10
        time.sleep(0.2)
    keys.set("sealed", json.dumps([asdict(member) for member in alive]))
    report(f"Attempt {attempt} is sealed: {world_size} ranks.")
    return Gang(me, attempt, alive, store, _scoped(_connect(address, port)))


def _join_attempt(
    me: Member,
    world_size: int,
    address: str,
    port: int,
    run: str,
    deadline: float,
    report: Callable[[str], None],
) -> Gang:
    """Every other rank: find the store, join its attempt, wait for the seal; start over when rank 0 goes."""
    said = ""

    def say(sentence: str) -> None:
        nonlocal said
        if sentence != said:
            report(sentence)
        said = sentence

    turned_away_from = ""
    while time.monotonic() < deadline:
        try:
            store = _scoped(_connect(address, port))
            if not store.check(["attempt"]):
                time.sleep(0.2)
                continue
            header = json.loads(store.get("attempt"))
            attempt = header["attempt"]
            if header["run"] != run or header["world_size"] != world_size:
                raise GangMismatch(
                    f"Rank 0 at {address}:{port} trains run {header['run']!r} with {header['world_size']} ranks, "
                    f"but rank {me.rank} on {me.node} was started for run {run!r} with {world_size}."
                )
            keys = PrefixStore(attempt, store)
            if attempt != turned_away_from:
                if not keys.check(["sealed"]):
                    keys.set(f"join/{me.rank}", json.dumps(asdict(me)))
                    say(f"Attempt {attempt}: rank {me.rank} has joined and waits for the others.")
                members = _wait_for_seal(store, keys, me, attempt, deadline)
                if me in members:
                    return Gang(me, attempt, members, store, _scoped(_connect(address, port)))
                keys.set(f"claim/{me.rank}", me.token)
                turned_away_from = attempt
            say(
                f"Attempt {attempt} is sealed without this start of rank {me.rank}: turned away, waiting for the next."
            )
            time.sleep(0.5)
        except RuntimeError:
            say(f"Waiting for rank 0 at {address}:{port}.")
            time.sleep(0.5)
    raise GangBroken(f"Rank {me.rank} on {me.node} could not join a gang at {address}:{port} in time.")


def _wait_for_seal(store: Store, keys: Store, me: Member, attempt: str, deadline: float) -> list[Member]:
    """Beat until the attempt is sealed; the members. Raises RuntimeError when it is given up meanwhile."""
    while not keys.check(["sealed"]):
        keys.add(f"beat/{me.token}", 1)
        if json.loads(store.get("attempt"))["attempt"] != attempt or time.monotonic() > deadline:
            raise RuntimeError("the attempt was given up")
        time.sleep(0.5)
    return [Member(**member) for member in json.loads(keys.get("sealed"))]


def _joined(keys: Store, rank: int) -> Member | None:
    key = f"join/{rank}"
    return Member(**json.loads(keys.get(key))) if keys.check([key]) else None


def _connect(address: str, port: int) -> TCPStore:
    return TCPStore(
        address, port, is_master=False, timeout=timedelta(seconds=CONNECT_TIMEOUT), wait_for_workers=False
    )


def _agent_holds_store() -> bool:
    """torchrun's agent on the first node already listens on MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _scoped(store: TCPStore) -> Store:
    """torchrun's store outlives the processes: its restart count keeps their keys apart."""
    if not _agent_holds_store():
        return PrefixStore("aura", store)
    return PrefixStore(f"aura/restart{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _own_address(master_address: str, master_port: int) -> str:
    """The address that this host uses towards rank 0. A UDP connect sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master_address, master_port))
            return str(probe.getsockname()[0])
        except OSError:
            return "unknown address"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _first_line(exc: BaseException) -> str:
    return str(exc).splitlines()[0] if str(exc) else type(exc).__name__
