"""`aura monitor --cluster`: the load of every node, its GPUs and its ranks as one table."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aura.check.monitor import GIB
from aura.errors import ConfigError
from aura.texts import console

CONFIGURATION = Path("ansible.cfg")
ASK = (
    'echo "[$(timeout 20 /opt/aura/current/venv/bin/aura monitor --once --json 2>/dev/null || echo null),'
    " $(/opt/aura/rank-status || echo '[]'), $(date +%s)]\""
)
ROW = "{:8} {:26} {:>5} {:>15} {:>5} {:>6} {:>17}  {:6} {:9} {:>13} {:>8} {:>9} {:>9}"
STALE = 60  # seconds: a rank says something more often than that
ACTIVE = ("joining", "training", "saving")

Json = Mapping[str, Any]
# By node: [what `aura monitor --json` says (None without a trainer), what rank-status says, the node's clock in seconds
# since the epoch]; a sentence that says why of a node that was not read.
Nodes = Mapping[str, list[Any] | str]


def read(inventory: Path | None) -> Nodes:
    """Asks all nodes by Ansible. Raises ConfigError where Ansible does not get as far as that."""
    if not CONFIGURATION.is_file():
        raise ConfigError("no_repository", path=CONFIGURATION)
    command = ["ansible", "cluster", "--become", "--become-user", "aura"]
    command += ["--module-name", "ansible.builtin.shell", "--args", json.dumps({"cmd": ASK})]
    command += ["--inventory", str(inventory)] if inventory else []
    as_json = {"ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_LOAD_CALLBACK_PLUGINS": "true"}
    try:
        done = subprocess.run(
            command, env=os.environ | as_json, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )  # fmt: skip
        hosts = json.loads(done.stdout)["plays"][0]["tasks"][0]["hosts"]
    except FileNotFoundError as error:
        raise ConfigError("ansible_failed", said=error) from error
    except (ValueError, LookupError) as error:
        raise ConfigError("ansible_failed", said=(done.stderr.strip() or done.stdout)[-2000:]) from error
    return {name: read_one(hosts[name]) for name in sorted(hosts)}


def read_one(said: Json) -> list[Any] | str:
    """said: what Ansible says of one node."""
    if printed := said.get("stdout"):
        try:
            return list(json.loads(printed))
        except ValueError as error:  # something on the node prints more
            return f"{printed.strip()[:60]!r}: {error}"
    return (str(said.get("msg", "")).strip().splitlines() or [""])[-1]


def table(nodes: Nodes) -> list[str]:
    lines = [ROW.format(*console.text("cluster_columns").split(", "))]
    said: list[Json] = []
    for node, answer in nodes.items():
        if isinstance(answer, str):
            lines.append(f"{node:8} {console.text('node_not_read', reason=answer)}")
            continue
        load, ranks, now = answer
        said += [rank["status"] for rank in ranks]
        names = [node]
        for device, rank in with_ranks(load or {}, ranks):
            lines.append(device_line(names.pop() if names else "", device, rank, load or {}, now))
    validated = max((one for one in said if one.get("bits_per_byte_of_parts")), key=progress, default=None)
    if validated:
        parts = ", ".join(f"{part} {bits}" for part, bits in validated["bits_per_byte_of_parts"].items())
        lines.append(console.text("cluster_validation", bits=validated["bits_per_byte"], parts=parts))
    return lines + [one["setting"] for one in said if one.get("setting")][:1]


def progress(status: Json) -> int:
    return int(status.get("step", 0))


def with_ranks(load: Json, ranks: Sequence[Json]) -> list[tuple[Json, Json | None]]:
    """Every GPU with its rank, and the processor where a rank trains on it or nothing else is there.

    The number of a rank says nothing of its GPU's, which may drive a display and not train: UUIDs do. A GPU that the
    driver has lost has none, nor have the nodes of an older release.
    """
    processor = {
        "name": "CPU", "load_percent": load.get("cpu_percent"),
        "used_bytes": load.get("ram_used_bytes"), "total_bytes": load.get("ram_total_bytes"),
    }  # fmt: skip
    gpus = load.get("gpus") or []
    uuids = [gpu.get("uuid", "") if any("card" in rank for rank in ranks) else "" for gpu in gpus]
    known = {rank["card"]: rank for rank in ranks if rank.get("card") and rank["card"] in uuids}
    unsure = [rank for rank in ranks if rank.get("card") != "" and rank.get("card") not in known]
    lines: list[tuple[Json, Json | None]] = []
    nobody: list[Json | None] = [] if gpus else [None]
    for gpu, uuid in zip(gpus, uuids, strict=True):
        lines.append((gpu, known.get(uuid) if uuid else unsure.pop(0) if unsure else None))
    others = unsure + [rank for rank in ranks if rank.get("card") == ""]
    return lines + [(processor, rank) for rank in others or nobody]


def device_line(node: str, device: Json, rank: Json | None, load: Json, now: float) -> str:
    """node: empty where an earlier line has named it."""
    status: Json = rank["status"] if rank else {}
    links = sorted((load.get("links") or {}).values(), key=lambda link: (link["sent"], link["speed"]))
    memory = link = eta = "-"
    if device.get("used_bytes") is not None:
        memory = f"{device['used_bytes'] / GIB:.1f} / {device['total_bytes'] / GIB:.1f} GB"
    if links and node:
        link = f"{links[-1]['sent']:.0f}+{links[-1]['received']:.0f} / {links[-1]['speed']}"
    if status.get("eta") is not None:
        eta = f"{status['eta'] // 3600:.0f}:{status['eta'] % 3600 // 60:02.0f}"
    line = ROW.format(
        node,
        str(device.get("error") or device["name"])[:26],
        number(device.get("load_percent"), "{:.0f}%"),
        memory,
        number(device.get("temperature"), "{:.0f}"),
        number(device.get("power_watts"), "{:.0f}"),
        link,
        f"{rank['rank']}/{rank['world_size']}" if rank else "-/-",
        status.get("state") or "-",
        f"{status.get('step', '-')}/{status.get('max_steps', '-')}",
        number(status.get("loss"), "{:.4f}"),
        number(status.get("tokens_per_second"), "{:.0f}"),
        eta,
    )
    age = int(now - status.get("updated", now))
    if age > STALE and status.get("state") in ACTIVE:
        line += "  " + console.text("rank_stale", seconds=age)
    return line.rstrip()


def number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
