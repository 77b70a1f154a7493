"""The watch over one attempt: how its ranks notice that one is missing, hangs, or has ended for a reason of its own.

The protocol is described in docs/attempts.md. `join` (join.py) makes the gang, `Gang.watch` starts the heartbeat,
`Gang.end` turns a failed collective into a sentence that names the node at fault, `Gang.give_up` tells all why this
rank ends, `Gang.leave` ends in good order.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple, NoReturn

from torch.distributed import PrefixStore, Store

from aura.cluster.activity import Activity, Report, stalled
from aura.cluster.rendezvous import (
    PATIENCE,
    GangBroken,
    Member,
    first_line,
    now,
    patiently,
    read,
    read_header,
)
from aura.config import agreed_backend
from aura.errors import EXIT_TEMPORARY, FOR_GOOD, ConfigError
from aura.texts.console import text

BEAT = 1.0  # seconds between two heartbeats of a member
SILENCE = 8.0  # seconds without a heartbeat after which a member counts as gone
SILENCE_HURT = 4.0  # the same, once a collective has failed or the rank has been started again
LINGER = 5.0  # most seconds that rank 0 keeps the store up after a verdict, so that all can read it
# Seconds in which a rank may find out by itself what another one has met: it has better words then.
OWN_WORDS = 2.0


class Verdict(NamedTuple):
    """Why the attempt is over, for a person, and what every rank ends with."""

    sentence: str
    exit_code: int = EXIT_TEMPORARY

    @property
    def is_final(self) -> bool:
        return self.exit_code in FOR_GOOD


def check_versions(members: list[Member], with_nccl: bool) -> None:
    """Ranks of unlike versions may wait for each other for ever. Raises ConfigError, alike on all of them."""
    for what, field in (("torch", "torch"), *((("NCCL", "nccl"),) if with_nccl else ())):
        found = [str(getattr(member, field)) for member in members]
        usual = max(found, key=found.count)
        if odd := [f"{one} {what} {its}" for one, its in zip(members, found, strict=True) if its != usual]:
            raise ConfigError("versions_differ", odd=", ".join(odd), usual=f"{what} {usual}")


class Gang:
    """The members of one sealed attempt. `store` holds keys of this attempt only."""

    def __init__(self, me: Member, attempt: str, members: list[Member], base: Store, watch: Store) -> None:
        self.attempt = attempt
        self.rank = me.rank
        self.world_size = len(members)
        self.members = members
        self.store = PrefixStore(f"{attempt}/group", base)
        self._me = me
        self._base = base  # keeps rank 0's server alive
        self._watch_store = watch
        self._activity = Activity()
        self._verdict: Verdict | None = None
        self._verdict_known = threading.Event()
        self._leaving = threading.Event()
        self._store_answered = now()
        self._beats: dict[int, tuple[int, float]] = {}  # by rank: how many, and since when they are so many
        self._on_broken: Callable[[str, int], NoReturn] | None = None
        self._lock = threading.Lock()

    def without_nccl(self) -> list[Member]:
        return [member for member in self.members if member.backend == "gloo"]

    def agreed_backend(self) -> str:
        return agreed_backend([one.backend for one in self.members], [one.node for one in self.members])

    def watch(self, on_broken: Callable[[str, int], NoReturn], activity: Activity | None = None) -> None:
        """Start the heartbeat; `activity` is what it says of the main thread.

        `on_broken` gets the verdict and the exit code, once, from whichever thread; it must end the process.
        """
        self._on_broken = on_broken
        if activity:
            self._activity = activity
            activity.alone = False
        self._store_answered = now()
        threading.Thread(target=self._beat_loop, name="gang-beat", daemon=True).start()
        threading.Thread(target=self._guard_loop, name="gang-guard", daemon=True).start()

    def end(self, error: BaseException, timeout: float = 15.0) -> NoReturn:
        """After a failed collective: end the process with the verdict that comes within `timeout` seconds, or with the
        `error`. The watching thread does it: two that ended the process would both say why."""
        store = PrefixStore(self.attempt, self._base)
        with suppress(RuntimeError):  # the store is gone: the watching threads say so
            patiently(lambda: store.set("hurt", str(self.rank)))
        if not self._verdict_known.wait(timeout):
            verdict = Verdict(text("collective_failed", error=error))
            with suppress(RuntimeError):
                patiently(lambda: _publish(store, verdict))
            if not self._verdict_known.wait(LINGER + SILENCE):
                self._broken(verdict)
        while True:
            time.sleep(1)  # the other thread still saves what is on its way to the disk

    def give_up(self, sentence: str, exit_code: int) -> None:
        """Tell all that this rank ends, and why, before it leaves. With 64, 65 or 69 they end with the same code:
        starting again would not help them either. With any other they are started again."""
        self._leaving.set()
        final = Verdict(sentence, exit_code).is_final
        verdict = Verdict(f"{self._me}: {sentence}", exit_code if final else EXIT_TEMPORARY)
        with suppress(RuntimeError):  # rank 0 has ended before us
            patiently(lambda: _publish(PrefixStore(self.attempt, self._base), verdict))

    def leave(self, timeout: float = 15.0) -> None:
        """End in good order: nobody is blamed any more, and rank 0 keeps the store up until all have left."""
        self._leaving.set()
        with suppress(RuntimeError):  # the store does not answer: nobody can be told
            patiently(
                lambda: self._linger(PrefixStore(self.attempt, self._base), timeout), timeout + PATIENCE
            )

    def _beat_loop(self) -> None:
        """Watch until the attempt is over. A watch that ended silently would look like one that sees nothing."""
        store = PrefixStore(self.attempt, self._watch_store)
        try:
            verdict = self._watch_until_over(store)
        except RuntimeError as error:
            verdict = Verdict(text("store_ended", member=self.members[0], error=first_line(error)))
        except GangBroken as error:
            verdict = self._proclaim(store, Verdict(str(error)))
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            verdict = self._proclaim(store, Verdict(text("watch_failed", member=self._me, error=what)))
        if verdict and not self._leaving.is_set():
            self._broken(verdict)

    def _watch_until_over(self, store: Store) -> Verdict | None:
        """Beat, read the verdict, watch the others' beats: rank 0 those of all, the others rank 0's.

        The verdict, or None when this rank leaves. Raises RuntimeError when the store is gone, GangBroken."""
        watched = self.members[1:] if self.rank == 0 else self.members[:1]
        last_beat = now()
        while not self._leaving.wait(BEAT):
            if frozen := self._was_frozen(last_beat):
                return frozen
            last_beat = now()
            store.add(f"beat/{self._me.token}", 1)
            store.set(f"activity/{self._me.token}", json.dumps(asdict(self._activity.report())))
            current = read_header(self._watch_store)["attempt"]
            if current != self.attempt:
                return Verdict(
                    text("another_attempt", current=current, member=self._me, attempt=self.attempt)
                )
            if store.check(["broken"]):
                return self._heed(store)
            verdict = self._find_silent(store, watched)
            if self.rank == 0 and not verdict:
                verdict = self._find_stalled(store)
            if verdict:
                return self._proclaim(store, verdict)
            self._store_answered = now()
        return None

    def _was_frozen(self, last_beat: float) -> Verdict | None:
        """A rank that was stopped or has slept sees all others silent; it is the one that was missing."""
        seconds = now() - last_beat
        if seconds <= SILENCE:
            return None
        return Verdict(text("was_frozen", member=self._me, seconds=seconds))

    def _heed(self, store: Store) -> Verdict | None:
        """The verdict that stands; None when this rank has come to its own end meanwhile."""
        said = read(store, "broken")
        verdict = Verdict(str(said["sentence"]), int(said["exit_code"]))
        # Ranks that find the same fault in the same step say it in their own words; who gives up has left already.
        if verdict.is_final and self._leaving.wait(OWN_WORDS):
            return None
        self._linger(store)
        return verdict

    def _proclaim(self, store: Store, verdict: Verdict) -> Verdict:
        """Make it the verdict of all, unless another one stands; that one."""
        try:
            said = json.loads(_publish(store, verdict))
            verdict = Verdict(str(said["sentence"]), int(said["exit_code"]))
        except (RuntimeError, ValueError, LookupError):
            pass  # a store that cannot keep it: this rank at least ends with it
        self._linger(store)
        return verdict

    def _linger(self, store: Store, seconds: float | None = None) -> None:
        """This rank knows all that it has to; rank 0 keeps the store up until the others that live do."""
        try:
            store.set(f"left/{self._me.token}", "yes")
            deadline = now() + (LINGER if seconds is None else seconds)
            while self.rank == 0 and now() < deadline and self._somebody_reads(store):
                self._store_answered = now()
                time.sleep(0.05)
        except RuntimeError:
            pass  # rank 0 has ended before us

    def _somebody_reads(self, store: Store) -> bool:
        return any(
            not store.check([f"left/{member.token}"]) and self._silence_of(member, store) <= SILENCE_HURT
            for member in self.members[1:]
        )

    def _silence_of(self, member: Member, store: Store) -> float:
        """Seconds since its last heartbeat was seen."""
        beats, time_now = store.add(f"beat/{member.token}", 0), now()
        count, since = self._beats.get(member.rank, (-1, time_now))
        if beats != count:
            self._beats[member.rank] = (beats, time_now)
        return time_now - since if beats == count else 0.0

    def _find_silent(self, store: Store, watched: list[Member]) -> Verdict | None:
        """The first of them whose heartbeat has stopped."""
        hurt = store.check(["hurt"])
        for member in watched:
            silence, claimed = self._silence_of(member, store), store.check([f"claim/{member.rank}"])
            if silence > (SILENCE_HURT if hurt or claimed else SILENCE):
                key = "silent_and_started_again" if claimed else "silent"
                return Verdict(text(key, member=member, seconds=silence))
        return None

    def _find_stalled(self, store: Store) -> Verdict | None:
        """Rank 0: whose main thread hangs although its heartbeat goes on, its own included."""
        reports = [self._report_of(store, member) for member in self.members]
        guilty = stalled(reports, hurt=store.check(["hurt"]))
        if not guilty:
            return None
        report = reports[guilty[0]]
        if len(guilty) == self.world_size > 1:
            return Verdict(text("nobody_gets_on", report=report))
        names = ", ".join(str(self.members[place]) for place in guilty)
        return Verdict(text("hangs", members=names, report=report))

    def _report_of(self, store: Store, member: Member) -> Report | None:
        key = f"activity/{member.token}"
        return Report(**read(store, key)) if store.check([key]) else None

    def _guard_loop(self) -> None:
        """A store operation can hang: rank 0's node has lost power, or its address, and then it hangs there too. This
        thread never touches the store."""
        last_look = now()
        while not self._leaving.wait(BEAT):
            silent = now() - self._store_answered
            if frozen := self._was_frozen(last_look):
                self._broken(frozen)
                return
            last_look = now()
            if silent > SILENCE:
                self._broken(Verdict(text("silent", member=self.members[0], seconds=silent)))
                return

    def _broken(self, verdict: Verdict) -> None:
        with self._lock:
            if self._verdict is not None or self._leaving.is_set():
                return
            self._verdict = verdict
        self._verdict_known.set()
        if self._on_broken is not None:
            self._on_broken(verdict.sentence, verdict.exit_code)


def _publish(store: Store, verdict: Verdict) -> bytes:
    """Write the verdict unless there is one; the one that stands. Raises RuntimeError."""
    return store.compare_set("broken", "", json.dumps(verdict._asdict()))
