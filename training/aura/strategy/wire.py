"""Exchanges between the ranks, one after the other in a thread of their own, while the others compute.

All ranks submit the same exchanges in the same order. Two are under way at a time, so that the wire has something to
do while the result of one is added up. That bounds the memory of what comes, and of weights, which are packed when
their turn comes. Gradients are packed when they are made: a slow link holds them all, in the format of the wire, in
place of the gradients themselves, whose memory is the card's.

An exchange may have a second stage, made of what the first has brought. It goes over another communicator, with a
thread and an order of its own, so that the first stages behind it do not wait for it. A job is an exchange with all
of its stages.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue

import torch.distributed as dist
from torch import Tensor

from aura.cluster.ranks import CollectiveFailed, collective
from aura.texts.console import text

UNDER_WAY = 2
# Seconds. Who stalls for less is not worth an attempt: a bad cable, a busy disk, two cores for five ranks.
SHORTEST = 20.0
DEVIATIONS = 10  # median absolute deviations above the median
REMEMBERED, ENOUGH = 64, 8  # waits of one kind that are kept, and that say something


@dataclass(frozen=True)
class Peers:
    """Who takes part in an exchange."""

    group: dist.ProcessGroup
    communicator: int  # an exchange waits only for others of its communicator
    local_ranks: frozenset[
        int
    ]  # of the group: whom this one reaches without a link that counts, itself at least


@dataclass
class Exchange:
    """Every rank sends a part of a flat tensor to every rank. gloo's reduce_scatter is an all-reduce inside, with twice
    the bytes; all_to_all_single is what it says. `pack` and `use` are called in the thread of the communicator."""

    kind: str  # waits of the same kind take about equally long
    peers: Peers
    pack: Callable[[], Tensor]  # makes what is sent
    to_ranks: list[int]  # elements for each
    from_ranks: list[int]  # elements of each
    use: Callable[[Tensor], Exchange | None]  # gets what has come, and may return the next stage

    def begin(self) -> dist.Work:
        self.sent = self.pack()
        self.received = self.sent.new_empty(sum(self.from_ranks))
        return dist.all_to_all_single(
            self.received, self.sent, self.from_ranks, self.to_ranks, group=self.peers.group, async_op=True
        )

    def end(self) -> tuple[int, Exchange | None]:
        """The bytes that have left over links, and the next stage."""
        far = (count for rank, count in enumerate(self.to_ranks) if rank not in self.peers.local_ranks)
        sent = sum(far) * self.sent.element_size()
        following = self.use(self.received)
        del self.sent, self.received
        return sent, following


class AdaptiveTimeout:
    """How long to wait for the others: the median of the last waits of that kind, and beside it DEVIATIONS times their
    median absolute deviation, or as long as a step usually takes: another program may make a rank half as fast, and
    who is fast waits most of a step already. At least SHORTEST, and twice the longest of the last waits: who has
    stalled may again. `longest` [seconds] while too few are known."""

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self.delayed = True  # the first step compiles, allocates, opens connections
        self.waits: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self.steps: deque[float] = deque(maxlen=REMEMBERED)  # seconds of the last ones
        self.last_step: float | None = None  # when it ended

    def add(self, kind: str, seconds: float) -> None:
        if not self.delayed:
            self.waits[kind].append(seconds)

    def step_is_done(self) -> None:
        now = time.perf_counter()
        if self.last_step is not None and not self.delayed:
            self.steps.append(now - self.last_step)
        self.last_step, self.delayed = now, False

    def seconds(self, kind: str) -> float:
        waits = self.waits[kind]
        if self.delayed or len(waits) < ENOUGH:
            return self.longest
        median = statistics.median(waits)
        deviation = statistics.median(abs(wait - median) for wait in waits)
        step = statistics.median(self.steps) if self.steps else 0.0
        usual = median + max(step, DEVIATIONS * deviation)
        return min(self.longest, max(SHORTEST, usual, 2 * max(waits)))


class Wire:
    def __init__(self, patience: AdaptiveTimeout, prepare: Callable[[int], None], communicators: int) -> None:
        """prepare: called once in the thread of every communicator, before all exchanges."""
        self.patience, self.prepare = patience, prepare
        self.submitted = self.finished = 0  # jobs
        self.sent_bytes = 0
        self.last_lane = 0  # in which the last job has begun
        self.error: BaseException | None = None
        self.queues: list[SimpleQueue[Exchange | None]] = [SimpleQueue() for _ in range(communicators)]
        self.changed = threading.Condition()
        # Daemons: a rank that ends does not wait for an operation that will never end.
        self.threads = [
            threading.Thread(
                target=self._work, args=(communicator,), name=f"wire {communicator}", daemon=True
            )
            for communicator in range(communicators)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, exchange: Exchange) -> int:
        """The number of the job, for `wait`. By one thread at a time.

        Where the next stage of one job and the first of another use the same communicator, only a wait keeps their
        order the same on all ranks.
        """
        communicator = exchange.peers.communicator
        assert communicator == self.last_lane or self.finished == self.submitted, (
            "jobs of another lane are under way"
        )
        self.last_lane = communicator
        self.submitted += 1
        self.queues[communicator].put(exchange)
        return self.submitted

    def wait(self, number: int) -> None:
        """Until this job and all before it have ended. Raises CollectiveFailed, or what went wrong in one."""
        if self.finished < number:
            with self.changed:
                self.changed.wait_for(lambda: self.finished >= number or self.error is not None)
        if self.finished < number:
            assert self.error is not None
            raise self.error

    def close(self) -> None:
        """After the last job."""
        self.wait(self.submitted)
        for queue, thread in zip(self.queues, self.threads, strict=True):
            queue.put(None)
            thread.join()

    def _work(self, communicator: int) -> None:
        try:
            self.prepare(communicator)
            self._exchange(self.queues[communicator])
        except BaseException as error:  # whatever it is: the others wait for this thread
            with self.changed:
                self.error = self.error or error
                self.changed.notify_all()

    def _exchange(self, queue: SimpleQueue[Exchange | None]) -> None:
        under_way: deque[tuple[Exchange, dist.Work, float]] = deque()
        last_end = 0.0
        while True:
            if not under_way or (len(under_way) < UNDER_WAY and not queue.empty()):
                exchange = queue.get()
                if exchange is None:
                    return
                with collective():
                    under_way.append((exchange, exchange.begin(), time.perf_counter()))
                continue
            exchange, work, began = under_way.popleft()
            self._await(work, exchange.kind)
            # The wait for an exchange begins when the one before it has ended.
            now = time.perf_counter()
            self.patience.add(exchange.kind, now - max(began, last_end))
            last_end = now
            sent, following = exchange.end()
            if following is not None:
                self.queues[following.peers.communicator].put(following)
            with self.changed:
                self.sent_bytes += sent
                if following is None:
                    self.finished += 1
                    self.changed.notify_all()

    def _await(self, work: dist.Work, kind: str) -> None:
        limit = self.patience.seconds(kind)
        began = time.perf_counter()
        try:
            with collective():
                work.wait(timedelta(seconds=limit))
        except CollectiveFailed as error:
            waited = time.perf_counter() - began
            if waited < limit:
                raise
            sentence = text("no_answer_from_a_rank", seconds=waited, kind=kind)
            raise CollectiveFailed(sentence) from error
