"""What stands in the way of all roles on all nodes, as a table."""

from __future__ import annotations

import textwrap

WIDTH = 120


def preflight_table(found: dict[str, list[dict[str, str]]]) -> str:
    """found: by node, what the action preflight has found: role and sentence. Empty where nothing stands in the way.

    What is the same on several nodes is one line of the table. Where other nodes could go on, its end says how.
    """
    nodes: dict[tuple[str, str], list[str]] = {}
    for node, problems in found.items():
        for problem in problems:
            nodes.setdefault((problem["role"], problem["sentence"]), []).append(node)
    rows = [(", ".join(where), role, sentence) for (role, sentence), where in nodes.items()]
    if not rows:
        return ""
    first, second = (max(len(row[column]) for row in [("node", "role", ""), *rows]) for column in (0, 1))
    indent = first + second + 4
    lines = [f"{'node':<{first}}  {'role':<{second}}  what is wrong, and what to do"]
    for where, role, sentence in rows:
        wrapped = textwrap.wrap(
            sentence, max(40, WIDTH - indent), break_long_words=False, break_on_hyphens=False
        )
        lines.append(f"{where:<{first}}  {role:<{second}}  {wrapped[0]}")
        lines += [" " * indent + line for line in wrapped[1:]]
    wrong = [node for node in found if found[node]]
    if len(wrong) < len(found):
        lines.append(f"To go on without {' and '.join(wrong)}: --limit '{':!'.join(['cluster', *wrong])}'")
    return "\n".join(lines)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"preflight_table": preflight_table}
