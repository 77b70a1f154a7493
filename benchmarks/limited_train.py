"""`aura train` under a hard limit of GPU memory, ended after a few seconds of steady training; for gpu.py.

    python benchmarks/limited_train.py --gigabytes 6 --run-dir DIR -- --preset gpt2-medium-6gb --corpus DIR

Ends without saving anything. Prints one line of JSON after the trainer's own: points (step and clock, as status.json
had them) and peak_reserved [bytes]. Without a GPU there is no limit and no peak.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from aura.commands import cli
from measuring import options

PAUSE = 0.1  # seconds between two looks at the status
FEWEST_STEPS = 3
SECONDS = 8  # of training that is timed, at least


def watch(status: Path, warm_up: int) -> None:
    """End the process after SECONDS of training, counted from the end of step `warm_up`."""
    points: list[tuple[int, float]] = []
    while not points or points[-1][0] - points[0][0] < FEWEST_STEPS or points[-1][1] - points[0][1] < SECONDS:
        time.sleep(PAUSE)
        try:
            state = json.loads(status.read_text(encoding="utf-8"))
        except OSError:
            continue  # not yet written
        if state["step"] >= warm_up and (not points or state["step"] != points[-1][0]):
            points.append((state["step"], state["updated"]))
    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
    print(json.dumps({"points": points, "peak_reserved": peak}), flush=True)
    os._exit(0)


def main() -> int:
    parser = options(__doc__, text=False)
    parser.add_argument("--gigabytes", type=float, help="hard limit of what torch may allocate [10^9 bytes]")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--warm-up", type=int, default=4, metavar="STEPS", help="steps before the clock (4)")
    parser.add_argument("words", nargs="+", help="further arguments of aura train")
    given = parser.parse_args()
    if given.gigabytes and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, given.gigabytes * 1e9 / total))
    status = given.run_dir / "rank-0" / "status.json"
    threading.Thread(target=watch, args=(status, given.warm_up), daemon=True).start()
    return cli.main(["train", "--run-dir", str(given.run_dir), *given.words])


if __name__ == "__main__":
    sys.exit(main())
