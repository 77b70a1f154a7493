"""What starts a rank in a container: which options Docker gets, what is passed on, and what a dead engine leaves.

A program stands in for Docker's client; the real one is in tests/e2e/test_9_in_containers.py.
"""

import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tree

TOOL = tree.ROOT / "roles/trainer/files/rank-container"
# Writes down what it was asked; `run` says a word to its notify socket and waits for its signal, as a rank does.
CLIENT = """#!{python}
import os, pathlib, signal, socket, sys, time
place = pathlib.Path("{place}")
with (place / "asked").open("a") as asked:
    print(*sys.argv[1:], sep="\\n", end="\\n\\n", file=asked)
if sys.argv[1] == "info":
    print((place / ("runtimes" if "Runtimes" in sys.argv[2] else "cdi")).read_text())
if sys.argv[1] == "container":
    sys.exit(1)  # there is none of this name
if sys.argv[1] == "kill":
    if not (place / "pid").exists():
        sys.exit(1)
    os.kill(int((place / "pid").read_text()), getattr(signal, sys.argv[2].removeprefix("--signal=")))
if sys.argv[1] == "run":
    (place / "pid").write_text(str(os.getpid()))
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        for word in (b"MAINPID=1", b"WATCHDOG_USEC=120000000", b"WATCHDOG=1"):
            notify.sendto(word, os.environ["NOTIFY_SOCKET"])
    until = time.monotonic() + 20
    while not told and time.monotonic() < until:
        time.sleep(0.05)
    sys.exit(65 if told else 1)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    client = tmp_path / "bin/docker"
    client.parent.mkdir()
    client.write_text(CLIENT.format(python=sys.executable, place=tmp_path))
    client.chmod(0o755)
    (tmp_path / "own").mkdir()
    (tmp_path / "runtimes").write_text('{"runc": {}}')
    (tmp_path / "cdi").write_text("null")
    return tmp_path


def started(place: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(TOOL), *words],
        env={
            "PATH": f"{place}/bin:{os.environ['PATH']}", "RUNTIME_DIRECTORY": f"{place}/own", "LOCAL_RANK": "1",
            "RANK": "3", "RANK_USER": getpass.getuser(), "GLOO_SOCKET_IFNAME": "lo", "AURA_IMAGE": "sha256:0f1e",
            "CUDA_VISIBLE_DEVICES": "-1", "SECRET": "1",
            "AURA_TRAIN_ARGUMENTS": "--preset gpt2 --run-dir '/var/lib/aura/runs/a b'",
        } | variables,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its code, and what it has said of errors."""
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


def wait_for(reached: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.05)


def asked(place: Path, word: str) -> list[str]:
    """The words of the last call of Docker that began with this one."""
    if not (place / "asked").exists():
        return []
    calls = [call.splitlines() for call in (place / "asked").read_text().split("\n\n") if call]
    return next((call for call in reversed(calls) if call[0] == word), [])


def test_signals_go_in_and_the_watchdog_comes_out(place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(place / "systemd"))
        systemd.settimeout(20)
        process = started(place, NOTIFY_SOCKET=str(place / "systemd"))
        # Not MAINPID: a rank may not choose whom systemd watches.
        assert [systemd.recv(100) for _ in range(2)] == [b"WATCHDOG_USEC=120000000", b"WATCHDOG=1"]
        process.terminate()
        # The rank's own code, with which systemd decides whether to start it again.
        assert ended(process) == (65, "")
    words = asked(place, "run")
    image = words.index("sha256:0f1e")
    assert words[image + 1 :] == ["aura", "train", "--preset", "gpt2", "--run-dir", "/var/lib/aura/runs/a b"]
    walls = "--cap-drop=ALL --read-only --network=host --security-opt=no-new-privileges --name=aura-train-1"
    assert set(walls.split()) <= set(words[:image])
    assert {"--env=RANK", "--env=LOCAL_RANK", "--env=GLOO_SOCKET_IFNAME", "--env=NOTIFY_SOCKET"} <= set(words)
    assert "--env=SECRET" not in words
    assert not [word for word in words if "gpu" in word or "nvidia" in word]


def test_a_rank_with_cards_gets_them(place: Path) -> None:
    (place / "runtimes").write_text('{"runc": {}, "nvidia": {"path": "nvidia-container-runtime"}}')
    process = started(place, CUDA_VISIBLE_DEVICES="GPU-1a2b,GPU-3c4d")
    wait_for((place / "pid").exists)
    process.terminate()
    ended(process)
    words = {"--runtime=nvidia", "--env=NVIDIA_VISIBLE_DEVICES=all", "--env=CUDA_VISIBLE_DEVICES"}
    assert words <= set(asked(place, "run"))


def test_nothing_in_the_ranks_home_says_what_it_does(place: Path) -> None:
    """The rank may write there, and this program is root."""
    packages = place / f"home/.local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    packages.mkdir(parents=True)
    (packages / "evil.pth").write_text(f"import pathlib; pathlib.Path('{place}/evil').touch()\n")
    client = place / "bin/docker"
    names = ("HOME", "DOCKER_CONFIG", "DOCKER_HOST")
    shown = f"print(*(f'{{name}}={{os.environ.get(name)}}' for name in {names}), file=sys.stderr)"
    client.write_text(client.read_text() + f"\n{shown}\nsys.exit(1)\n")
    home = f"{place}/home"
    process = started(place, HOME=home, DOCKER_CONFIG=f"{home}/.docker", DOCKER_HOST="tcp://192.0.2.1")
    _, errors = ended(process)
    assert "HOME=/ DOCKER_CONFIG=/nonexistent DOCKER_HOST=unix:///run/docker.sock" in errors
    assert not (place / "evil").exists()


@pytest.mark.parametrize("container", ["/", "", "aura", "0" * 63, "0" * 64 + "/"])
def test_only_the_name_of_a_container_names_what_is_killed(place: Path, container: str) -> None:
    """--end is root: a rank that writes something else into its file may not have it kill others."""
    (place / "own/container").write_text(container)
    assert ended(started(place, "--end")) == (0, "")
    assert asked(place, "rm") == ["rm", "--force", "aura-train-1"]
