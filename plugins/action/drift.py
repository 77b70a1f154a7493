"""Runs site.yml in check mode and says for each node whether it still is as site.yml would make it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.action import ActionBase

SCHEMA = 1
# What the person said about the connection goes on to the run inside: option -> key of the command line's arguments.
FORWARDED = {
    "--inventory": "inventory",
    "--extra-vars": "extra_vars",
    "--limit": "subset",
    "--user": "remote_user",
    "--private-key": "private_key_file",
    "--connection-password-file": "connection_password_file",
    "--become-password-file": "become_password_file",
}
Json = dict[str, Any]


class ActionModule(ActionBase):
    """`look: PLAYBOOK, nodes: [NAME, …], json: FILE` looks; the answer is the report (docs/operations.md), with `text`.
    `verdict: NODE` (an entry of the report) has failed when the node differs, and is unreachable when it is not known.
    """

    _VALID_ARGS = frozenset(("look", "nodes", "json", "verdict"))
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments = self._task.args
        if "verdict" in arguments:
            return verdict(arguments["verdict"])
        began = time.time()
        found, problem = {"roles": [], "nodes": {}}, some_only(task_vars or {})
        if not problem:
            secrets = self._loader._vault.secrets if self._loader else []
            found, problem = look(arguments["look"], secrets or [])
        report = judged(found, list(arguments["nodes"]), problem)
        report |= {
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "seconds": round(time.time() - began, 1),
        }
        if arguments.get("json"):
            write(Path(arguments["json"]).expanduser(), report)
        return {"changed": False, **report, "text": text(report)}


def some_only(variables: Json) -> str:
    """The sentence that refuses --tags and --skip-tags: of some roles nothing follows about a node."""
    if list(variables["ansible_run_tags"]) == ["all"] and not variables["ansible_skip_tags"]:
        return ""
    return (
        "drift.yml looks at all that site.yml makes: leave out --tags and --skip-tags. For one role: ansible-playbook "
        "site.yml --check --diff --tags …"
    )


def write(path: Path, report: Json) -> None:
    """A diff may hold a secret (a Wi-Fi's password stands in netplan's files): nobody else reads it."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def options(arguments: Json) -> list[str]:
    """The options of the command that was typed, for another command."""
    words = []
    for option, key in FORWARDED.items():
        value = arguments.get(key)
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [f"{option}={one}"] if one else []
    return words


def look(playbook: str, secrets: Sequence[tuple[str, Any]]) -> tuple[Json, str]:
    """What the callback drift_report wrote down, and why there is nothing to read if so. secrets: the vault's, by their
    ids, typed ones too; nobody can type them again."""
    with tempfile.TemporaryDirectory() as folder:
        vault = []
        for number, (name, secret) in enumerate(secrets):
            file = Path(folder, f".vault-{number}")
            file.touch(mode=0o600)
            file.write_bytes(secret.bytes)
            vault.append(f"--vault-id={name}@{file}")
        path = Path(folder, ".report.json")
        copy = each_for_itself(Path(playbook), Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", "ansible", "playbook", copy, "--check", "--diff",
             *options(dict(context.CLIARGS or {})), *vault, "--extra-vars=site_for_drift=true"],
            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            env=os.environ | {"ANSIBLE_STDOUT_CALLBACK": "drift_report", "AURA_DRIFT_REPORT": str(path)},
        )  # fmt: skip
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8")), ""
        return {"roles": [], "nodes": {}}, " ".join(done.stdout.split())[-600:] or "the check said nothing"


def each_for_itself(playbook: Path, folder: Path) -> str:
    """The playbook, but one node that fails does not end it for the others. (any_errors_fatal takes no template.)"""
    for beside in playbook.parent.iterdir():
        if beside != playbook:
            (folder / beside.name).symlink_to(beside)
    copy = folder / playbook.name
    copy.write_text(
        playbook.read_text(encoding="utf-8").replace("any_errors_fatal: true", "any_errors_fatal: false")
    )
    return str(copy)


