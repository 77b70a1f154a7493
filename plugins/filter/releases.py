"""What a release of the trainer is called (after what is in it), and whether nodes can go back to the one before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

Seen = dict[str, Any]
LINKS = ("current", "previous")


def text_of(path: str | Path) -> str:
    return Path(path).read_text(encoding="utf-8").rstrip()


def release_name(content: str, requirements: str, script: str, environment: str) -> str:
    """TRAINER-BUILD-WHEELHOUSE. Ranks with the same first word train the same way: it stands for the trainer (content),
    the locked packages and torch's version. The build of torch and the interpreter may differ from node to node.
    """
    torch = text_of(Path(requirements).with_name("torch.in"))
    text = f"trainer-{content}{text_of(requirements)}{torch}{text_of(script)}"
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{environment}"


def rollback_problem(nodes: dict[str, Seen]) -> str:
    """Why these nodes (by name, as node_state sees them) cannot go back to the release before, all the same way."""
    ways: dict[str, list[str]] = {}
    for name, seen in nodes.items():
        current, previous = (
            seen["files"][f"/opt/aura/{link}"]["target"].rpartition("/")[2] for link in LINKS
        )
        if seen["files"]["/opt/aura/previous/complete"]["kind"] != "file" or previous in ("", current):
            return (
                f"{name} has no previous release to go back to: it has had {current or 'none'} only. No node was "
                "changed. To install what an older checkout of this repository has: ansible-playbook site.yml there."
            )
        # The first word: nodes with other cards have other builds of the same trainer.
        ways.setdefault(f"{current.partition('-')[0]} to {previous.partition('-')[0]}", []).append(name)
    if len(ways) > 1:
        which = "; ".join(f"{way} ({', '.join(names)})" for way, names in ways.items())
        return (
            f"The nodes have not had the same releases: {which}. No node was changed. Where the last rollback.yml "
            "broke off, go back on those that it did not reach (--limit NODE,…); else bring all of them to one release "
            "first (ansible-playbook site.yml)."
        )
    return ""


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"release_name": release_name, "rollback_problem": rollback_problem}
