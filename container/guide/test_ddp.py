"""The guide's name for `aura check-allreduce`. (docs/guide-commands.md)"""

import sys

from aura.commands.cli import main

sys.exit(main(["check-allreduce", *sys.argv[1:]]))
