"""How the ranks of an attempt find each other (docs/attempts.md): all of them, or none."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch.distributed import PrefixStore, Store

from aura.cluster.gang import SILENCE_HURT, Gang
from aura.cluster.place import Place
from aura.cluster.rendezvous import (
    CONNECT_TIMEOUT,
    GangBroken,
    GangMismatch,
    GangRefused,
    Member,
    connect,
    first_line,
    now,
    open_store,
    own_address,
    patiently,
    read,
    read_header,
    read_members,
    scoped,
)
from aura.errors import AuraError
from aura.texts.console import text

Report = Callable[[str], None]
# Seconds in which a rank that has not come may still come and be told that nobody trains: the longest pause of
# start-rank, and a start.
LATECOMERS = 90.0


def join(
    place: Place,
    run: str,
    timeout: float,
    backend: str = "gloo",
    versions: dict[str, str] | None = None,
    refusal: AuraError | None = None,
    report: Report = print,
) -> Gang:
    """Wait until all ranks of one attempt of the run have come, and return the gang.

    `versions`: see place.py. `refusal`: this rank comes only to say that it cannot take part. Raises GangBroken when
    not all have come within `timeout` seconds or the port is taken, GangMismatch when rank 0 has another run or another
    world size, GangRefused when a rank cannot take part: the same on all ranks.
    """
    deadline = now() + timeout
    me = Member(
        place.rank,
        place.node,
        own_address(place.master_address, place.master_port),
        secrets.token_hex(8),
        backend,
        **(versions or {}),
        refusal=str(refusal) if refusal else "",
        exit_code=refusal.exit_code if refusal else 0,
    )
    way_in = _open_attempt if place.rank == 0 else _join_attempt
    return way_in(me, place, run, deadline, report)


def _open_attempt(me: Member, place: Place, run: str, deadline: float, report: Report) -> Gang:
    """Rank 0: hold the store, issue the attempt's id, wait for everybody, seal."""
    world_size, address, port = place.world_size, place.master_address, place.master_port
    store = open_store(address, port, me.node, deadline, report)
    attempt = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    header = json.dumps({"attempt": attempt, "run": run, "world_size": world_size})
    keys = PrefixStore(attempt, store)
    try:
        patiently(lambda: store.set("attempt", header))
        patiently(lambda: keys.set("join/0", json.dumps(asdict(me))))
        report(text("rank_0_waits", attempt=attempt, others=world_size - 1, port=port))
        members = _wait_for_all(keys, me, world_size, attempt, deadline, report)
        patiently(lambda: keys.set("sealed", json.dumps([asdict(member) for member in members])))
        report(text("sealed", attempt=attempt, ranks=world_size))
        return Gang(me, attempt, members, store, scoped(connect(address, port)))
    except RuntimeError as error:  # its own store is silent: this node has lost its address, say
        raise GangBroken(text("store_ended", member=me, error=first_line(error))) from error


def _wait_for_all(
    keys: Store, me: Member, world_size: int, attempt: str, deadline: float, report: Report
) -> list[Member]:
    """Raises GangBroken, GangRefused, and RuntimeError where the store does not answer."""
    seen: dict[str, tuple[int, float]] = {}
    next_report = now() + 10
    while True:
        joined, alive = patiently(lambda: _who_is_there(keys, me, world_size, seen))
        for member in joined:
            if member.refusal:
                _tell_all(keys, member, world_size, deadline, report)
        missing = sorted(set(range(world_size)) - {member.rank for member in alive})
        if not missing:
            return alive
        if now() > deadline:
            raise GangBroken(text("did_not_come", attempt=attempt, ranks=_ranks(missing)))
        if now() > next_report:
            report(text("still_waiting", attempt=attempt, ranks=_ranks(missing)))
            next_report = now() + 10
        time.sleep(0.2)


def _who_is_there(
    keys: Store, me: Member, world_size: int, seen: dict[str, tuple[int, float]]
) -> tuple[list[Member], list[Member]]:
    """Who has joined, and who of them beats."""
    joined = [me, *(member for rank in range(1, world_size) if (member := _joined(keys, rank)))]
    return joined, [member for member in joined if member is me or _is_alive(keys, member, seen)]


def _joined(keys: Store, rank: int) -> Member | None:
    key = f"join/{rank}"
    return read_members(keys, key)[0] if keys.check([key]) else None


def _is_alive(keys: Store, member: Member, seen: dict[str, tuple[int, float]]) -> bool:
    """Has it beaten during the last seconds? `seen`: beats by token, and since when they are so many."""
    beats, time_now = keys.add(f"beat/{member.token}", 0), now()
    count, since = seen.get(member.token, (0, time_now))
    if beats != count:
        seen[member.token] = (beats, time_now)
        return True
    return count > 0 and time_now - since < SILENCE_HURT


