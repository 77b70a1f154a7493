"""`make bench-faults`: what a fault costs a run on the lab's five nodes, which `make demo` has made.

Real: systemd, the trainers, their sockets and disks; the power of a node, its cable, its processes. Not here: the clock
(the nodes share the kernel's; tests/vm sets it), full disks (tests/training). gpt2-nano, a checkpoint every 20 steps;
five trainers share the processors of this machine, so that starting again takes longer than on five PCs.

`pause`: the longest time in which a rank that was not hit did no new step, seen every half second in its status, which
is written once a second; `together`: all such times above 3 s. `repeated`: steps that had been computed and were lost
with the attempt.

Then faults drawn from a seed, one every two minutes for --minutes: goodput is the steps that were done by those that
would have been done without a fault. The rate of that is the median of the half minutes before each next fault, when
the one before is over: two minutes of one run can be 8 % apart, and what two runs do by 14 %. The last line is JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab_cluster import NODES, RUNS, Cluster
from measuring import options, show, write_results

RUN = ("-e", "preset=gpt2-nano", "-e", "run=faults", "-e", "steps=1000000", "-e", "save_every=20")
LONGEST = 240.0  # seconds for anything to be well again
EVERY = 120.0  # seconds from one drawn fault to the next
OVER = 85.0  # seconds after which it is over: a minute without power, a boot and a join
USUAL = 3.0  # seconds from one new step to the next that are no pause
FLAP, FLAPS = 20, 15  # seconds, times: ten minutes
UNIT = "aura-train@0.service"


@dataclass(frozen=True)
class Seen:
    time: float
    step: int


class Watch:
    """One node's rank, looked at every half second by a thread of its own."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.cluster, self.node = cluster, node
        self.seen: list[Seen] = []
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.ends.wait(0.5):
            try:
                (status,) = self.cluster.status([self.node])
            except (AssertionError, ValueError, subprocess.TimeoutExpired):
                continue  # it is off
            if status.get("step") and status.get("attempt"):
                self.seen.append(Seen(time.monotonic(), status["step"]))

    def stop(self) -> list[Seen]:
        self.ends.set()
        self.thread.join()
        return self.seen


def pauses_and_repeated(seen: list[Seen]) -> tuple[list[float], int]:
    """The times without a new step, and how many steps were lost."""
    pauses, last, repeated = [0.0], seen[0], 0
    for one in seen:
        repeated += max(0, last.step - one.step)
        if one.step != last.step:
            pauses.append(one.time - last.time)
            last = one
    return [*pauses, seen[-1].time - last.time], repeated


