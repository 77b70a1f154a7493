"""`aura copy-runs`: copy what runs have finished to another disk."""

from __future__ import annotations

from pathlib import Path

from aura.checkpoint.copy_runs import Copier, Later, Pace
from aura.errors import EXIT_OK, EXIT_TEMPORARY, Parser
from aura.texts.console import text


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura copy-runs",
        description="Copy what runs have finished to another disk: checkpoints, final/ and what they need. What is "
        "there already is left alone. Ends with 75 when the target cannot be written for now.",
    )
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="the directory with the runs")
    parser.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="where each run gets a directory"
    )
    parser.add_argument(
        "--keep",
        type=int,
        default=3,
        metavar="N",
        help="newest checkpoints that stay there, beside those that the run keeps (3)",
    )
    parser.add_argument("--rate", type=float, default=0, metavar="MB/S", help="at most (0: no limit)")
    parser.add_argument(
        "--leave-free", type=float, default=10, metavar="GB", help="space that is not used up (10)"
    )
    arguments = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    copier = Copier(
        arguments.target, arguments.keep, arguments.leave_free * 1e9, Pace(arguments.rate * 1e6), say
    )
    try:
        copier.copy_all(arguments.runs)
    except Later as reason:
        say(text("tried_again", reason=reason))
        return EXIT_TEMPORARY
    return EXIT_OK