def _tell_all(keys: Store, member: Member, world_size: int, deadline: float, report: Report) -> None:
    """Rank 0, when a rank cannot take part: the store stays up until every rank knows it, or none comes any more.

    Raises GangRefused. Whoever is not told waits for rank 0, starts again, and waits again.
    """
    sentence = text("cannot_take_part", member=member, reason=member.refusal)
    refused = json.dumps({"sentence": sentence, "exit_code": member.exit_code})
    patiently(lambda: keys.set("refused", refused))
    report(sentence)
    next_report, deadline = now() + 10, min(deadline, now() + LATECOMERS)
    while untold := patiently(lambda: _untold(keys, world_size)):
        if now() > deadline:
            report(text("never_told", ranks=_ranks(untold)))
            break
        if now() > next_report:
            report(text("still_to_be_told", ranks=_ranks(untold)))
            next_report = now() + 10
        time.sleep(0.2)
    raise GangRefused(sentence, member.exit_code)


def _untold(keys: Store, world_size: int) -> list[int]:
    return [rank for rank in range(1, world_size) if not keys.check([f"told/{rank}"])]


class _Patient:
    """A store whose operations raise RuntimeError when no answer comes, where torch's may wait for ever."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def check(self, key: str) -> bool:
        return patiently(lambda: self.store.check([key]))

    def ask(self, reader: Callable[[Store], Any]) -> Any:
        return patiently(lambda: reader(self.store))

    def set(self, key: str, value: str) -> None:
        patiently(lambda: self.store.set(key, value))

    def beat(self, token: str) -> None:
        patiently(lambda: self.store.add(f"beat/{token}", 1))


def _join_attempt(me: Member, place: Place, run: str, deadline: float, report: Report) -> Gang:
    """Every other rank: find the store, join its attempt, wait for the seal; start over when rank 0 goes."""
    world_size, address, port = place.world_size, place.master_address, place.master_port
    said = ""

    def say(sentence: str) -> None:
        nonlocal said
        if sentence != said:
            report(sentence)
        said = sentence

    def reach() -> Store:
        return scoped(patiently(lambda: connect(address, port), 2 * CONNECT_TIMEOUT))

    turned_away_from = ""
    while now() < deadline:
        try:
            store = reach()
            if not _Patient(store).check("attempt"):
                time.sleep(0.2)
                continue
            header = _Patient(store).ask(read_header)
            attempt = header["attempt"]
            if header["run"] != run or header["world_size"] != world_size:
                theirs = {"their_run": header["run"], "their_size": header["world_size"]}
                mine = {"rank": me.rank, "node": me.node, "run": run, "size": world_size}
                raise GangMismatch(text("another_run", address=address, port=port, **theirs, **mine))
            keys = _Patient(PrefixStore(attempt, store))
            if attempt != turned_away_from:
                if not keys.check("sealed"):
                    keys.set(f"join/{me.rank}", json.dumps(asdict(me)))
                    say(text("joined", attempt=attempt, rank=me.rank))
                members = _wait_for_seal(_Patient(store), keys, me, attempt, deadline)
                if me in members:
                    return Gang(me, attempt, members, store, reach())
                keys.set(f"claim/{me.rank}", me.token)
                turned_away_from = attempt
            say(text("turned_away", attempt=attempt, rank=me.rank))
            time.sleep(0.5)
        except RuntimeError:
            say(text("waiting_for_rank_0", address=address, port=port))
            time.sleep(0.5)
    raise GangBroken(text("could_not_join", rank=me.rank, node=me.node, address=address, port=port))


def _wait_for_seal(
    store: _Patient, keys: _Patient, me: Member, attempt: str, deadline: float
) -> list[Member]:
    """Beat until the attempt is sealed; the members. Raises RuntimeError when it is given up meanwhile, GangRefused
    when a rank cannot take part."""
    while not keys.check("sealed"):
        if keys.check("refused"):
            refused = keys.ask(lambda store: read(store, "refused"))
            keys.set(f"told/{me.rank}", "yes")
            raise GangRefused(str(refused["sentence"]), int(refused["exit_code"]))
        keys.beat(me.token)
        if store.ask(read_header)["attempt"] != attempt or now() > deadline:
            raise RuntimeError("the attempt was given up")
        time.sleep(0.5)
    return list(keys.ask(lambda store: read_members(store, "sealed")))


def _ranks(ranks: list[int]) -> str:
    return text("one_rank" if len(ranks) == 1 else "several_ranks", ranks=", ".join(map(str, ranks)))
