"""The screen of `make demo` as a recording (asciicast, version 2) that lasts 20 seconds instead of five minutes.

`python3 demo_cast.py demo-logs/output.log` writes it to standard output. The log is what `make e2e` leaves of the demo
that it runs: the text is the demo's, without the tasks that changed nothing, and with the time of each step shortened.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

COLUMNS, ROWS = 114, 30
PER_LINE = 0.1  # seconds, so that one can see what passes by
OF_A_STEP = 0.02  # of the seconds that it took
LONGEST = 3.5  # seconds
END = "== Where the time went"
TIME = re.compile(r"   (\d+) s")
UNCHANGED = re.compile(r"^TASK \[.*\n(?:(?:ok|included): .*[^>\n]\n)+\n?", re.MULTILINE)


def events(log: str) -> list[tuple[float, str]]:
    """(seconds since the beginning, what is written then). A step's time passes before the line that tells it."""
    now, found = 0.0, []
    log = UNCHANGED.sub("", log)
    for line in re.sub(r"\n{3,}", "\n\n", log).split(END)[0].strip().splitlines():
        step = TIME.fullmatch(line)
        now += min(OF_A_STEP * int(step[1]), LONGEST) if step else PER_LINE
        # As on a terminal, where the demo writes its headings so. The home of whoever ran it is nobody's concern.
        shown = f"\033[1m{line}\033[0m" if line.startswith("== ") else line.replace(str(Path.home()), "~")
        found.append((round(now, 2), f"{shown}\r\n"))
    return found


def main() -> None:
    print(json.dumps({"version": 2, "width": COLUMNS, "height": ROWS, "title": "make demo"}))
    print(json.dumps([0.0, "o", "$ make demo\r\n"]))
    for time, text in events(Path(sys.argv[1]).read_text(encoding="utf-8")):
        print(json.dumps([time, "o", text], ensure_ascii=False))


if __name__ == "__main__":
    main()
