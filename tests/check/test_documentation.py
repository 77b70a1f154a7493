"""The documentation points at things that exist, and names everything that one can run."""

import re
import unicodedata
from pathlib import Path

import pytest
import tree
import yaml

LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
FENCED = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The fragments that GitHub gives to the headings of a Markdown text."""
    found = set()
    for title in HEADING.findall(FENCED.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        kept = (letter for letter in plain if letter in " -_" or unicodedata.category(letter)[0] in "LNM")
        found.add("".join(kept).strip().replace(" ", "-"))
    return found


def markdown() -> list[Path]:
    return [path for path in tree.files() if path.suffix == ".md"]


def test_links_point_at_something() -> None:
    broken = []
    for path in markdown():
        for target in LINK.findall(INLINE_CODE.sub("", FENCED.sub("", path.read_text(encoding="utf-8")))):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, fragment = target.partition("#")
            aim = path.parent / name if name else path
            is_page = fragment and aim.suffix == ".md"
            if not aim.exists():
                broken.append(f"{tree.relative(path)}: there is no {target}")
            elif is_page and fragment not in anchors(aim.read_text(encoding="utf-8")):
                broken.append(f"{tree.relative(path)}: {name or 'this page'} has no heading for #{fragment}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("playbook", tree.playbooks(), ids=lambda path: path.stem)
def test_playbook_is_named_and_documented(playbook: Path) -> None:
    for number, play in enumerate(yaml.safe_load(playbook.read_text(encoding="utf-8")), start=1):
        assert play.get("name"), f"{tree.relative(playbook)}: play {number} has no name"
    if any(f"import_playbook: {playbook.name}\n" in other.read_text() for other in tree.playbooks()):
        return  # the first part of others, and nothing that one would type
    readme = (tree.ROOT / "README.md").read_text(encoding="utf-8")
    assert playbook.name in readme, f"README.md does not mention {tree.relative(playbook)}"


def test_make_targets_in_the_documentation_exist() -> None:
    makefile = (tree.ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE)
    for path in markdown():
        for name in re.findall(r"(?:`|^)make ([a-z0-9-]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            missing = f"{tree.relative(path)} speaks of `make {name}`, which the Makefile does not have"
            assert name in targets, missing
