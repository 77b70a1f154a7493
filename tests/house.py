"""`make house`: lines by room and what else tells a small house from a large one, with BASE=REV beside a revision's."""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "check"))
import tree

ROOT = tree.ROOT
SECONDS = ROOT / "bench-results/test-seconds.json"  # tests/all writes it
PROVISIONING = ("roles", "plugins", "playbooks")
Figures = dict[str, int | str]


def room_of(path: Path) -> str:
    first, *others = path.parts
    if path.suffix == ".txt" and "requirements" in str(path):
        return "lock files"
    if first in PROVISIONING:
        return f"{first}, molecule and READMEs" if {"molecule", "README.md"} & set(others) else first
    if first == "tests":
        return f"tests/{others[0] if len(others) > 1 else '*'}"
    if path.is_relative_to("training/aura"):
        return f"training/aura/{others[1] if len(others) > 2 else '*'}"
    return first if first in ("training", "benchmarks", "docs") else "everything else"


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))


def circle(files: list[Path], folder: Path) -> str:
    """One, if there is any, among the modules below a folder; imports for types alone and inside functions count."""
    below = [path for path in files if path.is_relative_to(folder)]
    modules = {".".join(path.relative_to(folder).with_suffix("").parts): path for path in below}
    try:
        TopologicalSorter({name: set(imported(modules[name])) & modules.keys() for name in modules}).prepare()
    except CycleError as error:
        return " → ".join(error.args[1])
    return "none"


def figures(root: Path, files: list[Path]) -> Figures:
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix not in {".svg", ".png"}}
    rooms: Counter[str] = Counter()
    for path, text in texts.items():
        rooms[room_of(path.relative_to(root))] += text.count("\n")
    found: Figures = dict(sorted(rooms.items()))
    found["roles, plugins, playbooks together"] = sum(rooms[room] for room in PROVISIONING)
    of_tests = sum(count for room, count in rooms.items() if room.startswith("tests/"))
    found |= {"tests together": of_tests, "all together": rooms.total()}
    of_vars = "".join(text for path, text in texts.items() if path.match("roles/*/vars/*"))
    found |= {"roles/*/vars": of_vars.count("\n"), "{% in roles/*/vars": of_vars.count("{%")}
    python = [path for path in files if path.suffix == ".py"]
    of_files = [(texts[path].count("\n"), str(path.relative_to(root))) for path in python]
    of_functions = [
        (lines, f"{path.name}: {name}") for path in python for name, lines in tree.functions(path)
    ]
    for kind, ranking in ("files", of_files), ("functions", of_functions):
        found[f"longest {kind}"] = "\n".join(f"{count} {name}" for count, name in sorted(ranking)[:-4:-1])
    return found | {f"a circle in {name}": circle(python, root / name) for name in ("training", "benchmarks")}


def figures_of(revision: str) -> Figures:
    archive = subprocess.run(["git", "-C", ROOT, "archive", revision], stdout=subprocess.PIPE, check=False)
    if archive.returncode:
        sys.exit(f"git knows no revision {revision!r}.")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        files = [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
        return figures(Path(folder), files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", metavar="REV", help="a revision to put beside it")
    base = parser.parse_args().base
    names = subprocess.check_output(["git", "-C", ROOT, "ls-files", "-z"], text=True).split("\0")
    tracked = [path for name in names if (path := ROOT / name).is_file() and not path.is_symlink()]
    now = figures(ROOT, tracked)
    if SECONDS.exists():
        now |= {f"make {part}": f"{seconds} s" for part, seconds in json.loads(SECONDS.read_text()).items()}
    columns = {base: figures_of(base), "now": now} if base else {"now": now}
    table = Table("lines, and what else is counted", *columns, *(["more"] if base else []))
    for name in dict.fromkeys(name for column in reversed(columns.values()) for name in column):
        values = [column.get(name, type(now.get(name, 0))()) for column in columns.values()]
        cells = [f"{value:,}" if isinstance(value, int) else value for value in values]
        more = f"{values[-1] - values[0]:+,}" if all(isinstance(value, int) for value in values) else ""
        table.add_row(name, *cells, *([more] if base else []))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main()
