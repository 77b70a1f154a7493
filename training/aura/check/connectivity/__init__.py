"""Judges what `aura probe` and `aura check-allreduce` found on the nodes: a line per check, a remedy per failure.

Runs on the controller, standard library only: `playbooks/connectivity.yml` gives `aura.commands.connectivity`, as JSON
on standard input, the raw results of its tasks (see `read_evidence`). `--json FILE` also writes the machine-readable
result:

    {"schema": 1, "status": "ok|warning|failed", "nodes": [...],
     "checks": [{"id", "status": "ok|warning|failed", "subject", "message", "remedy"}, ...],
     "bandwidth_mbit": {sender: {receiver: rate or null}}, "clock_offset_seconds": {node: seconds or null}}

Every id of `CHECKS` comes at least once, in that order: once with subject "all" where nothing is wrong, else once for
each node, pair or cable at fault.
"""
