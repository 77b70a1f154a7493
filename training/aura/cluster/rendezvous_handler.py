"""How the ranks of an attempt find each other (docs/attempts.md)."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from aura.cluster import quorum
from aura.cluster.dist_env import DistEnv
from aura.cluster.peers import HOLDER_STEADY, Peers
from aura.cluster.process_group import ProcessGroup
from aura.cluster.quorum import Ballot, QuorumState, Record, enough, proposal_of, vote_of
from aura.cluster.rendezvous_server import (
    GATHERS,
    LATECOMERS,
    RendezvousState,
    Report,
    gather,
)
from aura.cluster.rendezvous_store import (
    KNOCK_TIMEOUT,
    Member,
    Patient,
    PortTaken,
    ProcessGroupBroken,
    ProcessGroupMismatch,
    ProcessGroupRefused,
    connect,
    now,
    open_store,
    own_address,
    patiently,
    read_committed,
    read_header,
    scoped,
)
from aura.errors import AuraError
from aura.texts.console import text

# Seconds after which who gathers has stopped doing so; one round of it takes as long as a silent store lets it.
NOBODY = 30.0


def join(
    dist_env: DistEnv,
    run: str,
    timeout: float,
    backend: str = "gloo",
    versions: dict[str, str] | None = None,
    refusal: AuraError | None = None,
    report: Report = print,
    directory: Path | None = None,
) -> ProcessGroup:
    """Wait until the ranks of one attempt of the run have come, and return the process group.

    `versions`: see dist_env.py. `refusal`: this rank comes only to say that it cannot take part. `directory`: this
    rank's, with its vote: where the ranks know each other's addresses, those that do not come may be left out. Raises
    GangBroken when not enough have come within `timeout` seconds or the port is taken, GangMismatch when the others
    have another run, launch or world size, GangRefused when a rank cannot take part.
    """
    me = Member(
        dist_env.rank,
        dist_env.node,
        dist_env.address or own_address(dist_env.master_address, dist_env.master_port),
        secrets.token_hex(8),
        backend,
        **(versions or {}),
        refusal=str(refusal) if refusal else "",
        exit_code=refusal.exit_code if refusal else 0,
    )
    quorum_state = None
    if dist_env.peers and directory:
        quorum_state = QuorumState.open(directory / quorum.FILE, dist_env.launch, dist_env.world_size)
    state = RendezvousState(me, dist_env, run, quorum_state, now() + timeout, report)
    if quorum_state:
        return RendezvousHandler(state).process_group()
    if dist_env.rank == 0:
        process_group = gather(state, dist_env.master_address, None, lambda: False)
        assert process_group
        return process_group
    client = RendezvousClient(state, dist_env.master_address)
    while now() < state.deadline:
        if process_group := client.process_group():
            return process_group
    raise could_not_join(state, dist_env.master_address)


def keep_others_out(dist_env: DistEnv, run: str, report: Report) -> Store | None:
    """Of a launch of one rank, as long as the store is kept: who is left of an earlier launch hears here that the run
    was launched again. Without a port or an address nobody hears it."""
    if not dist_env.peers:
        return None
    with suppress(ProcessGroupBroken, RuntimeError):
        store = open_store(dist_env.address, dist_env.master_port, dist_env.node, now(), report)
        header = {
            "attempt": "alone",
            "run": run,
            "launch": dist_env.launch,
            "world_size": 1,
            "is_committed": True,
        }
        patiently(lambda: store.set("attempt", json.dumps(header)))
        return store
    return None


def could_not_join(state: RendezvousState, address: str) -> ProcessGroupBroken:
    me, port = state.me, state.dist_env.master_port
    return ProcessGroupBroken(text("could_not_join", rank=me.rank, node=me.node, address=address, port=port))


class RendezvousHandler:
    """Of ranks that know each other's addresses: the first of them that is there holds the store, and whoever comes
    back goes where the others train."""

    def __init__(self, state: RendezvousState) -> None:
        self.state, self.own = state, state.dist_env.address
        self.peers = Peers(state.dist_env.peers, state.dist_env.master_port)
        before = self.peers.addresses.index(self.own)
        self.before, self.behind = self.peers.addresses[:before], self.peers.addresses[before + 1 :]
        self.clients = {address: RendezvousClient(state, address) for address in self.peers.addresses}

    def process_group(self) -> ProcessGroup:
        state = self.state
        if state.me.refusal and state.is_under_way:
            state.deadline = min(state.deadline, now() + LATECOMERS)  # they go on without it also unasked
        self.peers.wait_for_first_answers()
        try:
            while now() < state.deadline:
                if process_group := self._try():
                    return process_group
                time.sleep(0.2)
        finally:
            self.peers.close()
        raise could_not_join(state, self.own)

    def _try(self) -> ProcessGroup | None:
        if address := self._where_others_are(with_own=True):
            return self.clients[address].process_group()
        if not self._may_hold():
            self.clients[self.before[0] if self.before else self.own].say_waiting()
            return None
        try:
            return gather(self.state, self.own, self.peers, lambda: bool(self._where_others_are()))
        except PortTaken:  # by another rank of this PC, since the last knock
            if now() > self.state.deadline - LATECOMERS:
                raise
            return None

    def _where_others_are(self, with_own: bool = False) -> str | None:
        """The address of a store that goes before one of this rank's own; `with_own`: another rank of this PC may hold
        one."""
        there = self._with_store()
        for address in self.behind:
            if address in there and self.clients[address].is_committed():
                return address
        before = [*self._before_this(), *([self.own] if with_own else [])]
        return next((address for address in before if address in there), None)

    def _with_store(self) -> list[str]:
        """The addresses where somebody holds one for this run, and does not hang."""
        open_there = self.peers.with_store()
        for address, client in self.clients.items():
            if address not in open_there:
                client.is_gone()
            elif client.is_stuck:
                client.look_again()
        clients = {address: self.clients[address] for address in open_there}
        return [one for one, way in clients.items() if not (way.is_stuck or way.is_of_another_run)]

    def _may_hold(self) -> bool:
        if self.state.me.refusal and self.state.is_under_way:
            return False
        return all(map(self.peers.has_had_its_time, self._before_this()))

    def _before_this(self) -> Sequence[str]:
        """The PCs that may hold the store before this one: for a while not those that come and go, where the others may
        go on without them."""
        state, peers = self.state, self.peers
        if not state.is_under_way or now() - peers.began > HOLDER_STEADY:
            return self.before
        assert state.quorum_state
        members = set(state.quorum_state.vote.record.members)
        unsteady = {rank for rank in members if state.comes_and_goes(rank, peers)}
        if not enough(members - unsteady, members):
            return self.before
        pcs = {state.dist_env.peers[rank] for rank in unsteady}
        return [address for address in self.before if address not in pcs]


class RendezvousClient:
    """Into the attempt whose store is at `address`."""

    def __init__(self, state: RendezvousState, address: str) -> None:
        self.state, self.me, self.address = state, state.me, address
        self.port = state.dist_env.master_port
        self.turned_away_from = self.said = ""
        self.is_of_another_run = False
        self.sign: object = None  # what was last seen to move there,
        self.moved = self.tried = now()  # when, and when somebody last looked

    def process_group(self) -> ProcessGroup | None:
        """One try: None when the store goes, gives its attempt up, or is committed without this rank, before the
        process group is there. Raises GangBroken, GangMismatch, GangRefused."""
        if now() - self.tried > NOBODY / 2:
            self.moved = now()  # nobody has looked
        try:
            store = self._reach()
            if not Patient(store).check("attempt"):
                time.sleep(0.2)
                return None
            header = Patient(store).ask(read_header)
            if self.state.quorum_state and header["run"] != self.state.run:
                self.is_of_another_run = True
                return None
            attempt = self._checked(header)
            keys = Patient(PrefixStore(attempt, store))
            if attempt != self.turned_away_from:
                if process_group := self._join(store, keys, attempt):
                    return process_group
                self.turned_away_from = attempt
            elif keys.check(f"back/{self.me.rank}"):
                keys.count(f"back/{self.me.rank}")
            self._look(store, attempt)
            self._say(self._why_it_waits(keys, attempt))
            time.sleep(0.5)
        except RuntimeError:
            self.say_waiting()
            time.sleep(0.5)
        finally:
            self.tried = now()
        return None

    @property
    def is_stuck(self) -> bool:
        """The store's port is open, but whoever holds it hangs, or its disk does."""
        return self.tried - self.moved > NOBODY

    def is_gone(self) -> None:
        self.moved = self.tried = now()
        self.is_of_another_run = False

    def look_again(self) -> None:
        """Now and then, whether something moves there that was stuck."""
        self._say(text("store_is_stuck", address=self.address, seconds=NOBODY))
        if now() - self.tried < NOBODY / 2:
            return
        with suppress(RuntimeError, ProcessGroupBroken):
            store = self._reach()
            self._look(store, Patient(store).ask(read_header)["attempt"])
        self.tried = now()

    def _look(self, store: Store, attempt: str) -> None:
        """Who gathers counts its rounds, and who trains beats."""

        def sign() -> tuple[str, int, int]:
            keys = PrefixStore(attempt, store)
            host = read_committed(keys).host.token if keys.check(["committed"]) else ""
            return attempt, keys.add(GATHERS, 0), keys.add(f"beat/{host}", 0)

        if (seen := patiently(sign)) != self.sign:
            self.sign, self.moved = seen, now()

    def say_waiting(self) -> None:
        self._say(text("waiting_for_store", address=self.address, port=self.port))

    def is_committed(self) -> bool:
        """Is an attempt of this run under way there, or any of a later launch of it, which has to be told of?"""
        try:
            store = Patient(self._reach())
            if not store.check("attempt"):
                return False
            header = store.ask(read_header)
        except RuntimeError:
            return False
        launch, own = str(header["launch"]), self.state.dist_env.launch
        is_later = launch > own or (launch == own and bool(header["is_committed"]))
        return is_later and header["run"] == self.state.run

    def _why_it_waits(self, keys: Patient, attempt: str) -> str:
        """Who was away several times waits for longer."""
        rank = self.me.rank
        if keys.check(key := f"patience/{rank}") and (seconds := keys.read(key)) > quorum.STEADY:
            return text("has_to_stay", rank=rank, seconds=seconds)
        return text("turned_away", attempt=attempt, rank=rank)

    def _say(self, sentence: str) -> None:
        if sentence != self.said:
            self.state.report(sentence)
        self.said = sentence

    def _reach(self) -> Store:
        """Where the store ends between the knock and torch's first word to it, torch would try for CONNECT_TIMEOUT, and
        once more."""
        return scoped(patiently(lambda: connect(self.address, self.port), 2 * KNOCK_TIMEOUT))

    def _checked(self, header: dict[str, Any]) -> str:
        """The attempt's id. Raises GangMismatch."""
        dist_env, me = self.state.dist_env, self.me
        if header["run"] == self.state.run and header["launch"] != dist_env.launch:
            raise ProcessGroupMismatch(
                text("another_launch", run=self.state.run, address=self.address, node=me.node)
            )
        if header["run"] != self.state.run or header["world_size"] != dist_env.world_size:
            theirs = {"their_run": header["run"], "their_size": header["world_size"]}
            mine = {"rank": me.rank, "node": me.node, "run": self.state.run, "size": dist_env.world_size}
            raise ProcessGroupMismatch(
                text("another_run", address=self.address, port=self.port, **theirs, **mine)
            )
        return str(header["attempt"])

    def _join(self, store: Store, keys: Patient, attempt: str) -> ProcessGroup | None:
        """Wait for the commit; None where it names others."""
        me, state = self.me, self.state
        if not keys.check("committed"):
            keys.set(f"vote/{me.rank}", json.dumps(vote_of(state.quorum_state)))
            keys.set(f"join/{me.rank}", json.dumps(asdict(me)))
            self._say(text("joined", attempt=attempt, rank=me.rank))
        committed = self._wait_for_commit(Patient(store), keys, attempt)
        if me in committed.members:
            if committed.record:
                state.learn(Record(*committed.record), committed.absences, committed.host.rank)
            watch, host = self._reach(), committed.host
            return ProcessGroup(
                me, attempt, committed.members, store, watch, host, state.dist_env, state.quorum_state
            )
        if any(member.rank == me.rank for member in committed.members):
            keys.set(f"claim/{me.rank}", me.token)
        elif me.refusal:  # they are going on without it
            raise ProcessGroupRefused(me.refusal, me.exit_code)
        else:
            keys.count(f"back/{me.rank}")
        return None

    def _wait_for_commit(self, store: Patient, keys: Patient, attempt: str) -> Any:
        """Beat, and vote when asked, until the attempt is committed. Raises RuntimeError when it is given up
        meanwhile, or nobody gathers here any more and others may, GangBroken where they may not, GangRefused when a
        rank cannot take part."""
        me, state, proposals, promised = self.me, self.state, 0, False
        while not keys.check("committed"):
            for key in ("refused", f"excused/{me.token}"):
                if keys.check(key):
                    refused = keys.read(key)
                    keys.set(f"told/{me.rank}", "yes")
                    raise ProcessGroupRefused(str(refused["sentence"]), int(refused["exit_code"]))
            if state.quorum_state and not promised and keys.check("ballot"):
                keys.set(f"promise/{me.rank}", state.promise(Ballot(*keys.read("ballot"))))
                promised = True
            if promised and keys.check(f"proposal/{proposals}"):
                answer = state.accept(proposal_of(keys.read(f"proposal/{proposals}")))
                keys.set(f"accept/{proposals}/{me.rank}", answer)
                proposals += 1
            keys.count(f"beat/{me.token}")
            self._look(store.store, attempt)
            if now() - self.moved > NOBODY:
                if state.quorum_state:
                    raise RuntimeError("nobody gathers there")
                raise ProcessGroupBroken(text("nobody_gathers", attempt=attempt, address=self.address))
            if store.ask(read_header)["attempt"] != attempt or now() > state.deadline:
                raise RuntimeError("the attempt was given up")
            time.sleep(0.1 if promised else 0.3)
        return keys.ask(read_committed)
