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

from aura.cluster import register
from aura.cluster.gang import Gang
from aura.cluster.gather import GATHERS, LATECOMERS, Coming, Report, gather, proposal_of, vote_of
from aura.cluster.peers import HOLDER_STEADY, Peers
from aura.cluster.place import Place
from aura.cluster.register import Ballot, Book, Record, enough
from aura.cluster.rendezvous import (
    KNOCK_TIMEOUT,
    GangBroken,
    GangMismatch,
    GangRefused,
    Member,
    Patient,
    PortTaken,
    connect,
    now,
    open_store,
    own_address,
    patiently,
    read_header,
    read_sealed,
    scoped,
)
from aura.errors import AuraError
from aura.texts.console import text

# Seconds after which who gathers has stopped doing so; one round of it takes as long as a silent store lets it.
NOBODY = 30.0


def join(
    place: Place,
    run: str,
    timeout: float,
    backend: str = "gloo",
    versions: dict[str, str] | None = None,
    refusal: AuraError | None = None,
    report: Report = print,
    directory: Path | None = None,
) -> Gang:
    """Wait until the ranks of one attempt of the run have come, and return the gang.

    `versions`: see place.py. `refusal`: this rank comes only to say that it cannot take part. `directory`: this rank's,
    with its vote: where the ranks know each other's addresses, those that do not come may be left out. Raises
    GangBroken when not enough have come within `timeout` seconds or the port is taken, GangMismatch when the others
    have another run, launch or world size, GangRefused when a rank cannot take part.
    """
    me = Member(
        place.rank,
        place.node,
        place.address or own_address(place.master_address, place.master_port),
        secrets.token_hex(8),
        backend,
        **(versions or {}),
        refusal=str(refusal) if refusal else "",
        exit_code=refusal.exit_code if refusal else 0,
    )
    book = None
    if place.peers and directory:
        book = Book.open(directory / register.FILE, place.launch, place.world_size)
    coming = Coming(me, place, run, book, now() + timeout, report)
    if book:
        return Meeting(coming).gang()
    if place.rank == 0:
        gang = gather(coming, place.master_address, None, lambda: False)
        assert gang
        return gang
    way_in = WayIn(coming, place.master_address)
    while now() < coming.deadline:
        if gang := way_in.gang():
            return gang
    raise could_not_join(coming, place.master_address)


def keep_others_out(place: Place, run: str, report: Report) -> Store | None:
    """Of a launch of one rank, as long as the store is kept: who is left of an earlier launch hears here that the run
    was launched again. Without a port or an address nobody hears it."""
    if not place.peers:
        return None
    with suppress(GangBroken, RuntimeError):
        store = open_store(place.address, place.master_port, place.node, now(), report)
        header = {"attempt": "alone", "run": run, "launch": place.launch, "world_size": 1, "is_sealed": True}
        patiently(lambda: store.set("attempt", json.dumps(header)))
        return store
    return None


def could_not_join(coming: Coming, address: str) -> GangBroken:
    me, port = coming.me, coming.place.master_port
    return GangBroken(text("could_not_join", rank=me.rank, node=me.node, address=address, port=port))