class Faults:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.is_launched = cluster, False
        self.rows: list[dict[str, str]] = []  # of the table

    # Acts

    def launch(self) -> None:
        """Once more, where it is under way: then nobody has been away lately."""
        if self.is_launched:
            self.cluster.ansible("playbooks/stop.yml")
        self.cluster.ansible("launch.yml", *RUN)
        self.is_launched = True
        self.well()

    def kill(self, node: str) -> None:
        self.cluster.sh(node, f"systemctl kill --kill-who=main --signal=KILL {UNIT}")

    def freeze(self, node: str, seconds: float) -> None:
        self.cluster.sh(node, f"systemctl kill --kill-who=all --signal=STOP {UNIT}")
        time.sleep(seconds)
        self.cluster.sh(node, f"systemctl kill --kill-who=all --signal=CONT {UNIT}")

    # What follows

    def steps(self) -> tuple[int, float]:
        """Of node1, and when; a rank that has just started again has done none."""
        self.cluster.wait("a step", lambda: self.cluster.status(["node1"])[0]["step"] > 0, LONGEST)
        return self.cluster.status(["node1"])[0]["step"], time.monotonic()

    def rate(self, until: float) -> float:
        """Steps a second, from now on."""
        first, began = self.steps()
        time.sleep(max(1.0, until - time.monotonic()))
        last, ended = self.steps()
        return (last - first) / (ended - began)

    def trains(self, nodes: list[str]) -> bool:
        """All of these, without the others."""
        try:
            return self.cluster.training(nodes, away=[NODES.index(node) for node in without(*nodes)])
        except (AssertionError, ValueError):
            return False  # a node is off

    def well(self, nodes: list[str] = NODES) -> float:
        """Seconds until they train, and have done some steps."""
        began = time.monotonic()
        self.cluster.wait(f"{nodes} train", lambda: self.trains(nodes), LONGEST)
        first = self.cluster.status(nodes[:1])[0]["step"]
        self.cluster.wait("steps", lambda: self.cluster.status(nodes[:1])[0]["step"] >= first + 3, LONGEST)
        return time.monotonic() - began

    @contextmanager
    def watched(self, fault: str, aim: str, node: str = "node1") -> Iterator[None]:
        """A row of the table, of what this node sees."""
        time.sleep(5)
        watch, began = Watch(self.cluster, node), time.monotonic()
        # A pause begins with a step before it.
        self.cluster.wait("a first look", lambda: bool(watch.seen), LONGEST)
        yield
        time.sleep(2)
        pauses, repeated = pauses_and_repeated(watch.stop())
        together = sum(pause for pause in pauses if pause > USUAL)
        row = {"fault": fault, "aim": aim, "pause": f"{max(pauses):.0f} s", "together": f"{together:.0f} s"}
        self.rows.append(row | {"repeated": str(repeated)})
        print(f"{self.rows[-1]} in {time.monotonic() - began:.0f} s")


def without(*nodes: str) -> list[str]:
    return [node for node in NODES if node not in nodes]


def table(faults: Faults) -> int:
    """Every fault of it; how often two sides trained. Between two of one node there is a launch, as who stops all for
    the second time within ten minutes is not waited for."""
    cluster, lab, split = faults.cluster, faults.cluster.lab, 0
    faults.launch()
    with faults.watched("node3's cable out for 150 s", "38 s"):
        began = time.monotonic()
        lab("cut", "node3")
        faults.well(without("node3"))
        time.sleep(max(0.0, 150 - (time.monotonic() - began)))
    with faults.watched("… and in again", "25 s"):
        lab("heal", "node3")
        faults.well()
    faults.launch()
    with faults.watched(f"node3's cable {FLAPS} times out and in for {FLAP} s", "60 s in all"):
        for _ in range(FLAPS):
            lab("cut", "node3")
            time.sleep(FLAP)
            lab("heal", "node3")
            time.sleep(FLAP)
    with faults.watched("… and in to stay", "25 s"):
        print(f"all train after {faults.well():.0f} s")
    faults.launch()
    for node in ("node3", "node0"):
        with faults.watched(f"kill -9 on {node}", "12 s"):
            faults.kill(node)
            time.sleep(4)
            faults.well()
    with faults.watched("node2 sends and hears nothing", "38 s"):
        cluster.cut_off(["node2"], NODES, deaf=True)
        faults.well(without("node2"))
    with faults.watched("… and healed", "25 s"):
        cluster.mend(["node2"])
        faults.well()
    faults.launch()
    for node in ("node3", "node0"):
        with faults.watched(f"{node} off", "38 s"):
            lab("power-off", node)
            faults.well(without(node))
        with faults.watched(f"{node} returns", "15 s"):
            lab("power-on", node, "--no-wait")
            faults.well()
    for small in (["node3", "node4"], ["node0"], ["node0", "node1"]):
        faults.launch()
        large = without(*small)
        sides = f"{len(large)}|{len(small)}, {' and '.join(small)} cut off"
        with faults.watched(sides, "38 s", large[0]):
            cluster.cut_off(small, large)
            faults.well(large)
            for _ in range(20):
                split += faults.trains(large) and faults.trains(small)  # all of both sides
                time.sleep(1)
        with faults.watched("… and healed", "25 s", large[0]):
            cluster.mend(small)
            faults.well()
    for seconds in (5, 20):
        with faults.watched(f"node3 frozen for {seconds} s", "–"):
            faults.freeze("node3", seconds)
            faults.well()
    return split


