"""For how long who is missing is waited for. (What follows from it: test_without_some.py.)"""

from __future__ import annotations

import pytest
from aura.cluster import peers

ADDRESS = "192.0.2.1"


@pytest.mark.parametrize(
    ("up", "is_waited_for"), [(100.0, True), (200.0, False)], ids=["just booted", "up for a while"]
)
def test_after_a_power_cut_everywhere_who_boots_more_slowly_is_waited_for(
    up: float, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a newer checkpoint than all that are there."""
    monkeypatch.setattr(peers, "now", lambda: up - 60)
    monkeypatch.setattr(peers, "_knock_at", lambda *_: (False, False))
    knocking = peers.Peers([ADDRESS], 1)
    knocking.wait_for_first_answers()
    knocking.close()
    assert knocking.grace(ADDRESS) == peers.GRACE  # nobody knows yet
    monkeypatch.setattr(peers, "now", lambda: up)
    assert knocking.is_silent(ADDRESS)
    assert (knocking.grace(ADDRESS) > 3600) == is_waited_for
