"""Who belongs to a run, by its rule alone (aura/cluster/quorum.py): simulated, with all that may go wrong.

A schedule is made from a seed. Ranks go and come back, disks are wiped, the network is cut, messages are lost, doubled
and late, and a rank may die between what it writes and what it says.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from aura.cluster import quorum
from aura.cluster.quorum import NOTHING, Ballot, Proposal, QuorumState, Record, Vote, lacking, next_proposal

EVERYONE = Record(0, (0, 1, 2, 3, 4))


class Violation(Exception):
    pass


@dataclass
class Disk:
    vote: Vote
    may_vote: bool = True


@dataclass
class Rank:
    number: int
    disk: Disk
    runs: bool = True
    trains: Record | None = None  # it is a member of this one, and has given no promise since
    # As a host
    ballot: Ballot | None = None
    votes: dict[int, Vote] = field(default_factory=dict)
    present: set[int] = field(default_factory=set)
    proposal: Proposal | None = None
    accepted: set[int] = field(default_factory=set)

    def forget(self) -> None:
        self.ballot = self.proposal = self.trains = None
        self.votes, self.present, self.accepted = {}, set(), set()


Message = tuple[int, int, str, Any]  # from, to, what, content


class World:
    """Five ranks, the messages under way among them, and what an all-knowing observer has seen decided."""

    def __init__(self, seed: int, ranks: int = 5, disks_fail: bool = True) -> None:
        self.random = random.Random(seed)
        self.first = Record(0, tuple(range(ranks)))
        self.ranks = [Rank(number, Disk(Vote(self.first))) for number in range(ranks)]
        self.wire: list[Message] = []
        self.cut: set[frozenset[int]] = set()
        self.decided: dict[int, tuple[int, ...]] = {0: self.first.members}
        self.disks_fail, self.is_calm = disks_fail, False

    # What happens

    def run(self, steps: int) -> None:
        kinds = {self._deliver: 60, self._open: 8, self._die: 2, self._come_back: 4}
        kinds |= {self._cut: 2, self._heal: 2, self._wipe: int(self.disks_fail)}
        for _ in range(steps):
            self.random.choices(list(kinds), list(kinds.values()))[0]()
            self._look()

    def calm(self) -> None:
        """All that is cut is whole again, all ranks are there, and nothing is lost any more."""
        self.is_calm = True
        self.cut.clear()
        for rank in self.ranks:
            rank.runs = True
        for _ in range(20):
            self._open(self.ranks[0])
            while self.wire:
                self._hand_over(self.wire.pop(0))
                self._look()

    def _deliver(self) -> None:
        if not self.wire:
            return
        message = self.wire.pop(self.random.randrange(len(self.wire)))
        if self.random.random() < 0.1:  # doubled, and late
            self.wire.append(message)
        if self.random.random() > 0.1:
            self._hand_over(message)

    def _open(self, host: Rank | None = None) -> None:
        """A rank holds the store: everybody that it reaches hears its ballot."""
        host = host or self.random.choice(self.ranks)
        if not host.runs:
            return
        host.forget()
        known = max(rank.disk.vote.promised.number for rank in self.ranks)
        low = known + 1 if self.is_calm else max(known - 1, 1)
        host.ballot = Ballot(self.random.randint(low, known + 1), host.number)
        self._send(host, "ballot", host.ballot, [rank.number for rank in self.ranks])

    def _die(self) -> None:
        rank = self.random.choice(self.ranks)
        rank.runs = False
        rank.forget()

    def _come_back(self) -> None:
        self.random.choice(self.ranks).runs = True

    def _wipe(self) -> None:
        """It comes back with an empty disk."""
        rank = self.random.choice(self.ranks)
        rank.forget()
        rank.disk = Disk(Vote(self.first), may_vote=False)

    def _cut(self) -> None:
        numbers = [rank.number for rank in self.ranks]
        side = set(self.random.sample(numbers, self.random.randint(1, len(numbers) - 1)))
        self.cut = {frozenset(pair) for pair in combinations(numbers, 2) if len(set(pair) & side) == 1}

    def _heal(self) -> None:
        self.cut.clear()

    def _send(self, sender: Rank, what: str, content: Any, to: list[int]) -> None:
        self.wire += [(sender.number, number, what, content) for number in to]

    def _hand_over(self, message: Message) -> None:
        sender, number, what, content = message
        rank = self.ranks[number]
        if rank.runs and frozenset((sender, number)) not in self.cut:
            getattr(self, f"_on_{what}")(rank, sender, content)

    # What ranks do

    def _on_ballot(self, rank: Rank, host: int, ballot: Ballot) -> None:
        vote = rank.disk.vote.promise(ballot) if rank.disk.may_vote else None
        if rank.disk.may_vote and not vote:
            return
        rank.trains = None  # who promises has stopped training
        if vote:
            rank.disk.vote = vote
        self._send(rank, "promise", (ballot, vote), [host])

    def _on_promise(self, host: Rank, rank: int, content: tuple[Ballot, Vote | None]) -> None:
        ballot, vote = content
        if ballot != host.ballot or host.proposal:
            return
        host.present.add(rank)
        if vote:
            host.votes[rank] = vote
        if (not self.is_calm and self.random.random() < 0.4) or len(host.present) == len(self.ranks):
            self._propose(host)

    def _propose(self, host: Rank) -> None:
        assert host.ballot
        if not host.votes:
            return
        if proposal := next_proposal(host.ballot, host.votes, host.present):
            host.proposal, host.accepted = proposal, set()
            self._send(host, "proposal", proposal, sorted(host.present))

    def _on_proposal(self, rank: Rank, host: int, proposal: Proposal) -> None:
        vote = rank.disk.vote.accept(proposal) if rank.disk.may_vote else None
        if not vote:
            return
        rank.disk.vote, rank.trains = vote, None
        if self.is_calm or self.random.random() > 0.05:  # dies between disk and wire
            self._send(rank, "accepted", proposal, [host])

    def _on_accepted(self, host: Rank, rank: int, proposal: Proposal) -> None:
        if proposal != host.proposal:
            return
        host.accepted.add(rank)
        wanted = set(host.votes) if self.is_calm else host.accepted
        if not quorum.enough(host.accepted, proposal.base.members) or wanted - host.accepted:
            return
        self._note(proposal.record)
        voters = host.accepted & host.votes.keys()
        host.votes = {one: host.votes[one].learn(proposal.record) for one in voters}
        if set(proposal.members) == host.present:
            self._send(host, "committed", proposal.record, sorted(host.present))
            host.proposal = host.ballot = None
        else:
            self._propose(host)

    def _on_committed(self, rank: Rank, host: int, record: Record) -> None:
        disk = rank.disk
        if record.number < disk.vote.record.number or (disk.vote.promised.host != host and disk.may_vote):
            return
        disk.vote, disk.may_vote = disk.vote.learn(record), True
        rank.trains = record

    # What must never be

    def _note(self, record: Record) -> None:
        if self.decided.setdefault(record.number, record.members) != record.members:
            raise Violation(f"record {record.number} was decided twice")

    def _look(self) -> None:
        """At most one record has all of its members training: ranks step together or not at all."""
        training = {rank.trains for rank in self.ranks if rank.runs and rank.trains}
        whole = [
            record
            for record in training
            if all(self.ranks[one].runs and self.ranks[one].trains == record for one in record.members)
        ]
        if len(whole) > 1:
            raise Violation(f"two sides train: {whole}")


def goes_wrong(seed: int, steps: int = 400) -> bool:
    try:
        World(seed, ranks=random.Random(seed).choice([2, 3, 4, 5])).run(steps)
    except Violation:
        return True
    return False


@pytest.mark.parametrize(
    "seeds", [range(200), pytest.param(range(200, 20_200), marks=pytest.mark.more)], ids=["some", "many"]
)
def test_no_schedule_lets_two_sides_train_or_decides_twice(seeds: range) -> None:
    assert not any(map(goes_wrong, seeds))


def test_when_all_is_calm_again_all_ranks_train() -> None:
    trained = 0
    for seed in range(100):
        world = World(seed, disks_fail=False)
        world.run(300)
        world.calm()
        trained += all(rank.trains and len(rank.trains.members) == 5 for rank in world.ranks)
    assert trained == 100


def no_half_alone(some: Any, members: Any) -> bool:
    return 2 * len(set(some) & set(members)) >= len(members)


def whoever_is_there(some: Any, members: Any) -> bool:
    return bool(set(some) & set(members))


def promises_anything(self: Vote, ballot: Ballot) -> Vote:
    return replace(self, promised=ballot)


def accepts_anything(self: Vote, proposal: Proposal) -> Vote:
    return Vote(proposal.base, proposal.ballot, (proposal.ballot, proposal.members))


def forgets_what_it_accepted(self: Vote, proposal: Proposal) -> Vote | None:
    vote = original_accept(self, proposal)
    return vote and replace(vote, accepted=None)


original_accept = Vote.accept


def wipes_and_votes(self: World) -> None:
    """What it has promised is forgotten."""
    rank = self.random.choice(self.ranks)
    rank.forget()
    rank.disk = Disk(Vote(self.first))


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (quorum, "enough", no_half_alone),
        (quorum, "enough", whoever_is_there),
        (Vote, "promise", promises_anything),
        (Vote, "accept", accepts_anything),
        (Vote, "accept", forgets_what_it_accepted),
        (World, "_wipe", wipes_and_votes),
    ],
)
def test_a_wrong_rule_is_caught(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(where, name, wrong)
    assert any(map(goes_wrong, range(1700, 3000)))


def test_too_few_decide_nothing_and_are_told_who_is_lacking() -> None:
    votes = {one: Vote(Record(2, (0, 1, 2, 4))) for one in (2, 4)}
    assert next_proposal(Ballot(1, 2), votes, {2, 3, 4}) is None
    assert lacking(votes) == [0, 1]
    assert lacking({3: Vote(Record(2, (3, 4)))}) == [], "of two the lower one is enough"


def test_of_two_accepted_records_the_one_of_the_newer_ballot_is_proposed() -> None:
    said = {0: (Ballot(2, 0), (0, 1, 2)), 1: None, 3: (Ballot(1, 4), (0, 3, 4))}
    votes = {rank: Vote(EVERYONE, accepted=accepted) for rank, accepted in said.items()}
    ballot = Ballot(3, 1)
    assert next_proposal(ballot, votes, {0, 1, 3}) == Proposal(ballot, EVERYONE, (0, 1, 2))


def test_a_book_keeps_what_was_said(tmp_path: Path) -> None:
    path = tmp_path / "vote.json"
    path.write_text('{"launch": "a"}')
    book = QuorumState.open(path, "a", 3)
    assert (book.may_vote, book.vote) == (True, Vote(Record(0, (0, 1, 2))))
    vote = book.vote.promise(Ballot(2, 1))
    assert vote
    book.write(vote)
    book.left([2])
    again = QuorumState.open(path, "a", 3)
    assert (again.vote, again.gone) == (vote, {2})
    again.decided(Record(1, (0, 2)))
    last = QuorumState.open(path, "a", 3)
    assert (last.vote.record, last.gone) == (Record(1, (0, 2)), set())
    assert last.vote.promised == Ballot(2, 1)


def test_who_often_came_back_has_to_stay_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = QuorumState(tmp_path / "vote.json", "a", Vote(Record(1, (0, 1, 2))))
    for _ in range(2):
        assert book.patience(2) == quorum.STEADY
        book.stopped_for([2])
    book.taken_back([2])
    again = QuorumState.open(book.path, "a", 3)
    assert [(again.often(rank), again.patience(rank)) for rank in (1, 2)] == [(0, 5), (1, 30)]
    assert [again.is_steady_again(rank) for rank in (1, 2)] == [False, True]
    assert [again.was_taken_back_lately(rank) for rank in (1, 2)] == [False, True]
    later = time.time() + quorum.LATELY
    with monkeypatch.context() as patch:
        patch.setattr(quorum.time, "time", lambda: later)
        assert again.is_steady_again(2) and not again.was_taken_back_lately(2)
    for _ in range(9):
        again.stopped_for([2])
    assert again.patience(2) == quorum.LATELY
    assert not again.is_steady_again(2) and not again.was_taken_back_lately(2)
    monkeypatch.setattr(quorum.time, "time", lambda: 1e10)
    assert again.patience(2) == quorum.STEADY
    again.stopped_for([0, 0])
    again.decided(Record(2, (0, 1, 2)), {"stops": {"1": [1e10, 1e10]}, "back": {}}, host=0)
    assert [QuorumState.open(book.path, "a", 3).often(rank) for rank in (0, 1, 2)] == [1, 1, 0]
    again.decided(Record(3, (0, 1, 2)), {"stops": {"0": [2e10], "1": [1.0]}, "back": {}}, host=0)
    assert [QuorumState.open(book.path, "a", 3).often(rank) for rank in (0, 1, 2)] == [1, 1, 0], (
        "no older ones"
    )


@pytest.mark.parametrize(
    "content", ["", '{"launch": "b"}', '{"launch": "a", "record": 1}', '{"launch": "a", "stops": []}', "[]"]
)
def test_without_a_book_of_this_launch_a_rank_has_no_vote(tmp_path: Path, content: str) -> None:
    path = tmp_path / "vote.json"
    if content:
        path.write_text(content)
    book = QuorumState.open(path, "a", 3)
    assert not book.may_vote
    assert book.vote.promised == NOTHING
