"""`aura config`: print a complete training configuration, or what is wrong with it.

Standard library only: the playbooks ask it on a controller, before a node is touched.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from aura.commands.flags import parse_assignments
from aura.config import MANUAL, canonical, flags, preset_names, resolve
from aura.errors import Parser, in_words


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura config", description="Print a complete configuration as JSON, or what is wrong."
    )
    parser.add_argument(*flags("preset"), help="name of a preset")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="SETTING=VALUE", help="replace settings"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the presets")
    arguments = parser.parse_args(argv)
    if arguments.list:
        print("\n".join([*preset_names(), MANUAL]))
        return 0
    overrides = canonical(parse_assignments(arguments.set))
    if not arguments.preset and "preset" not in overrides:
        parser.error(in_words("preset_missing", names=", ".join([*preset_names(), MANUAL])))
    config = resolve(arguments.preset, overrides)
    print(json.dumps(asdict(config), indent=2))
    return 0
