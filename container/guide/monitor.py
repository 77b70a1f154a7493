"""The guide's name for `aura monitor`. (docs/guide-commands.md)"""

import sys

from aura.commands.cli import main

sys.exit(main(["monitor", *sys.argv[1:]]))
