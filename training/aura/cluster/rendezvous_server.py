"""The rank that holds the store: it waits for the others, has them decide who belongs, and commits the attempt.

docs/attempts.md has the protocol. Where the ranks know each other's addresses, a rank that does not come is left out
after a while, if those that are there may decide so (quorum.py); otherwise all of them are needed.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed import PrefixStore

from aura.backend import agreed_backend
from aura.cluster.alike import unlike
from aura.cluster.dist_env import DistEnv
from aura.cluster.heartbeats import SILENCE_HURT
from aura.cluster.peers import Peers
from aura.cluster.process_group import ProcessGroup
from aura.cluster.quorum import (
    Ballot,
    Proposal,
    QuorumState,
    Record,
    Vote,
    as_json,
    enough,
    lacking,
    newest,
    next_proposal,
    vote_of,
)
from aura.cluster.rendezvous_store import (
    PATIENCE,
    Member,
    Patient,
    ProcessGroupBroken,
    ProcessGroupRefused,
    connect,
    first_line,
    now,
    open_store,
    patiently,
    read,
    read_member,
    scoped,
)
from aura.errors import EXIT_USAGE, why_not_written
from aura.texts.console import text

Report = Callable[[str], None]
# Seconds in which a rank that has not come may still come and be told that nobody trains: the longest pause of
# start-rank, and a start.
LATECOMERS = 90.0
SAY_EVERY = 10.0  # seconds
GATHERS = "gathers"  # a key that whoever gathers counts up


@dataclass
class RendezvousState:
    """A rank on its way into an attempt."""

    me: Member
    dist_env: DistEnv
    run: str
    quorum_state: QuorumState | None  # where its vote is; None where all ranks are needed
    deadline: float
    report: Report
    # Rank: beats, and since when they are so many
    seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def is_under_way(self) -> bool:
        """Has this launch trained already, as far as this rank knows? One without its book may have forgotten it."""
        return self.quorum_state is not None and (
            self.quorum_state.vote.record.number > 0 or not self.quorum_state.may_vote
        )

    def promise(self, ballot: Ballot) -> str:
        """Its answer, which is on its disk."""
        quorum_state = self.quorum_state
        if quorum_state and quorum_state.may_vote and (vote := quorum_state.vote.promise(ballot)):
            self._write(vote)
        return json.dumps(vote_of(quorum_state))

    def accept(self, proposal: Proposal) -> str:
        """Its answer, which is on its disk."""
        if (
            self.quorum_state
            and self.quorum_state.may_vote
            and (vote := self.quorum_state.vote.accept(proposal))
        ):
            self._write(vote)
            return json.dumps(self.quorum_state.may_vote)
        return "false"

    def _write(self, vote: Vote) -> None:
        """Who cannot write it down does not say it, and takes part without a vote."""
        assert self.quorum_state
        try:
            self.quorum_state.write(vote)
        except OSError as error:
            self.quorum_state.may_vote = False
            self.report(text("vote_not_written", error=why_not_written(error)))

    def learn(self, record: Record, absences: Mapping[str, Any] | None = None, host: int = -1) -> None:
        """Where it cannot be written, this rank knows less after its next start."""
        if self.quorum_state:
            with suppress(OSError):
                self.quorum_state.decided(record, absences, host)
                self.quorum_state.may_vote = True

    def comes_and_goes(self, rank: int, peers: Peers) -> bool:
        """All would stop for it again and again: for the second time lately its PC was silent, or for the third time it
        has stopped all. It is left out, also where it is back, until it has stayed."""
        assert self.quorum_state
        often = self.quorum_state.often(rank)
        silent = often > 0 and peers.was_silent(self.dist_env.peers[rank])
        return silent or (often > 1 and not self.quorum_state.is_steady_again(rank))


def gather(
    state: RendezvousState, address: str, peers: Peers | None, elsewhere: Callable[[], bool]
) -> ProcessGroup | None:
    """Hold the store at `address` until the attempt is committed; None when `elsewhere` says that another store goes
    first. Raises GangBroken, GangRefused."""
    me, port = state.me, state.dist_env.master_port
    try:
        gathering = RendezvousServer(state, address, peers)
        if not gathering.wait(elsewhere):
            gathering.close()
            return None
        members = gathering.commit()
        state.report(text("committed", attempt=gathering.attempt, ranks=len(members)))
        watch = scoped(connect(address, port))
        return ProcessGroup(
            me, gathering.attempt, members, gathering.base, watch, me, state.dist_env, state.quorum_state
        )
    except RuntimeError as error:  # its own store is silent: this node has lost its address, say
        raise ProcessGroupBroken(text("store_ended", member=me, error=first_line(error))) from error


class RendezvousServer:
    def __init__(self, state: RendezvousState, address: str, peers: Peers | None) -> None:
        """Open the store and the attempt. Raises GangBroken, and RuntimeError where the store does not answer."""
        me, port = state.me, state.dist_env.master_port
        self.base = base = open_store(address, port, me.node, state.deadline, state.report)
        self.state, self.peers, self.me, self.ranks = state, peers, me, range(state.dist_env.world_size)
        self.attempt = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self.header = {
            "attempt": self.attempt,
            "run": state.run,
            "launch": state.dist_env.launch,
            "world_size": len(self.ranks),
            "is_committed": False,
        }
        self.store = PrefixStore(self.attempt, base)  # keys of this attempt
        self.keys = Patient(self.store)
        self.began = now()
        self.present: list[Member] = []
        self.refused: dict[str, int] = {}  # ranks that cannot take part, by their tokens
        Patient(base).set("attempt", json.dumps(self.header))
        self.keys.set(f"vote/{self.me.rank}", json.dumps(vote_of(state.quorum_state)))
        self.keys.set(f"join/{self.me.rank}", json.dumps(asdict(self.me)))
        others = len(self.ranks) - 1
        state.report(text("host_waits", attempt=self.attempt, rank=me.rank, others=others, port=port))

    def close(self) -> None:
        """The store ends now: open, and without this rank, it would be taken for an attempt by all, this rank too."""
        del self.base, self.store, self.keys

    # Who is there

    def wait(self, elsewhere: Callable[[], bool]) -> bool:
        """Until the attempt can be committed; False when another store goes first. Raises GangBroken, GangRefused, and
        RuntimeError where the store does not answer."""
        next_report = now() + SAY_EVERY
        while True:
            joined, self.present = patiently(self._who_is_there)
            under_way = self.state.is_under_way or patiently(lambda: self._trained_before(joined))  # noqa: B023
            for member in joined:
                if member.refusal and member.token not in self.refused:
                    self._refuse(member, member.refusal, under_way)
            self.present = [one for one in self.present if one.token not in self.refused]
            if under_way:
                self.present = patiently(self._steady)
            missing = sorted(set(self.ranks) - {member.rank for member in self.present})
            # A launch begins with all of its ranks.
            waited_for = [rank for rank in missing if not under_way or not self._is_left_out(rank)]
            short = patiently(self._lacking) if (missing or under_way) and not waited_for else []
            if not waited_for and not short:
                if not (odd := patiently(self._odd) if under_way else []):
                    self._note_who_comes_and_goes(missing)
                    return True
                for member, reason in odd:
                    self._refuse(member, reason, under_way)
                continue
            if elsewhere():
                return False
            if now() > self.state.deadline:
                raise ProcessGroupBroken(
                    text("did_not_come", attempt=self.attempt, ranks=ranks_in_words(missing))
                )
            if now() > next_report:
                self.state.report(self._why_waiting(waited_for, short))
                next_report = now() + SAY_EVERY
            time.sleep(0.2)

    def _who_is_there(self) -> tuple[list[Member], list[Member]]:
        """Who has joined, and who of them beats and can take part."""
        self.store.add(GATHERS, 1)
        others = (rank for rank in self.ranks if rank != self.me.rank)
        joined = [self.me, *(member for rank in others if (member := self._joined(rank)))]
        there = [one for one in joined if one is self.me or self._is_alive(one)]
        able = [one for one in there if not one.refusal]
        return joined, sorted(able, key=lambda member: member.rank)

    def _joined(self, rank: int) -> Member | None:
        key = f"join/{rank}"
        return read_member(self.store, key) if self.store.check([key]) else None

    def _is_alive(self, member: Member) -> bool:
        """Has it beaten during the last seconds?"""
        beats, time_now, seen = self.store.add(f"beat/{member.token}", 0), now(), self.state.seen
        count, since = seen.get(member.token, (0, time_now))
        if beats != count:
            seen[member.token] = (beats, time_now)
            return True
        return count > 0 and time_now - since < SILENCE_HURT

    def _is_left_out(self, rank: int) -> bool:
        """Is it waited for no longer?"""
        assert self.state.quorum_state and self.peers
        if rank in self.state.quorum_state.gone | set(self.refused.values()):
            return True
        if self.state.comes_and_goes(rank, self.peers):
            return True
        return now() - self.began > self.peers.grace(self.state.dist_env.peers[rank])

    def _steady(self) -> list[Member]:
        """Who is there, without those that come and go where the others may decide without them."""
        assert self.state.quorum_state and self.peers
        steady = [
            one
            for one in self.present
            if one is self.me or not self.state.comes_and_goes(one.rank, self.peers)
        ]
        votes = self._votes()
        voters = [one.rank for one in steady if one.rank in votes]
        return steady if votes and enough(voters, newest(votes).members) else self.present

    def _note_who_comes_and_goes(self, missing: list[int]) -> None:
        quorum_state, peers = self.state.quorum_state, self.peers
        for rank in missing:
            if not quorum_state or not peers or rank in quorum_state.gone | set(self.refused.values()):
                continue
            if quorum_state.was_taken_back_lately(rank):  # all have stopped for that, and it is gone
                quorum_state.stopped_for([rank])
            if self.state.comes_and_goes(rank, peers):
                times, seconds = quorum_state.often(rank) + 1, quorum_state.patience(rank)
                self.state.report(text("comes_and_goes", rank=rank, times=times, seconds=seconds))

    def _trained_before(self, joined: list[Member]) -> bool:
        """By what they know, also those that cannot take part."""
        return any(vote.record.number for vote in self._votes(joined).values())

    def _votes(self, members: list[Member] | None = None) -> dict[int, Vote]:
        """What those that are there know, as they came."""
        of = self.present if members is None else members
        return {one.rank: vote for one in of if (vote := self._said(f"vote/{one.rank}"))}

    def _said(self, key: str) -> Vote | None:
        values = read(self.store, key) if self.store.check([key]) else None
        return _vote(values) if values else None

    def _lacking(self) -> list[int]:
        votes = self._votes()
        return lacking(votes) if votes else list(self.ranks)

    def _why_waiting(self, waited_for: list[int], short: list[int]) -> str:
        if short and {member.rank for member in self.present}.issuperset(short):
            return text("no_votes", attempt=self.attempt, ranks=ranks_in_words(short))
        if short:
            return text("too_few", attempt=self.attempt, ranks=ranks_in_words(short))
        return text("still_waiting", attempt=self.attempt, ranks=ranks_in_words(waited_for))

    # Who cannot take part

    def _odd(self) -> list[tuple[Member, str]]:
        """Who means something else than those that trained last, or would compute it otherwise, and why; where the
        others may go on without it."""
        before = newest(self._votes()).members
        usual = [one for one in self.present if one.rank in before]
        wishes, nodes = zip(*((one.backend, one.node) for one in self.present), strict=True)
        with_nccl = agreed_backend(wishes, nodes) == "nccl"
        odd = [(one, why) for one in self.present if (why := unlike(one, usual, with_nccl))]
        alike = {one.rank for one in self.present} - {one.rank for one, _ in odd}
        return odd if enough(alike, before) else []

    def _refuse(self, member: Member, reason: str, under_way: bool) -> None:
        """In a run under way the others go on without it; at its beginning nobody trains. Raises GangRefused."""
        sentence = text("cannot_take_part", member=member, reason=reason)
        self.state.report(sentence)
        code = member.exit_code or EXIT_USAGE
        refused = json.dumps({"sentence": sentence, "exit_code": code})
        if under_way and member is not self.me:
            self.refused[member.token] = member.rank
            self.keys.set(f"excused/{member.token}", refused)
            return
        if not under_way:
            self.keys.set("refused", refused)
            self._tell_all()
        raise ProcessGroupRefused(sentence, code)

    def _tell_all(self) -> None:
        """The store stays up until every rank knows that nobody trains, or none comes any more. Whoever is not told
        waits, starts again, and waits again."""
        next_report, deadline = now() + SAY_EVERY, min(self.state.deadline, now() + LATECOMERS)
        while untold := patiently(self._untold):
            if now() > deadline:
                self.state.report(text("never_told", ranks=ranks_in_words(untold)))
                break
            if now() > next_report:
                self.state.report(text("still_to_be_told", ranks=ranks_in_words(untold)))
                next_report = now() + SAY_EVERY
            time.sleep(0.2)

    def _untold(self) -> list[int]:
        return [r for r in self.ranks if r != self.me.rank and not self.store.check([f"told/{r}"])]

    # Who belongs

    def commit(self) -> list[Member]:
        """The members, in the order of their ranks. Raises GangBroken, RuntimeError."""
        record = self._decide() if self.state.quorum_state else None
        members = [one for one in self.present if not record or one.rank in record.members]
        committed = {"host": self.me.rank, "members": [asdict(one) for one in members], "record": record}
        if record and self.state.quorum_state:
            # Who was there, and did not answer in time.
            self._note_who_comes_and_goes([one.rank for one in self.present if one not in members])
            committed["absences"] = self.state.quorum_state.absences
            self.state.learn(record)
        self.keys.set("committed", json.dumps(committed))
        Patient(self.base).set("attempt", json.dumps(self.header | {"is_committed": True}))
        return members

    def _decide(self) -> Record:
        """Of whom is there, and has given its word. Raises GangBroken, RuntimeError."""
        there = [member.rank for member in self.present]
        known = [vote.promised.number for vote in patiently(self._votes).values()]
        ballot = Ballot(1 + max(known, default=0), self.me.rank)
        self.keys.set("ballot", json.dumps(ballot))
        said = self._answers("promise", there, self.state.promise(ballot))
        votes = {rank: _vote(values) for rank, values in said.items() if values}
        votes = {rank: vote for rank, vote in votes.items() if vote.promised == ballot}
        for number in range(len(self.ranks) + 2):
            proposal = next_proposal(ballot, votes, said) if votes else None
            if not proposal:
                break
            self.keys.set(f"proposal/{number}", as_json(proposal))
            own = self.state.accept(proposal)
            accepted = self._answers(f"accept/{number}", sorted(said), own)
            votes = {rank: votes[rank].learn(proposal.record) for rank in votes if accepted.get(rank)}
            if not enough(votes, proposal.base.members):
                break
            if proposal.members == tuple(sorted(said)):
                return proposal.record
        without = [rank for rank in there if rank not in votes] or there
        raise ProcessGroupBroken(text("not_decided", attempt=self.attempt, ranks=ranks_in_words(without)))

    def _answers(self, what: str, ranks: Iterable[int], own: str) -> dict[int, Any]:
        """By rank, of those that answer in time."""
        answers: dict[int, Any] = {self.me.rank: json.loads(own)}
        wanted, deadline = set(ranks) - {self.me.rank}, now() + PATIENCE
        while wanted and now() < deadline:
            self.keys.count(GATHERS)
            for rank in sorted(wanted):
                key = f"{what}/{rank}"
                if self.keys.check(key):
                    answers[rank] = self.keys.read(key)
            wanted -= set(answers)
            time.sleep(0.05)
        return answers


def ranks_in_words(ranks: list[int]) -> str:
    return text("one_rank" if len(ranks) == 1 else "several_ranks", ranks=", ".join(map(str, ranks)))


def _vote(values: Any) -> Vote:
    """Raises GangBroken."""
    try:
        return Vote.from_json(values)
    except (ValueError, TypeError, KeyError):
        raise ProcessGroupBroken(text("foreign_key", key="vote", data=repr(values)[:60])) from None
