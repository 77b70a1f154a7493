"""docs/sentences.md: everything that the first look of site.yml can refuse with, made from the roles' problems.py.

This program writes the page again (make docs); test_roles.py sees where that has been forgotten.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/sentences.md"
SILENT = {"wheelhouse"}  # asked for a name: it says nothing
HEAD = """# What `site.yml` refuses with

Before it changes anything, `site.yml` looks at all nodes and prints one table of all that stands in its way: node,
role, what is wrong and what to do. These are the sentences that can stand there; `…` is a name or a figure of your
nodes. Of every role's variables it can also be that one is not what it has to be (a whole number, a list …). This page
is made from the roles (`make docs`).
"""
SHORTEST = 45  # characters; what is shorter is a part of a sentence, or no sentence


def sentences(source: str) -> list[str]:
    """The texts in a Python file that a person reads, in their order; … in the place of what is filled in."""
    tree = ast.parse(source)
    described = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and isinstance(node.body[0], ast.Expr)
    }
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant | ast.JoinedStr) or node in described:
            continue
        text = text_of(node)
        if len(text) >= SHORTEST and " " in text and (isinstance(node, ast.JoinedStr) or node not in parts):
            found.append((node.lineno, text))
    return [text for _, text in sorted(found)]


def text_of(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node.value, str) else ""


def filters_of(source: str) -> list[Path]:
    """The filters that a problems.py lets speak for itself: where `filter_loader.get("NAME")` is defined."""
    names = set(re.findall(r'filter_loader\.get\("(\w+)"\)', source)) - SILENT
    files = sorted(ROOT.glob("plugins/filter/*.py"))
    return [file for file in files if any(f'"{name}":' in file.read_text(encoding="utf-8") for name in names)]


def page() -> str:
    parts = [HEAD]
    for role in sorted(ROOT.glob("roles/*/problems.py")):
        source = role.read_text(encoding="utf-8")
        texts = sentences(source)
        for file in filters_of(source):
            texts += [
                text for text in sentences(file.read_text(encoding="utf-8")) if text.endswith((".", ":"))
            ]
        lines = [f"- {' '.join(text.split())}" for text in dict.fromkeys(texts)]
        parts.append("\n".join([f"## {role.parent.name}", "", *lines]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
