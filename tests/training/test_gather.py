"""The rank that holds the store, when another store goes before its own."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator

import pytest
from aura.cluster.gather import GATHERS, Coming, gather
from aura.cluster.join import WayIn
from aura.cluster.place import Place
from aura.cluster.rendezvous import Member, now, open_store
from ports import free_port
from services import listens, wait_until
from torch.distributed import PrefixStore

OWN, OTHER = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python's collector may come at any time, or for an hour not."""
    gc.disable()
    yield
    gc.enable()


def test_a_store_that_is_given_up_is_closed_though_the_other_one_did_not_answer_at_first(
    no_collection: None,
) -> None:
    """Open, it is found by all ranks, its own among them, and they wait there for one that gathers nobody."""
    place = Place(0, 0, 2, OWN, free_port(), "node0", (OWN, OTHER), "launch")
    coming = Coming(Member(0, "node0", OWN, "token"), place, "run", None, now() + 30, print)
    other, open_while_it_waits = WayIn(coming, OTHER), []

    def elsewhere() -> bool:
        open_while_it_waits.append(listens(place.master_port))
        return other.is_sealed() or len(open_while_it_waits) > 2

    assert gather(coming, OWN, None, elsewhere) is None
    assert open_while_it_waits == [True] * 3
    wait_until(lambda: not listens(place.master_port), 5, lambda: "the store is still open")


def test_a_store_that_was_stuck_counts_again_when_something_moves_in_it() -> None:
    place = Place(0, 0, 2, OWN, free_port(), "node0", (OWN, OTHER), "launch")
    header = {"attempt": "a", "run": "run", "launch": "launch", "world_size": 2, "is_sealed": False}
    store = open_store(OWN, place.master_port, "node0", now(), print)
    store.set("attempt", json.dumps(header))
    said: list[str] = []
    coming = Coming(Member(1, "node1", OTHER, "token"), place, "run", None, now() + 30, said.append)
    way_in = WayIn(coming, OWN)

    def look_later(seconds: float) -> bool:
        way_in.moved, way_in.tried = way_in.moved - seconds, way_in.tried - seconds / 2
        way_in.look_again()
        return way_in.is_stuck

    assert not look_later(100), "it has never been looked at"
    assert look_later(100)
    PrefixStore("a", store).add(GATHERS, 1)
    assert look_later(4), "it is asked now and then, and not each time"
    assert not look_later(100)
    assert len(said) == 1
