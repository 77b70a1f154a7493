"""The watch over one attempt: how its ranks notice that one is missing, hangs, or has ended for a reason of its own.

The protocol is described in docs/attempts.md. `join` (rendezvous_handler.py) makes the process group,
`ProcessGroup.watch` starts the heartbeat, `ProcessGroup.end` turns a failed collective into a sentence that names the
node at fault, `ProcessGroup.give_up` tells all why this rank ends, `ProcessGroup.leave` ends in good order.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import NoReturn

from torch.distributed import PrefixStore, Store

from aura.backend import agreed_backend
from aura.cluster.activity import Activity, Report, stalled
from aura.cluster.alike import check_versions
from aura.cluster.dist_env import DistEnv
from aura.cluster.failure_report import FailureReport
from aura.cluster.heartbeats import SILENCE, SILENCE_HURT, SILENCE_LONGEST, STALL, Heartbeats
from aura.cluster.peers import knock_at
from aura.cluster.quorum import QuorumState, enough
from aura.cluster.rendezvous_store import (
    PATIENCE,
    Member,
    Patient,
    ProcessGroupBroken,
    first_line,
    now,
    patiently,
    read,
    read_header,
)
from aura.errors import EXIT_TEMPORARY
from aura.texts.console import text

BEAT = 1.0  # seconds between two heartbeats of a member
# Most seconds until a failure report comes after a failed collective, or until all have left in good order
PARTING = 15.0
LINGER = 5.0  # most seconds that the host keeps the store up after a failure report, so that all can read it
# Seconds in which a rank may find out by itself what another one has met: it has better words then.
OWN_WORDS = 2.0
ASKED = 3  # PCs at most, one after the other


class ProcessGroup:
    """The members of one committed attempt. `store` holds keys of this attempt only."""

    def __init__(
        self,
        me: Member,
        attempt: str,
        members: list[Member],
        base: Store,
        watch: Store,
        host: Member,
        dist_env: DistEnv,
        quorum_state: QuorumState | None,
    ) -> None:
        """`host`: the member that holds the store. `book`: where ranks may be left out."""
        self.attempt = attempt
        self.rank = members.index(me)  # among the members
        self.world_size = len(members)
        self.members = members
        self.absent = sorted(set(range(dist_env.world_size)) - {member.rank for member in members})
        self._host, self._hosts, self._quorum_state, self._port = (
            host,
            host == me,
            quorum_state,
            dist_env.master_port,
        )
        self._on_back: Callable[[int], None] = lambda rank: None
        self.store = PrefixStore(f"{attempt}/group", base)
        self._me = me
        self._base = base  # keeps the host's server alive
        self._watch_store = watch
        self._activity = Activity()
        self._failure_report: FailureReport | None = None
        self._failure_known = threading.Event()
        self._leaving = threading.Event()
        self._store_answered = now()
        self._heartbeats = Heartbeats(dist_env.master_port)
        # By rank that is back: its calls, when the last one was seen, and since when it has been calling
        self._calls: dict[int, tuple[int, float, float]] = {}
        self._on_broken: Callable[[str, int], NoReturn] | None = None
        self._lock = threading.Lock()

    def without_nccl(self) -> list[Member]:
        return [member for member in self.members if member.backend == "gloo"]

    def agreed_backend(self) -> str:
        """Raises ConfigError, alike on all of them, where their versions would not work together."""
        agreed = agreed_backend([one.backend for one in self.members], [one.node for one in self.members])
        check_versions(self.members, with_nccl=agreed == "nccl")
        return agreed

    def watch(
        self,
        on_broken: Callable[[str, int], NoReturn],
        activity: Activity | None = None,
        on_back: Callable[[int], None] | None = None,
    ) -> None:
        """Start the heartbeat; `activity` is what it says of the main thread.

        `on_broken` gets the failure report and the exit code, once, from whichever thread; it must end the process.
        `on_back` gets the rank that has come back and wants to take part again, on the host.
        """
        self._on_broken = on_broken
        if on_back:
            self._on_back = on_back
        if activity:
            self._activity = activity
            activity.alone = self.world_size == 1
        # A host may stall in the midst of an answer.
        self._watch_store.set_timeout(timedelta(seconds=SILENCE_LONGEST))
        self._store_answered = now()
        threading.Thread(target=self._beat_loop, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._guard_loop, name="store-guard", daemon=True).start()

    def end(self, error: BaseException) -> NoReturn:
        """After a failed collective: end the process with the failure report that comes within PARTING seconds, or
        with the `error`. The watching thread does it: two that ended the process would both say why."""
        store = PrefixStore(self.attempt, self._base)
        with suppress(RuntimeError):  # the store is gone: the watching threads say so
            patiently(lambda: store.set("hurt", str(self.rank)))
        if not self._failure_known.wait(PARTING):
            failure_report = FailureReport(text("collective_failed", error=error))
            with suppress(RuntimeError):
                patiently(lambda: failure_report.publish(store))
            if not self._failure_known.wait(LINGER + SILENCE):
                self._broken(failure_report)
        while True:
            time.sleep(1)  # the other thread still saves what is on its way to the disk

    def ends_itself(self) -> None:
        """This rank is about to end for a reason that it knows: what others say of it does not count any more."""
        self._leaving.set()

    def give_up(self, sentence: str, exit_code: int, alike: bool = False) -> None:
        """Tell all that this rank ends, and why, before it leaves. With 64, 65 or 69 they go on without it where they
        may, and end with the same code where not, or where all meet the same (`alike`): starting again would not help
        them either. With any other they are started again."""
        self._leaving.set()
        final = FailureReport(sentence, exit_code).is_final
        failure_report = FailureReport(f"{self._me}: {sentence}", exit_code)
        if not final:
            # Who asks by itself to be started again waits for others.
            causes = self._to_blame([] if exit_code == EXIT_TEMPORARY else [self._me])
            failure_report = FailureReport(failure_report.sentence, EXIT_TEMPORARY, causes=causes)
        if final and not alike and self.can_go_on_without(self._me.rank):
            failure_report = FailureReport(failure_report.sentence, EXIT_TEMPORARY, gone=self._me.rank)
        with suppress(RuntimeError):  # the host has ended before us
            patiently(lambda: failure_report.publish(PrefixStore(self.attempt, self._base)))

    def can_go_on_without(self, *gone: int) -> bool:
        """May the other members train when these have left?"""
        if self._quorum_state is None:
            return False
        ranks = {member.rank for member in self.members}
        return enough(ranks.difference(gone), ranks)

    def can_go_on_without_who_is_full(self) -> bool:
        """This rank has run out of memory. May those train that have not, as far as is known soon?"""
        self.ends_itself()
        keys = Patient(PrefixStore(self.attempt, self._base))
        with suppress(RuntimeError):
            keys.set(f"full/{self._me.rank}", "yes")
            time.sleep(OWN_WORDS)
            return self.can_go_on_without(*(m.rank for m in self.members if keys.check(f"full/{m.rank}")))
        return False

    def say_that_it_leaves(self) -> None:
        """This rank was asked to stop, and the others need not wait for it."""
        with suppress(RuntimeError):
            Patient(PrefixStore(self.attempt, self._base)).set(f"away/{self._me.rank}", self._me.token)

    def why_all_stop(self) -> tuple[list[Member], list[int]]:
        """The members that were asked to, and the ranks that want to take part again, as soon as one has said so."""
        keys, deadline = Patient(PrefixStore(self.attempt, self._base)), now() + OWN_WORDS
        leaving: list[Member] = []
        back: list[int] = []
        with suppress(RuntimeError):
            while not leaving and not back and now() < deadline:
                leaving = [one for one in self.members if keys.check(f"away/{one.rank}")]
                back = [rank for rank in self.absent if keys.check(f"taken-back/{rank}")]
                time.sleep(0.05)
        if self._quorum_state and leaving:
            self._quorum_state.left([member.rank for member in leaving])
        if self._quorum_state and back:
            self._quorum_state.taken_back(back)
        return leaving, back

    def leave(self) -> None:
        """End in good order: nobody is blamed any more, and the host keeps the store up until all have left."""
        self._leaving.set()
        with suppress(RuntimeError):  # the store does not answer: nobody can be told
            store = PrefixStore(self.attempt, self._base)
            patiently(lambda: self._linger(store, PARTING), PARTING + PATIENCE)

    def _beat_loop(self) -> None:
        """Watch until the attempt is over. A watch that ended silently would look like one that sees nothing."""
        store = PrefixStore(self.attempt, self._watch_store)
        try:
            failure_report = self._watch_until_over(store)
        except RuntimeError as error:
            sentence = text("store_ended", member=self._host, error=first_line(error))
            failure_report = FailureReport(sentence, causes=self._to_blame([self._host]))
        except ProcessGroupBroken as error:
            failure_report = self._proclaim(store, FailureReport(str(error)))
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            failure_report = self._proclaim(
                store, FailureReport(text("watch_failed", member=self._me, error=what))
            )
        if failure_report and not self._leaving.is_set():
            self._broken(failure_report)

    def _watch_until_over(self, store: Store) -> FailureReport | None:
        """Beat, read the failure report, watch the others' beats: the host those of all, the others the host's.

        The failure report, or None when this rank leaves. Raises RuntimeError when the store is gone, GangBroken."""
        watched = [one for one in self.members if one != self._me] if self._hosts else [self._host]
        slept = now()
        while not self._leaving.wait(BEAT):
            if frozen := self._was_frozen(slept):
                return frozen
            store.add(f"beat/{self._me.token}", 1)
            store.set(f"activity/{self._me.token}", json.dumps(asdict(self._activity.report())))
            current = read_header(self._watch_store)["attempt"]
            if current != self.attempt:
                return FailureReport(
                    text("another_attempt", current=current, member=self._me, attempt=self.attempt)
                )
            if store.check(["broken"]):
                return self._heed(store)
            failure_report = self._find_silent(store, watched)
            if self._hosts and not failure_report:
                failure_report = self._find_stalled(store)
            if failure_report:
                return self._proclaim(store, failure_report)
            if self._hosts:
                self._find_who_is_back(store)
            slept = now()
            self._heartbeats.note_stall(self._host, slept - self._store_answered)
            self._store_answered = slept
        return None

    def _was_frozen(self, slept: float) -> FailureReport | None:
        """A rank that was stopped or has slept sees all others silent; it is the one that was missing."""
        seconds = now() - slept
        if seconds > self._heartbeats.timeout(self._me):
            return FailureReport(text("was_frozen", member=self._me, seconds=seconds))
        if seconds > STALL:
            self._heartbeats.note_stall(self._me, seconds)
            self._heartbeats.forgive_own_stall()
            self._store_answered = now()
        return None

    def _heed(self, store: Store) -> FailureReport | None:
        """The failure report that stands; None when this rank has come to its own end meanwhile."""
        failure_report = FailureReport.said(read(store, "broken"))
        # Ranks that find the same fault in the same step say it in their own words; who gives up has left already.
        if (failure_report.is_final or failure_report.gone is not None) and self._leaving.wait(OWN_WORDS):
            return None
        self._linger(store)
        return failure_report

    def _proclaim(self, store: Store, failure_report: FailureReport) -> FailureReport:
        """Make it the failure report of all, unless another one stands; that one."""
        # A store that cannot keep it: this rank at least ends with it.
        with suppress(RuntimeError, ValueError, LookupError, TypeError):
            failure_report = FailureReport.said(json.loads(failure_report.publish(store)))
        self._linger(store)
        return failure_report

    def _linger(self, store: Store, seconds: float | None = None) -> None:
        """This rank knows all that it has to; the host keeps the store up until the others that live do."""
        try:
            store.set(f"left/{self._me.token}", "yes")
            deadline = now() + (LINGER if seconds is None else seconds)
            while self._hosts and now() < deadline and self._somebody_reads(store):
                self._store_answered = now()
                time.sleep(0.05)
        except RuntimeError:
            pass  # the host has ended before us

    def _somebody_reads(self, store: Store) -> bool:
        return any(
            not store.check([f"left/{member.token}"])
            and self._heartbeats.silence(member, store)
            <= min(SILENCE_HURT, self._heartbeats.timeout_now(member, store))
            for member in self.members
            if member != self._me
        )

    def _find_silent(self, store: Store, watched: list[Member]) -> FailureReport | None:
        """The first of them whose heartbeat has stopped."""
        for member in watched:
            silence = self._heartbeats.silence(member, store)
            if silence > self._heartbeats.timeout_now(member, store) or self._heartbeats.is_off(
                member, silence
            ):
                claimed = store.check([f"claim/{member.rank}"])
                key = "silent_and_started_again" if claimed else "silent"
                silent = [
                    one
                    for one in watched
                    if one == member or self._heartbeats.silence(one, store) > SILENCE_HURT
                ]
                sentence = text(key, member=member, seconds=silence)
                return FailureReport(sentence, causes=self._to_blame(silent))
        return None

    def _find_who_is_back(self, store: Store) -> None:
        """Of a PC that comes and goes, all would start again each time: it has to stay for a while."""
        assert self._quorum_state or not self.absent
        for rank in self.absent:
            if not store.check([f"back/{rank}"]):
                continue
            calls, time_now = store.add(f"back/{rank}", 0), now()
            before, last, since = self._calls.get(rank, (0, time_now, time_now))
            if time_now - last > SILENCE_HURT:  # it was gone, or is
                since = time_now
            self._calls[rank] = (calls, last if calls == before else time_now, since)
            if not self._quorum_state:
                continue
            store.set(f"patience/{rank}", json.dumps(self._quorum_state.patience(rank)))
            if calls != before and time_now - since >= self._quorum_state.patience(rank):
                store.set(f"taken-back/{rank}", "yes")
                self._on_back(rank)

    def _find_stalled(self, store: Store) -> FailureReport | None:
        """The host: whose main thread hangs although its heartbeat goes on, its own included."""
        reports = [self._report_of(store, member) for member in self.members]
        guilty = stalled(reports, hurt=store.check(["hurt"]))
        if not guilty:
            return None
        report = reports[guilty[0]]
        if len(guilty) == self.world_size > 1:
            return FailureReport(text("nobody_gets_on", report=report))
        names = ", ".join(str(self.members[dist_env]) for dist_env in guilty)
        to_blame = self._to_blame([self.members[dist_env] for dist_env in guilty])
        return FailureReport(text("hangs", members=names, report=report), causes=to_blame)

    def _report_of(self, store: Store, member: Member) -> Report | None:
        key = f"activity/{member.token}"
        return Report(**read(store, key)) if store.check([key]) else None

    def _to_blame(self, members: list[Member]) -> list[int]:
        """Their ranks; none where the others cannot do without them: it may be the switch, or this PC."""
        ranks = [member.rank for member in members]
        return ranks if self.can_go_on_without(*ranks) else []

    def _hears_another(self) -> bool:
        """Where no other PC answers either, it is this one's cable, or the switch."""
        others = {one.address for one in self.members} - {self._me.address, self._host.address}
        return any(knock_at(address, self._port)[1] for address in sorted(others)[:ASKED])

    def _guard_loop(self) -> None:
        """A store operation can hang: the host's node has lost power, or its address, and then it hangs there too.
        This thread never touches the store."""
        slept = now()
        while not self._leaving.wait(BEAT):
            if frozen := self._was_frozen(slept):
                self._broken(frozen)
                return
            silent = now() - self._store_answered
            if silent > self._heartbeats.timeout(self._host) or self._heartbeats.is_off(self._host, silent):
                sentence = text("silent", member=self._host, seconds=silent)
                there = [one for one in self.members if one.address == self._host.address]
                causes = self._to_blame(there)
                if causes and not self._hosts and not self._hears_another():
                    causes = []
                self._broken(FailureReport(sentence, causes=causes))
                return
            slept = now()

    def _broken(self, failure_report: FailureReport) -> None:
        with self._lock:
            if self._failure_report is not None or self._leaving.is_set():
                return
            self._failure_report = failure_report
        if self._quorum_state:
            # A disk that hangs does not keep this rank from its end.
            note = threading.Thread(target=failure_report.note, args=(self._quorum_state,), daemon=True)
            note.start()
            note.join(LINGER)
        self._failure_known.set()
        if self._on_broken is not None:
            self._on_broken(failure_report.sentence, failure_report.exit_code)
