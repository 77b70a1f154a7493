"""Whether the firewall that a node has is the one that it shall have. Its rules carry a mark: the sum of their text."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from ansible.plugins.loader import filter_loader


def firewall_marked(rules: str) -> str:
    """The rules with the sum of their own text in place of @mark@."""
    return rules.replace("@mark@", hashlib.sha256(rules.replace("@mark@", "").encode()).hexdigest())


def firewall_difference(seen: dict[str, Any], files: list[dict[str, str]]) -> str:
    """What is not as it should be, in words; empty when nothing has to be done.

    seen: what node_state has seen. files: as safe_change takes them, the rules first.
    """
    unit = seen["units"]["aura-firewall.service"]
    # Visitors come and go.
    listed = re.sub(r"(?s)(\tset visitors \{[^}]*?)\n\t\telements = \{[^}]*\}", r"\1", seen["table"])
    as_it_shall_be = filter_loader.get("as_it_shall_be").j2_function
    if not all(as_it_shall_be(file, seen["files"][file["path"]]) for file in files):
        return "the rules, or the unit that loads them, are others"
    if not seen["table"]:
        return "the rules are not loaded"
    if f'comment "{seen["table_comment"]}"' not in files[0]["content"]:
        return "other rules are loaded"
    if hashlib.sha256(listed.encode()).hexdigest() != seen["texts"]["/run/aura-firewall.loaded"].strip():
        return "somebody has changed the loaded rules"
    if not unit["active"] or unit["reload"]:
        return "the unit that loads the rules does not run"
    return ""


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"firewall_difference": firewall_difference, "firewall_marked": firewall_marked}
