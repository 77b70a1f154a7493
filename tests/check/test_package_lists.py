"""A package list that cannot be fetched is named, by the file that asks for it, and stops nothing: with apt itself."""

import hashlib
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
import tree

pytestmark = pytest.mark.skipif(not Path("/usr/bin/apt-get").exists(), reason="this machine has no apt")
SETTINGS = """
Dir::Etc::sourcelist "{0}/sources.list";
Dir::Etc::sourceparts "{0}/sources.list.d";
Dir::State::lists "{0}/lists";
Dir::Cache "{0}/cache";
APT::Sandbox::User "root";
APT::Architecture "amd64";
Dir::Etc::main "/dev/null";
Dir::Etc::parts "{0}/none";
"""


@pytest.fixture
def apt(tmp_path: Path) -> Iterator[Path]:
    """A folder with settings of apt, and a repository in it that can be had."""
    for folder in (
        "sources.list.d",
        "lists/partial",
        "cache/archives/partial",
        "repo/dists/stable/main/binary-amd64",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "apt.conf").write_text(SETTINGS.format(tmp_path))
    (tmp_path / "repo/dists/stable/main/binary-amd64/Packages").touch()
    (tmp_path / "sources.list").write_text(
        f"deb [signed-by={tmp_path}/key.asc] file:{tmp_path}/repo stable main\n"
    )
    new_key(tmp_path)
    release(tmp_path)
    yield tmp_path


def gpg(place: Path, *words: str) -> str:
    home = place / "keys"
    home.mkdir(mode=0o700, exist_ok=True)
    options = ["--batch", "--yes", "--passphrase=", "--pinentry-mode=loopback"]
    command = ["gpg", f"--homedir={home}", *options, *words]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout


def new_key(place: Path, *words: str) -> None:
    """The repository's key from now on. words: more options of gpg."""
    gpg(place, *words, "--quick-generate-key", "archive", "ed25519", "sign", "1d")
    (place / "key.asc").write_text(gpg(place, "--armor", "--export"))


def release(place: Path, *words: str, days: int = 0) -> None:
    """A new version of the repository, made so many days from now. words: more options of gpg."""
    made = datetime.now(UTC) + timedelta(days=days)
    lines = [
        "Suite: stable", "Codename: stable", "Architectures: amd64", "Components: main",
        f"Date: {format_datetime(made, usegmt=True)}",
        "SHA256:", f" {hashlib.sha256().hexdigest()} 0 main/binary-amd64/Packages", "",
    ]  # fmt: skip
    stable = place / "repo/dists/stable"
    (stable / "Release").write_text("\n".join(lines))
    gpg(place, *words, f"--output={stable}/InRelease", "--clear-sign", f"{stable}/Release")


def refresh(place: Path, age: str = "1 day") -> list[str]:
    """What it says, with the folder left out."""
    program = str(tree.ROOT / "roles/base/files/refresh-package-lists")
    environment = os.environ | {"APT_CONFIG": str(place / "apt.conf")}
    done = subprocess.run(
        [program, age], env=environment, text=True, capture_output=True, check=True, timeout=60
    )
    return done.stdout.replace(f"{place}/", "").splitlines()


def test_the_file_of_a_list_that_cannot_be_fetched_is_named_and_the_others_come(apt: Path) -> None:
    parts = apt / "sources.list.d"
    (parts / "closed.list").write_text("deb http://127.0.0.1:9/ubuntu jammy main\n")
    (parts / "medium.list").write_text("deb file:/cdrom jammy main\n")
    (parts / "ppa.sources").write_text(
        "Types: deb\nURIs: http://nowhere.invalid/ppa/\nSuites: jammy\nComponents: main\n"
    )
    said = refresh(apt)
    assert [line.partition(": ")[0] for line in said] == [
        f"sources.list.d/{name}" for name in ("medium.list", "closed.list", "ppa.sources")
    ], said
    assert "Could not resolve 'nowhere.invalid'" in said[2]
    assert list((apt / "lists").glob("*Release")), "the one that can be had has come"
    assert refresh(apt) == [], "what is younger than a day is not fetched again"
    assert len(refresh(apt, "0 days")) == 3


def test_lists_of_the_future_and_from_before_a_clock_was_set_are_fetched_again(apt: Path) -> None:
    release(apt, days=3)
    (said,) = refresh(apt)
    assert said.startswith("sources.list: ")
    assert "not valid yet" in said
    release(apt)
    assert refresh(apt) == []
    (apt / "sources.list.d/medium.list").write_text("deb file:/cdrom jammy main\n")
    ahead = datetime.now(UTC).timestamp() + 86400
    os.utime(apt / "lists", (ahead, ahead))
    assert len(refresh(apt)) == 1


def test_the_file_of_a_list_whose_key_has_expired_is_named(apt: Path) -> None:
    # The agent holds a socket in there, and would be asked once more.
    subprocess.run(["gpgconf", f"--homedir={apt}/keys", "--kill", "gpg-agent"], check=True)
    # rm, not rmtree: the agent takes its sockets away itself meanwhile.
    subprocess.run(["rm", "-rf", apt / "keys"], check=True)
    before = "--faked-system-time=20200101T000000"
    new_key(apt, before)
    release(apt, before)
    (said,) = refresh(apt)
    assert said.startswith("sources.list: ")
    assert "EXPKEYSIG" in said


def test_a_file_that_apt_does_not_understand_is_named(apt: Path) -> None:
    (apt / "sources.list.d/mistyped.list").write_text("deb http://[x main\n")
    assert "Malformed entry 1 in list file sources.list.d/mistyped.list" in refresh(apt)[0]