class Meeting:
    """Of ranks that know each other's addresses: the first of them that is there holds the store, and whoever comes
    back goes where the others train."""

    def __init__(self, coming: Coming) -> None:
        self.coming, self.own = coming, coming.place.address
        self.peers = Peers(coming.place.peers, coming.place.master_port)
        before = self.peers.addresses.index(self.own)
        self.before, self.behind = self.peers.addresses[:before], self.peers.addresses[before + 1 :]
        self.ways_in = {address: WayIn(coming, address) for address in self.peers.addresses}

    def gang(self) -> Gang:
        coming = self.coming
        if coming.me.refusal and coming.is_under_way:
            coming.deadline = min(coming.deadline, now() + LATECOMERS)  # they go on without it also unasked
        self.peers.wait_for_first_answers()
        try:
            while now() < coming.deadline:
                if gang := self._try():
                    return gang
                time.sleep(0.2)
        finally:
            self.peers.close()
        raise could_not_join(coming, self.own)

    def _try(self) -> Gang | None:
        if address := self._where_others_are(with_own=True):
            return self.ways_in[address].gang()
        if not self._may_hold():
            self.ways_in[self.before[0] if self.before else self.own].say_waiting()
            return None
        try:
            return gather(self.coming, self.own, self.peers, lambda: bool(self._where_others_are()))
        except PortTaken:  # by another rank of this PC, since the last knock
            if now() > self.coming.deadline - LATECOMERS:
                raise
            return None

    def _where_others_are(self, with_own: bool = False) -> str | None:
        """The address of a store that goes before one of this rank's own; `with_own`: another rank of this PC may hold
        one."""
        there = self._with_store()
        for address in self.behind:
            if address in there and self.ways_in[address].is_sealed():
                return address
        before = [*self._before_this(), *([self.own] if with_own else [])]
        return next((address for address in before if address in there), None)

    def _with_store(self) -> list[str]:
        """The addresses where somebody holds one for this run, and does not hang."""
        open_there = self.peers.with_store()
        for address, way_in in self.ways_in.items():
            if address not in open_there:
                way_in.is_gone()
            elif way_in.is_stuck:
                way_in.look_again()
        ways_in = {address: self.ways_in[address] for address in open_there}
        return [one for one, way in ways_in.items() if not (way.is_stuck or way.is_of_another_run)]

    def _may_hold(self) -> bool:
        if self.coming.me.refusal and self.coming.is_under_way:
            return False
        return all(map(self.peers.has_had_its_time, self._before_this()))

    def _before_this(self) -> Sequence[str]:
        """The PCs that may hold the store before this one: for a while not those that come and go, where the others may
        go on without them."""
        coming, peers = self.coming, self.peers
        if not coming.is_under_way or now() - peers.began > HOLDER_STEADY:
            return self.before
        assert coming.book
        members = set(coming.book.vote.record.members)
        unsteady = {rank for rank in members if coming.comes_and_goes(rank, peers)}
        if not enough(members - unsteady, members):
            return self.before
        pcs = {coming.place.peers[rank] for rank in unsteady}
        return [address for address in self.before if address not in pcs]


