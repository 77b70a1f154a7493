"""Which files belong to the project."""

import ast
import importlib.machinery
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
CACHES = ".import_linter_cache .mypy_cache .pytest_cache .ruff_cache __pycache__"
NOT_OURS = {".git", ".venv", ".ansible", *CACHES.split(), "state"}


def module(path: str) -> ModuleType:
    """A Python file of the repository as a module of its own, new at each call; path: "roles/firewall/problems.py"."""
    name = path.removesuffix(".py").replace("/", "_").replace("-", "_")
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / path))  # programs have no .py
    specification = importlib.util.spec_from_loader(name, loader)
    assert specification and specification.loader
    made = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(made)
    return made


def plugin(path: str) -> ModuleType:
    """A file below plugins/; path: "filter/lan_card", say."""
    return module(f"plugins/{path}.py")


@cache
def files() -> list[Path]:
    """Every file that git has or would take; without git, every file that no tool made."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listing.returncode == 0:
        names = [ROOT / name for name in listing.stdout.split("\0") if name]
        return sorted(path for path in names if path.is_file())
    found = []
    for folder, folders, names_here in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_OURS]
        found += [Path(folder) / name for name in names_here]
    return sorted(found)


def text_files() -> list[tuple[Path, str]]:
    """Every file of the project that is UTF-8 text, with its text."""
    result = []
    for path in files():
        with suppress(UnicodeDecodeError):
            result.append((path, path.read_text(encoding="utf-8")))
    return result


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of every function of a Python file, those inside others too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def roles() -> list[Path]:
    return sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())


def playbooks() -> list[Path]:
    return sorted((ROOT / "playbooks").glob("*.yml"))


def shell_scripts() -> list[Path]:
    """Everything that says in its first line that sh or bash runs it, and every *.sh."""
    found = []
    for path in files():
        first_line = path.open("rb").readline()
        interpreter = first_line.removeprefix(b"#!").split() if first_line.startswith(b"#!") else []
        if path.suffix == ".sh" or any(Path(word.decode()).name in {"sh", "bash"} for word in interpreter):
            found.append(path)
    return found