def drawn(faults: Faults, minutes: float, seed: int) -> tuple[float, float]:
    """Goodput of a run with a fault every two minutes: of what the nodes could have computed that were there, and of
    what all could. Where a fault lasts, its node is not there."""
    chance, lab = random.Random(seed), faults.cluster.lab  # noqa: S311 - not for secrets
    faults.launch()
    rates, (first, began), away = [], faults.steps(), 0.0
    while (now := time.monotonic()) - began < 60 * minutes:
        node, kind = chance.choice(NODES), chance.choice(["kill", "off", "cut", "freeze"])
        seconds = 0 if kind == "kill" else chance.choice([5, 20] if kind == "freeze" else [5, 60])
        away += seconds
        print(f"{now - began:5.0f} s: {kind} {node} for {seconds} s")
        if kind == "kill":
            faults.kill(node)
        elif kind == "off":
            lab("power-off", node)
            time.sleep(seconds)
            lab("power-on", node, "--no-wait")
        elif kind == "cut":
            faults.cluster.cut_off([node], without(node))
            time.sleep(seconds)
            faults.cluster.mend([node])
        else:
            faults.freeze(node, seconds)
        time.sleep(max(0.0, now + OVER - time.monotonic()))
        if time.monotonic() < now + EVERY - 15 and faults.trains(NODES):
            rates.append(faults.rate(until=now + EVERY))
        time.sleep(max(0.0, now + EVERY - time.monotonic()))
    faults.well()
    took = time.monotonic() - began
    steps = max(status["step"] for status in faults.cluster.status()) - first
    rates = sorted([*rates, faults.rate(until=time.monotonic() + EVERY - OVER)])
    rate, quarter = statistics.median(rates), len(rates) // 4
    print(
        f"{steps} steps in {took:.0f} s; {rate:.2f} a second in {len(rates)} quiet parts, "
        f"half of them from {rates[quarter]:.2f} to {rates[-1 - quarter]:.2f}"
    )
    of_all = steps / (rate * took)
    return of_all / (1 - away / took / len(NODES)), of_all


def main() -> None:
    parser = options(__doc__, text=False)
    parser.add_argument("--minutes", type=float, default=60, help="of drawn faults (default: 60; 0: none)")
    parser.add_argument("--seed", type=int, default=1, help="of those (default: 1)")
    parser.add_argument("--no-table", action="store_true", help="the drawn faults only")
    asked = parser.parse_args()
    cluster = Cluster("", Path(tempfile.mkdtemp(prefix="aura-faults-")))
    try:
        cluster.lab("exec", "node0", "test", "-x", "/opt/aura/rank-status")
    except AssertionError:
        sys.exit("There is no provisioned lab here: make demo, then make bench-faults again.")
    faults = Faults(cluster)
    try:
        split = None if asked.no_table else table(faults)
        goodput, of_all = drawn(faults, asked.minutes, asked.seed) if asked.minutes else (None, None)
    finally:
        cluster.ansible("playbooks/stop.yml", expect=None if sys.exc_info()[0] else 0)
    config = json.loads(cluster.sh("node1", f"cat {RUNS}/faults/model_config.json"))
    lost = config["step_tokens"] * sum(int(row["repeated"]) for row in faults.rows)
    columns = ["fault", "aim", "pause", "together", "repeated"]
    show("Faults", columns, [[row[name] for name in columns] for row in faults.rows], left=["fault"])
    result = {
        "bench": "faults",
        "goodput": goodput and round(goodput, 3),
        "of_all": of_all and round(of_all, 3),
        "lost_tokens": None if asked.no_table else lost,  # in the table
        "minutes": asked.minutes,
        "seed": asked.seed,
        "waits_for_a_person": 0,
        "split": split,
    }
    write_results("faults-drawn" if asked.no_table else "faults", {**result, "rows": faults.rows})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
