"""Who belongs to a run: the ranks' own register, so that of a cluster cut in two at most one side trains.

Records are numbered. Number 0 names all ranks of a launch; the next one is decided by those that the one before names,
by single-decree Paxos (Lamport, "Paxos Made Simple", 2001): a rank promises to listen to no older ballot, then accepts
what the ballot proposes. It does both only while it does not train, and has it on its disk before it says so. What is
decided may name other ranks than decided it: who is gone is left out, who is back is named again.

Here is the rule, without a socket or torch; and the book that a rank keeps on its disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from aura.durable import write_atomically

FILE = "vote.json"  # in the directory of a rank
STEADY, LATELY = 5.0, 600.0  # seconds
MORE = 6  # times as long after each time


class Ballot(NamedTuple):
    """The higher one is heard. Two hosts never have the same."""

    number: int
    host: int  # its rank


NOTHING = Ballot(0, -1)


class Record(NamedTuple):
    number: int
    members: tuple[int, ...]  # the ranks that may train


class Proposal(NamedTuple):
    """That `members` are those of the record after `base`."""

    ballot: Ballot
    base: Record
    members: tuple[int, ...]

    @property
    def record(self) -> Record:
        return Record(self.base.number + 1, self.members)


@dataclass(frozen=True)
class Vote:
    """What one rank knows, and what it has given its word on."""

    record: Record  # the last one of which it knows that it was decided
    promised: Ballot = NOTHING
    accepted: tuple[Ballot, tuple[int, ...]] | None = None  # for the record after that

    def promise(self, ballot: Ballot) -> Vote | None:
        """To accept nothing of an older ballot any more; None where a newer one has this promise already."""
        return replace(self, promised=ballot) if ballot > self.promised else None

    def accept(self, proposal: Proposal) -> Vote | None:
        """None where a newer ballot has its promise, or more has been decided than the proposal knows of."""
        if proposal.ballot < self.promised or proposal.base.number < self.record.number:
            return None
        return Vote(proposal.base, proposal.ballot, (proposal.ballot, proposal.members))

    def learn(self, record: Record) -> Vote:
        """That it was decided."""
        return self if record.number <= self.record.number else Vote(record, self.promised)

    def as_json(self) -> dict[str, Any]:
        return {"record": self.record, "promised": self.promised, "accepted": self.accepted}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Vote:
        """Raises ValueError, TypeError, KeyError."""
        (number, members), accepted = values["record"], values["accepted"]
        return cls(
            Record(number, tuple(members)),
            Ballot(*values["promised"]),
            (Ballot(*accepted[0]), tuple(accepted[1])) if accepted else None,
        )


def enough(some: Collection[int], members: Collection[int]) -> bool:
    """More than half of the members, or half with the lowest of them: any two such groups have one in common."""
    count = len(set(some) & set(members))
    return 2 * count > len(members) or (2 * count == len(members) and min(members) in some)


def newest(votes: Mapping[int, Vote]) -> Record:
    """Of what they know."""
    return max((vote.record for vote in votes.values()), key=lambda record: record.number)


def lacking(votes: Mapping[int, Vote]) -> list[int]:
    """Members of the newest record without whose vote nothing can be decided; [] where these votes suffice."""
    members = newest(votes).members
    return [] if enough(votes, members) else sorted(set(members) - set(votes))


def next_proposal(ballot: Ballot, votes: Mapping[int, Vote], present: Collection[int]) -> Proposal | None:
    """What the ballot that all these ranks have promised to hear may propose; None where they are too few.

    It wants the `present` ones; but what may have been decided already, and nobody has heard of, is decided first.
    """
    base = newest(votes)
    if not enough(votes, base.members):
        return None
    said = [vote.accepted for vote in votes.values() if vote.record == base and vote.accepted]
    return Proposal(ballot, base, max(said)[1] if said else tuple(sorted(present)))


@dataclass
class QuorumState:
    """One rank's vote on its disk, and who has said that it leaves. `launch`: of which launch; what one of an earlier
    launch has voted does not count in this one."""

    path: Path
    launch: str
    vote: Vote
    may_vote: bool = True
    gone: set[int] = field(default_factory=set)  # nobody waits for these ranks
    # When all were started again because of a rank, lately, and when it was last taken back: seconds since 1970.
    # Members take over from the host of their attempt what is newer.
    stops: dict[int, list[float]] = field(default_factory=dict)
    back: dict[int, float] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, launch: str, ranks: int) -> QuorumState:
        """Who launches has put one there. Without it, or with a broken one, a rank cannot know what it has promised on
        the disk that it had: it votes again once the others have named it."""
        everyone = Record(0, tuple(range(ranks)))
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["launch"] == launch:
                vote = Vote.from_json(values) if "record" in values else Vote(everyone)
                quorum_state = cls(path, launch, vote, True, set(values.get("gone", ())))
                quorum_state.take_over(values)
                return quorum_state
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            pass
        return cls(path, launch, Vote(everyone), may_vote=False)

    def write(self, vote: Vote) -> None:
        """Raises OSError: who cannot write it down does not say it."""
        content = {"launch": self.launch, **vote.as_json(), "gone": sorted(self.gone), **self.absences}
        write_atomically(self.path, content, flushed=True)
        self.vote = vote

    def left(self, ranks: Collection[int]) -> None:
        """These have said that they leave. Where that cannot be written, they are waited for."""
        self.gone |= set(ranks)
        self._keep()

    def decided(self, record: Record, absences: Mapping[str, Any] | None = None, host: int = -1) -> None:
        """absences: as the host knows them, which does not know of its own. Raises OSError."""
        self.gone -= set(record.members)
        self.take_over(absences or {}, host)
        self.write(self.vote.learn(record))

    def stopped_for(self, ranks: Collection[int]) -> None:
        """All start again because of these."""
        for rank in ranks:
            self.stops[rank] = [*self._lately(rank), time.time()]
        self._keep()

    def taken_back(self, ranks: Collection[int]) -> None:
        self.back |= dict.fromkeys(ranks, time.time())
        self._keep()

    def _keep(self) -> None:
        """Where that cannot be written, it is forgotten; who does not know what it has promised writes no vote."""
        if self.may_vote:
            with suppress(OSError):
                self.write(self.vote)

    @property
    def absences(self) -> dict[str, dict[int, Any]]:
        return {"stops": self.stops, "back": self.back}

    def take_over(self, absences: Mapping[str, Any], host: int = -1) -> None:
        """What is newer, but of `host`. From JSON. Raises ValueError, TypeError, AttributeError."""
        last: dict[str, Callable[[Any], float]] = {"stops": max, "back": float}
        for name, own in self.absences.items():
            for rank, theirs in absences.get(name, {}).items():
                if int(rank) != host:
                    own[int(rank)] = max(theirs, own.get(int(rank), theirs), key=last[name])

    def often(self, rank: int) -> int:
        """How often it has stopped all lately, before the last time."""
        return max(len(self._lately(rank)) - 1, 0)

    def is_steady_again(self, rank: int) -> bool:
        """It was taken back, and has stopped nobody since."""
        return self.back.get(rank, 0.0) > max(self.stops.get(rank, []), default=0.0)

    def was_taken_back_lately(self, rank: int) -> bool:
        """And has stopped nobody since."""
        return self.is_steady_again(rank) and abs(time.time() - self.back[rank]) < LATELY

    def patience(self, rank: int) -> float:
        """Seconds for which a rank that is back has to stay before it is taken back."""
        return min(STEADY * MORE ** self.often(rank), LATELY)

    def _lately(self, rank: int) -> list[float]:
        return [when for when in self.stops.get(rank, []) if abs(time.time() - when) < LATELY]


def vote_of(quorum_state: QuorumState | None) -> dict[str, Any] | None:
    """As it is said in the store: None from a rank that has no vote."""
    return quorum_state.vote.as_json() if quorum_state and quorum_state.may_vote else None


def as_json(proposal: Proposal) -> str:
    return json.dumps([proposal.ballot, proposal.base, proposal.members])


def proposal_of(values: list[Any]) -> Proposal:
    ballot, (number, before), members = values
    return Proposal(Ballot(*ballot), Record(number, tuple(before)), tuple(members))
