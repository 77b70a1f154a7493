"""Nothing in the tree belongs to one machine: no registry host, no path, no address in a lock file."""

import configparser
import json
import os
import re
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import tree
import yaml

# The top of an ordinary file system: a checkout below one of these says nothing about this machine.
ORDINARY = set("bin boot dev etc home lib media mnt opt proc root run sbin srv sys tmp usr var".split())


def package_sources() -> Iterator[str]:
    """Every address or folder that this machine's package managers are told to use."""
    apt = Path("/etc/apt")
    for path in [apt / "sources.list", *apt.glob("sources.list.d/*")]:
        if path.is_file():
            yield from re.findall(
                r"^(?:deb(?:-src)?\s.*?|URIs:.*?)(\w+://\S+)", path.read_text(), re.MULTILINE
            )
    places = ["index-url", "extra-index-url", "find-links"]
    pip_files = [Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf"]
    for path in [*pip_files, Path(os.environ.get("PIP_CONFIG_FILE", "/nonexistent"))]:
        config = configparser.RawConfigParser()
        if path.is_file() and config.read(path):
            for section in config.sections():
                for place in places:
                    yield from config.get(section, place, fallback="").split()
    for path in [Path("/etc/uv/uv.toml"), Path.home() / ".config/uv/uv.toml"]:
        if path.is_file():
            yield from re.findall(r"\w+://[^\s\"']+", str(tomllib.loads(path.read_text())))
    for path in [Path("/etc/npmrc"), Path.home() / ".npmrc"]:
        if path.is_file():
            yield from re.findall(r"^(?:@\S+:)?registry\s*=\s*(\S+)", path.read_text(), re.MULTILINE)
    for name, value in os.environ.items():
        if re.fullmatch(r"(PIP|UV)_\w*(INDEX|FIND_LINKS)\w*|npm_config_registry", name, re.IGNORECASE):
            yield from value.split()


def registry_hosts() -> set[str]:
    hosts = {urlsplit(source).hostname for source in package_sources()}
    return {host for host in hosts if host and "." in host}


def machine_paths() -> set[str]:
    # root's home is on every machine, what the tools keep in it is not.
    home = Path.home()
    paths = {str(tree.ROOT), str(home) if len(home.parts) > 2 else f"{home}/."}
    # Where this checkout lies, unless that is a place that every machine has.
    if tree.ROOT.parts[1] not in ORDINARY:
        paths.add("/" + tree.ROOT.parts[1])
    for source in package_sources():
        path = urlsplit(source).path if source.startswith("file:") else source
        if path.startswith("/"):
            paths.add(path.rstrip("/"))
    return paths - {"/", ""}


def mentions(words: set[str], pattern: str) -> list[str]:
    """Where one of the words stands in the tree: file:line."""
    if not words:
        return []
    anyone = re.compile(pattern % "|".join(re.escape(word) for word in sorted(words)))
    return [
        f"{tree.relative(path)}:{number}: {line.strip()[:120]}"
        for path, text in tree.text_files()
        for number, line in enumerate(text.splitlines(), start=1)
        if anyone.search(line)
    ]


def test_no_registry_host() -> None:
    found = mentions(registry_hosts(), r"(?<![\w.-])(?:%s)(?![\w-])")
    assert not found, (
        "These lines name a host from this machine's package sources. Leave the choice of the registry to the "
        "machine's own configuration:\n" + "\n".join(found)
    )


def test_no_path_of_this_machine() -> None:
    found = mentions(machine_paths(), r"(?<![\w./}$~\"-])(?:%s)(?![\w-])")
    assert not found, (
        "These lines name a path that exists on this machine only. Say it relative to the repository, to ~ or to "
        "a variable:\n" + "\n".join(found)
    )


def test_lock_files_hold_names_and_hashes_only() -> None:
    line_of_a_lock = re.compile(r"[\w.\[\]-]+==\S+( ; .*)?( \\)?|    --hash=sha256:[0-9a-f]{64}( \\)?")
    for path in (tree.ROOT / "requirements").glob("*.txt"):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert line_of_a_lock.fullmatch(line), (
                f"{tree.relative(path)}:{number}: {line!r} is neither a pinned package nor a hash: run `make lock`"
            )


def test_lock_files_agree() -> None:
    pins: dict[str, tuple[str, str]] = {}
    for path in sorted((tree.ROOT / "requirements").glob("*.txt")):
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE):
            first_path, first = pins.setdefault(name, (path.name, version))
            assert version == first, (
                f"{name} is {first} in {first_path} and {version} in {path.name}: run `make lock`"
            )


def test_collections_are_the_ones_of_the_locked_ansible() -> None:
    """requirements.yml is for people who use Galaxy; everybody else gets the same versions from `ansible`."""
    wanted = yaml.safe_load((tree.ROOT / "requirements.yml").read_text())["collections"]
    packages = Path(sysconfig.get_path("purelib")) / "ansible_collections"
    for collection in wanted:
        manifest = packages / collection["name"].replace(".", "/") / "MANIFEST.json"
        installed = json.loads(manifest.read_text())["collection_info"]["version"]
        assert collection.get("version") == installed, (
            f"requirements.yml wants {collection['name']} {collection.get('version')}, the locked ansible package "
            f"has {installed}: write that version into requirements.yml"
        )


def test_the_lab_and_the_tests_of_the_roles_have_the_same_settings() -> None:
    settings = "group_vars/all/settings.yml"
    assert (tree.ROOT / "tests/roles/inventory" / settings).read_text() == (
        tree.ROOT / "inventory/lab" / settings
    ).read_text(), f"cp inventory/lab/{settings} tests/roles/inventory/{settings}"


def test_there_are_no_links() -> None:
    assert [tree.relative(path) for path in tree.files() if path.is_symlink()] == []
