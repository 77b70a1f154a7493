"""`aura train` under a hard limit of GPU memory, ended after a few seconds of steady training; for gpu.py.

    python benchmarks/limited_train.py --gigabytes 6 --run-dir DIR -- --preset gpt2-medium-6gb --corpus DIR

Ends without saving anything. Prints one line of JSON after the trainer's own: points (step and clock, as status.json
had them), peak_allocated and peak_reserved [bytes]. Without a GPU there is no limit and no peak.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from aura.commands import cli

PAUSE = 0.1  # seconds between two looks at the status
FEWEST_STEPS = 3


def watch(status: Path, warm_up: int, seconds: float) -> None:
    """End the process after `seconds` of training, counted from the end of step `warm_up`."""
    points: list[tuple[int, float]] = []
    while True:
        time.sleep(PAUSE)
        try:
            state: dict[str, Any] = json.loads(status.read_text(encoding="utf-8"))
        except OSError:
            continue  # not yet written
        step = int(state["step"])
        if step < warm_up or (points and step == points[-1][0]):
            continue
        points.append((step, float(state["updated"])))
        if step - points[0][0] >= FEWEST_STEPS and points[-1][1] - points[0][1] >= seconds:
            break
    gpu = torch.cuda.is_available()
    report = {
        "points": points,
        "peak_allocated": torch.cuda.max_memory_allocated() if gpu else None,
        "peak_reserved": torch.cuda.max_memory_reserved() if gpu else None,
    }
    print(json.dumps(report), flush=True)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, help="hard limit of what torch may allocate [10^9 bytes]")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--warm-up", type=int, default=4, metavar="STEPS", help="steps before the clock (4)")
    parser.add_argument("--seconds", type=float, default=8, help="of training that is timed, at least (8)")
    parser.add_argument("words", nargs="+", help="further arguments of aura train")
    arguments = parser.parse_args()
    if arguments.gigabytes and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.gigabytes * 1e9 / total))
    status = arguments.run_dir / "rank-0" / "status.json"
    threading.Thread(target=watch, args=(status, arguments.warm_up, arguments.seconds), daemon=True).start()
    return cli.main(["train", "--run-dir", str(arguments.run_dir), *arguments.words])


if __name__ == "__main__":
    sys.exit(main())
