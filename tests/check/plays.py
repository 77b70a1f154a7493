"""Plays that run on this machine, and what a play is told: Ansible's programs as a person starts them."""

import base64
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import tree
import yaml


def plays_of(name: str) -> list[dict[str, Any]]:
    """The plays of one of our playbooks, without those that it imports."""
    plays = yaml.safe_load((tree.ROOT / f"playbooks/{name}.yml").read_text())
    return [play for play in plays if "hosts" in play]


def playbook(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """ansible-playbook; stdout is all that it says. environment: more variables."""
    return subprocess.run(
        ["ansible-playbook", *words], cwd=tree.ROOT, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=240, check=False, env=os.environ | {"NO_COLOR": "1"} | environment,
    )  # fmt: skip


def played(
    place: Path, plays: list[dict[str, Any]], groups: dict[str, Any], *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """These plays on these hosts (as hosts.yml has them), both written into the folder `place`."""
    (place / "hosts.json").write_text(json.dumps(groups))
    (place / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
    return playbook("-i", place / "hosts.json", place / "play.yml", *words, **environment)


def role_with(place: Path, role: str, texts: dict[str, str]) -> Path:
    """The role's files of YAML in `place`/roles, with other texts in the place of some; that folder of roles."""
    for name in ("tasks", "meta", "defaults", "vars"):
        folder = place / "roles" / role / name
        folder.mkdir(parents=True, exist_ok=True)
        for path in (tree.ROOT / "roles" / role / name).glob("*.yml"):
            text = path.read_text()
            for theirs, ours in texts.items():
                text = text.replace(theirs, ours)
            (folder / path.name).write_text(text)
    return place / "roles"


def told(inventory: Path, host: str, *names: str, known: str = "{}") -> dict[str, Any]:
    """What these expressions are for a play on this host. known: what it knows beside the inventory, as JSON."""
    asked = ", ".join(f'"{name}": {name}' for name in names)
    said = subprocess.run(
        ["ansible", "-i", inventory, host, "-m", "ansible.builtin.debug", "-e", known,
         "-a", f"msg={{{{ {{{asked}}} | to_json | b64encode }}}}"],
        cwd=tree.ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = re.search(r"msg: (\S+)", said)
    assert found, said
    values: dict[str, Any] = json.loads(base64.b64decode(found[1]))
    return values