def judged(found: Json, nodes: list[str], problem: str) -> Json:
    """The report, from what was written down about the nodes that were asked."""
    # A sentence about the inventory is said once, by the first node.
    said = problem or next((node["message"] for node in found["nodes"].values() if node["message"]), "")
    judged_nodes = {name: judged_node(found["nodes"].get(name), found["roles"], said) for name in nodes}
    states = {node["state"] for node in judged_nodes.values()}
    state = "unknown" if "unknown" in states else "differs" if "differs" in states else "same"
    return {"schema": SCHEMA, "state": state, "nodes": judged_nodes}


def judged_node(node: Json | None, roles: list[str], said: str) -> Json:
    if node is None:
        node = {"differences": [], "message": said, "seen": [], "upgrades": [], "reboot_required": False}
    left_out = [role for role in roles if role not in node["seen"]]
    by_hand = any(difference["by"] == "hand" for difference in node["differences"])
    unknown = node["message"] or (left_out and not by_hand)
    return {
        "state": "unknown" if unknown else "differs" if node["differences"] else "same",
        "message": (node["message"] or said or "the check ended early") if unknown else "",
        "differences": node["differences"],
        "not_looked_at": left_out,
        "waiting": [one for one in node["upgrades"] if one["together"]],
        "reboot_required": node["reboot_required"],
    }


def verdict(node: Json) -> Json:
    if node["state"] == "unknown":
        return {"unreachable": True, "changed": False, "msg": node["message"]}
    if node["state"] == "differs":
        return {"failed": True, "changed": False, "msg": f"{counted(node)}; see the report above."}
    return {"changed": False}


def counted(node: Json) -> str:
    number = len(node["differences"])
    return f"differs in {number} place{'s' if number != 1 else ''}"


def text(report: Json) -> str:
    """The report for people."""
    width = max(map(len, report["nodes"]), default=0)
    lines = []
    for name, node in report["nodes"].items():
        words = {
            "same": "as it should be",
            "unknown": f"not known: {node['message']}",
            "differs": counted(node),
        }
        lines.append(f"{name:<{width}}  {words[node['state']]}")
        lines += [" " * (width + 4) + line for line in node_lines(node)]
    return "\n".join([*lines, *remedies(report)]) + "\n"


def node_lines(node: Json) -> list[str]:
    lines = []
    for difference in node["differences"]:
        if difference["by"] == "hand":
            lines.append(f"{difference['role']}: {difference['details'][0]}")
            continue
        item = f" ({difference['item']})" if difference["item"] else ""
        details = "; ".join(difference["details"])
        lines.append(f"{difference['role']}: {difference['task']}{item}{': ' + details if details else ''}")
    if node["state"] == "differs" and node["not_looked_at"]:
        lines.append(f"not looked at because of that: {', '.join(node['not_looked_at'])}")
    for one in node["waiting"]:
        why = f"{' (security)' if one['security'] else ''}{' (held)' if one['held'] else ''}"
        lines.append(f"waits: {one['package']} {one['installed'] or '(new)'} → {one['candidate']}{why}")
    if node["reboot_required"]:
        lines.append("waits: a reboot, for what is installed already")
    return lines


def remedies(report: Json) -> list[str]:
    nodes = report["nodes"].values()
    ways = {difference["by"] for node in nodes for difference in node["differences"]}
    lines = ["→ ansible-playbook site.yml puts right what differs."] if "site.yml" in ways else []
    lines += (
        ["→ What a sentence asks for is done by hand, then: ansible-playbook site.yml"]
        if "hand" in ways
        else []
    )
    if any(not one["held"] for node in nodes for one in node["waiting"]):
        lines.append("→ What waits is no difference: ansible-playbook playbooks/upgrade.yml")
    elif any(node["reboot_required"] for node in nodes):
        lines.append("→ What waits is no difference: ansible-playbook playbooks/reboot.yml")
    return lines