class WayIn:
    """Into the attempt whose store is at `address`."""

    def __init__(self, coming: Coming, address: str) -> None:
        self.coming, self.me, self.address = coming, coming.me, address
        self.port = coming.place.master_port
        self.turned_away_from = self.said = ""
        self.is_of_another_run = False
        self.sign: object = None  # what was last seen to move there,
        self.moved = self.tried = now()  # when, and when somebody last looked

    def gang(self) -> Gang | None:
        """One try: None when the store goes, gives its attempt up, or is sealed without this rank, before the gang is
        there. Raises GangBroken, GangMismatch, GangRefused."""
        if now() - self.tried > NOBODY / 2:
            self.moved = now()  # nobody has looked
        try:
            store = self._reach()
            if not Patient(store).check("attempt"):
                time.sleep(0.2)
                return None
            header = Patient(store).ask(read_header)
            if self.coming.book and header["run"] != self.coming.run:
                self.is_of_another_run = True
                return None
            attempt = self._checked(header)
            keys = Patient(PrefixStore(attempt, store))
            if attempt != self.turned_away_from:
                if gang := self._join(store, keys, attempt):
                    return gang
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
        with suppress(RuntimeError, GangBroken):
            store = self._reach()
            self._look(store, Patient(store).ask(read_header)["attempt"])
        self.tried = now()

    def _look(self, store: Store, attempt: str) -> None:
        """Who gathers counts its rounds, and who trains beats."""

        def sign() -> tuple[str, int, int]:
            keys = PrefixStore(attempt, store)
            host = read_sealed(keys).host.token if keys.check(["sealed"]) else ""
            return attempt, keys.add(GATHERS, 0), keys.add(f"beat/{host}", 0)

        if (seen := patiently(sign)) != self.sign:
            self.sign, self.moved = seen, now()

    def say_waiting(self) -> None:
        self._say(text("waiting_for_store", address=self.address, port=self.port))

    def is_sealed(self) -> bool:
        """Is an attempt of this run under way there, or any of a later launch of it, which has to be told of?"""
        try:
            store = Patient(self._reach())
            if not store.check("attempt"):
                return False
            header = store.ask(read_header)
        except RuntimeError:
            return False
        launch, own = str(header["launch"]), self.coming.place.launch
        is_later = launch > own or (launch == own and bool(header["is_sealed"]))
        return is_later and header["run"] == self.coming.run

    def _why_it_waits(self, keys: Patient, attempt: str) -> str:
        """Who was away several times waits for longer."""
        rank = self.me.rank
        if keys.check(key := f"patience/{rank}") and (seconds := keys.read(key)) > register.STEADY:
            return text("has_to_stay", rank=rank, seconds=seconds)
        return text("turned_away", attempt=attempt, rank=rank)

    def _say(self, sentence: str) -> None:
        if sentence != self.said:
            self.coming.report(sentence)
        self.said = sentence

    def _reach(self) -> Store:
        """Where the store ends between the knock and torch's first word to it, torch would try for CONNECT_TIMEOUT, and
        once more."""
        return scoped(patiently(lambda: connect(self.address, self.port), 2 * KNOCK_TIMEOUT))

    def _checked(self, header: dict[str, Any]) -> str:
        """The attempt's id. Raises GangMismatch."""
        place, me = self.coming.place, self.me
        if header["run"] == self.coming.run and header["launch"] != place.launch:
            raise GangMismatch(
                text("another_launch", run=self.coming.run, address=self.address, node=me.node)
            )
        if header["run"] != self.coming.run or header["world_size"] != place.world_size:
            theirs = {"their_run": header["run"], "their_size": header["world_size"]}
            mine = {"rank": me.rank, "node": me.node, "run": self.coming.run, "size": place.world_size}
            raise GangMismatch(text("another_run", address=self.address, port=self.port, **theirs, **mine))
        return str(header["attempt"])

    def _join(self, store: Store, keys: Patient, attempt: str) -> Gang | None:
        """Wait for the seal; None where it names others."""
        me, coming = self.me, self.coming
        if not keys.check("sealed"):
            keys.set(f"vote/{me.rank}", json.dumps(vote_of(coming.book)))
            keys.set(f"join/{me.rank}", json.dumps(asdict(me)))
            self._say(text("joined", attempt=attempt, rank=me.rank))
        sealed = self._wait_for_seal(Patient(store), keys, attempt)
        if me in sealed.members:
            if sealed.record:
                coming.learn(Record(*sealed.record), sealed.absences, sealed.host.rank)
            watch, host = self._reach(), sealed.host
            return Gang(me, attempt, sealed.members, store, watch, host, coming.place, coming.book)
        if any(member.rank == me.rank for member in sealed.members):
            keys.set(f"claim/{me.rank}", me.token)
        elif me.refusal:  # they are going on without it
            raise GangRefused(me.refusal, me.exit_code)
        else:
            keys.count(f"back/{me.rank}")
        return None

    def _wait_for_seal(self, store: Patient, keys: Patient, attempt: str) -> Any:
        """Beat, and vote when asked, until the attempt is sealed. Raises RuntimeError when it is given up meanwhile, or
        nobody gathers here any more and others may, GangBroken where they may not, GangRefused when a rank cannot take
        part."""
        me, coming, proposals, promised = self.me, self.coming, 0, False
        while not keys.check("sealed"):
            for key in ("refused", f"excused/{me.token}"):
                if keys.check(key):
                    refused = keys.read(key)
                    keys.set(f"told/{me.rank}", "yes")
                    raise GangRefused(str(refused["sentence"]), int(refused["exit_code"]))
            if coming.book and not promised and keys.check("ballot"):
                keys.set(f"promise/{me.rank}", coming.promise(Ballot(*keys.read("ballot"))))
                promised = True
            if promised and keys.check(f"proposal/{proposals}"):
                answer = coming.accept(proposal_of(keys.read(f"proposal/{proposals}")))
                keys.set(f"accept/{proposals}/{me.rank}", answer)
                proposals += 1
            keys.count(f"beat/{me.token}")
            self._look(store.store, attempt)
            if now() - self.moved > NOBODY:
                if coming.book:
                    raise RuntimeError("nobody gathers there")
                raise GangBroken(text("nobody_gathers", attempt=attempt, address=self.address))
            if store.ask(read_header)["attempt"] != attempt or now() > coming.deadline:
                raise RuntimeError("the attempt was given up")
            time.sleep(0.1 if promised else 0.3)
        return keys.ask(read_sealed)
