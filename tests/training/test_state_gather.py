"""The rank that holds the store, when another store goes before its own."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator

import pytest
from aura.cluster.dist_env import DistEnv
from aura.cluster.rendezvous_handler import RendezvousClient
from aura.cluster.rendezvous_server import GATHERS, RendezvousState, gather
from aura.cluster.rendezvous_store import Member, now, open_store
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
    place = DistEnv(0, 0, 2, OWN, free_port(), "node0", (OWN, OTHER), "launch")
    coming = RendezvousState(Member(0, "node0", OWN, "token"), place, "run", None, now() + 30, print)
    other, open_while_it_waits = RendezvousClient(coming, OTHER), []

    def elsewhere() -> bool:
        open_while_it_waits.append(listens(place.master_port))
        return other.is_committed() or len(open_while_it_waits) > 2

    assert gather(coming, OWN, None, elsewhere) is None
    assert open_while_it_waits == [True] * 3
    wait_until(lambda: not listens(place.master_port), 5, lambda: "the store is still open")


def test_a_store_that_was_stuck_counts_again_when_something_moves_in_it() -> None:
    place = DistEnv(0, 0, 2, OWN, free_port(), "node0", (OWN, OTHER), "launch")
    header = {"attempt": "a", "run": "run", "launch": "launch", "world_size": 2, "is_committed": False}
    store = open_store(OWN, place.master_port, "node0", now(), print)
    store.set("attempt", json.dumps(header))
    said: list[str] = []
    coming = RendezvousState(Member(1, "node1", OTHER, "token"), place, "run", None, now() + 30, said.append)
    client = RendezvousClient(coming, OWN)

    def look_later(seconds: float) -> bool:
        client.moved, client.tried = client.moved - seconds, client.tried - seconds / 2
        client.look_again()
        return client.is_stuck

    assert not look_later(100), "it has never been looked at"
    assert look_later(100)
    PrefixStore("a", store).add(GATHERS, 1)
    assert look_later(4), "it is asked now and then, and not each time"
    assert not look_later(100)
    assert len(said) == 1
