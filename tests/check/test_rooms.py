"""The trainer's rooms stay small: lint-imports holds their order, this holds their size."""

from pathlib import Path

import tree

PACKAGE = tree.ROOT / "training/aura"
MOST_MODULES = 10  # directly in the package
MOST_LINES = 400  # of a module
MOST_LINES_OF_A_FUNCTION = 60
OF_SHORT_FUNCTIONS = ("run", "strategy")


def modules(folder: Path) -> list[Path]:
    return [path for path in tree.files() if path.suffix == ".py" and path.is_relative_to(folder)]


def test_few_modules_lie_outside_the_rooms() -> None:
    outside = [path.name for path in modules(PACKAGE) if path.parent == PACKAGE]
    assert len(outside) <= MOST_MODULES, f"put one of {sorted(outside)} into a room (docs/architecture.md)"


def test_no_module_is_long() -> None:
    long = {
        tree.relative(path): lines
        for path in modules(PACKAGE)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
    }
    assert not long, f"divide these modules, {MOST_LINES} lines are the limit: {long}"


def test_no_function_of_the_loop_is_long() -> None:
    found = [
        (f"{tree.relative(path)}: {name}", lines)
        for room in OF_SHORT_FUNCTIONS
        for path in modules(PACKAGE / room)
        for name, lines in tree.functions(path)
    ]
    assert len(found) > 50
    long = {name: lines for name, lines in found if lines > MOST_LINES_OF_A_FUNCTION}
    assert not long, f"divide these functions, {MOST_LINES_OF_A_FUNCTION} lines are the limit: {long}"
