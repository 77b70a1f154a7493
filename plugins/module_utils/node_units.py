"""systemd units of a node: whether they run, and with the files that lie on the disk."""

from __future__ import annotations

import os
import time

from ansible.module_utils.node_packages import said

PROPERTIES = (
    *("LoadState", "ActiveState", "UnitFileState", "NeedDaemonReload"),
    *("ActiveEnterTimestampMonotonic", "FragmentPath", "DropInPaths"),
)


def units(names: list[str], now: float) -> dict[str, dict[str, object]]:
    if not names:
        return {}
    blocks = said("systemctl", "show", f"--property={','.join(PROPERTIES)}", "--", *names).split("\n\n")
    # systemctl answers in the order of the question.
    return {name: unit(block, now) for name, block in zip(names, blocks + [""] * len(names), strict=False)}


def unit(block: str, now: float) -> dict[str, object]:
    says = dict(line.partition("=")[::2] for line in block.strip().splitlines())
    state = says.get("ActiveState", "inactive")
    active = state in ("active", "reloading")
    since_boot = int(says.get("ActiveEnterTimestampMonotonic") or 0) / 1e6
    started = now - time.clock_gettime(time.CLOCK_MONOTONIC) + since_boot if active and since_boot else 0.0
    own = [says.get("FragmentPath", ""), *says.get("DropInPaths", "").split()]
    changed = [os.stat(path).st_mtime for path in own if path and os.path.exists(path)]
    return {
        "exists": says.get("LoadState", "not-found") not in ("not-found", ""),
        "active": active,
        "state": state,
        "enabled": says.get("UnitFileState") == "enabled",
        "enabled_state": says.get("UnitFileState", ""),
        "reload": says.get("NeedDaemonReload") == "yes",
        "started": started,
        # A time to come says nothing (the clock was set since).
        "stale": bool(started) and any(started < moment <= now for moment in changed),
    }
