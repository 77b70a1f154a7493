"""`aura copy-runs`: copy what runs have finished to another disk, or into object storage."""

from __future__ import annotations

from pathlib import Path

from aura.copies.copy_runs import Copier, Later, Pace, Target
from aura.copies.in_bucket import Runs
from aura.copies.on_disk import Disk
from aura.errors import EXIT_OK, EXIT_TEMPORARY, ConfigError, Parser
from aura.storage.address import Address, place
from aura.texts.console import put, text


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura copy-runs",
        description="Copy what runs have finished to another disk, or into object storage: checkpoints, final/ and "
        "what they need. What is there already is left alone. Ends with 75 when the target cannot be written for now, "
        "or has no room.",
    )
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="the directory with the runs")
    parser.add_argument(
        "--target",
        type=place,
        required=True,
        metavar="DIR",
        help="where each run gets a directory, or s3://bucket/directory",
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
        "--leave-free", type=float, default=10, metavar="GB", help="space of a disk that is not used up (10)"
    )
    arguments = parser.parse_args(argv)
    for name in ("keep", "rate", "leave_free"):
        if not (value := getattr(arguments, name)) >= 0:
            raise ConfigError("at_least", name=name.replace("_", "-"), value=value, least=0)
    pace = Pace(arguments.rate * 1e6)
    target: Target
    if isinstance(arguments.target, Address):
        target = Runs(arguments.target, pace)
    else:
        target = Disk(arguments.target, arguments.leave_free * 1e9, pace)
    copier = Copier(target, arguments.keep, put)
    try:
        copier.copy_all(arguments.runs)
    except Later as reason:
        put(text("tried_again", reason=reason))
        return EXIT_TEMPORARY
    return EXIT_OK
