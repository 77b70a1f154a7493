"""When each member of a process group was last heard, and how long it may be silent before it counts as gone."""

from __future__ import annotations

from torch.distributed import Store

from aura.cluster.peers import knock_at
from aura.cluster.rendezvous_store import Member, now

STALL = 3.0  # seconds between two heartbeats that are no accident of a busy processor
# Seconds without a heartbeat after which a member counts as gone: twice the longest silence that it has come back from,
# within these. A process may stall for a while (a disk, a browser), and a restart costs all ranks more than that.
SILENCE, SILENCE_LONGEST = 20.0, 60.0
SILENCE_OFF = 8.0  # the same, where its PC does not answer either: it has no power, or no cable
SILENCE_HURT = 4.0  # the same, once a collective has failed or the rank has been started again
SILENCE_BOTH = 2.0  # the same, once both is so


class Heartbeats:
    """Seconds are this rank's own: the clocks of two nodes are never compared."""

    def __init__(self, port: int) -> None:
        """`port`: whether a PC lives is asked there."""
        self._port = port
        self._beats: dict[int, tuple[int, float]] = {}  # by rank: how many, and since when they are so many
        self._stalls: dict[int, float] = {}  # by rank: the longest silence that it has come back from

    def note_stall(self, member: Member, seconds: float) -> None:
        self._stalls[member.rank] = max(self._stalls.get(member.rank, 0.0), seconds)

    def forgive_own_stall(self) -> None:
        """This rank has not listened for a while: what the others have said meanwhile is still to be read."""
        self._beats = {rank: (count, now()) for rank, (count, _) in self._beats.items()}

    def silence(self, member: Member, store: Store) -> float:
        """Seconds since its last heartbeat was seen. Raises RuntimeError."""
        beats, time_now = store.add(f"beat/{member.token}", 0), now()
        count, since = self._beats.get(member.rank, (-1, time_now))
        if beats != count:
            self._beats[member.rank] = (beats, time_now)
            self.note_stall(member, time_now - since)
        return time_now - since if beats == count else 0.0

    def timeout(self, member: Member) -> float:
        """Seconds after which it counts as gone, where nothing else is known of it."""
        return min(max(SILENCE, 2 * self._stalls.get(member.rank, 0.0)), SILENCE_LONGEST)

    def timeout_now(self, member: Member, store: Store) -> float:
        """The same, by what the store says of it. Raises RuntimeError."""
        signs = store.check(["hurt"]) + store.check([f"claim/{member.rank}"])
        return (self.timeout(member), SILENCE_HURT, SILENCE_BOTH)[signs]

    def is_off(self, member: Member, silence: float) -> bool:
        """Where its PC answers, only its process stalls."""
        return silence > SILENCE_OFF and not knock_at(member.address, self._port)[1]
