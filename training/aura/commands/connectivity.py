"""`python -m aura.commands.connectivity [--json FILE] < EVIDENCE`: what playbooks/connectivity.yml reports.

Standard library only: it runs on the controller. Exit codes: 0 nothing failed (there may be warnings), 2 at least one
check failed, 1 the input could not be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from aura.check.connectivity.evidence import read_evidence
from aura.check.connectivity.report import as_json, draw, judge, worst


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Judges what the nodes found out about their connectivity.")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the machine-readable result")
    given = parser.parse_args(argv)
    try:
        evidence = read_evidence(sys.stdin.read())
        checks = judge(evidence)
        if given.json:
            given.json.write_text(json.dumps(as_json(evidence, checks), indent=2) + "\n")
    except (OSError, ValueError, KeyError) as problem:
        print(f"The evidence could not be read, or the result not written: {problem!r}", file=sys.stderr)
        return 1
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # a C locale would refuse the marks
    print("\n".join(draw(evidence, checks)))
    return 2 if worst(checks) == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
