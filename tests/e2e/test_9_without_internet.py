"""Five bare nodes and a controller that no way leads out from: one bundle, and a loss that falls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab_cluster import LAB, NODES, ROOT, copy_repository

pytestmark = [pytest.mark.more, pytest.mark.timeout(3600)]

LAPTOP = "aura-laptop"
ADDRESS = "198.18.50.9/24"
STATE = "inventory/lab/state"


def run(*words: str | Path, cwd: Path = ROOT, limit: float = 900, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, timeout=limit, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, words))}:\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What somebody with internet has made, with what make demo has downloaded already.

    AURA_BUNDLE=FILE takes one that was made before: for work on these tests.
    """
    if "AURA_BUNDLE" in os.environ:
        return Path(os.environ["AURA_BUNDLE"])
    file = tmp_path_factory.mktemp("stick") / "aura-bundle.tar"
    print(run("make", "bundle", f"FILE={file}").splitlines()[-5:])
    return file


@dataclass
class Laptop:
    """A controller on the lab's switch, with a clone of this repository, an empty cache and no route to anywhere."""

    home: Path
    control: Path

    def run(self, *words: str | Path, code: int = 0) -> str:
        environment = {
            "HOME": str(self.home), "LANG": "C.UTF-8",
            "PATH": f"{self.home}/aura/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.control), "ANSIBLE_HOME": str(self.home / ".ansible"),
        }  # fmt: skip
        done = subprocess.run(
            ["ip", "netns", "exec", LAPTOP, *map(str, words)], cwd=self.home / "aura", text=True, env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1500, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{' '.join(map(str, words))}:\n{done.stdout[-6000:]}"
        return done.stdout

    def ansible(self, playbook: str, *options: str, code: int = 0) -> str:
        # The lab's bridge is not here, but at the other end of the cable.
        here = ["-i", "inventory/lab", "-e", "inventory_check_interface=eth0"]
        return self.run("ansible-playbook", *here, playbook, *options, code=code)


@pytest.fixture(scope="module")
def laptop(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    run(LAB, "down")
    run(LAB, "up", "--no-internet")
    home = tmp_path_factory.mktemp("laptop")
    control = Path(tempfile.mkdtemp(prefix="aura-", dir="/tmp"))  # the path of a socket has to be short
    copy_repository(home / "aura")
    shutil.copytree(ROOT / STATE, home / "aura" / STATE)
    try:
        run("ip", "netns", "add", LAPTOP)
        run("ip", "link", "add", LAPTOP, "type", "veth", "peer", "name", "eth0", "netns", LAPTOP)
        run("ip", "link", "set", LAPTOP, "master", "auralab0", "up")
        run("ip", "-n", LAPTOP, "address", "add", ADDRESS, "dev", "eth0")
        run("ip", "-n", LAPTOP, "link", "set", "lo", "up")
        run("ip", "-n", LAPTOP, "link", "set", "eth0", "up")
        yield Laptop(home, control)
    finally:
        # An SSH connection that is still open keeps the namespace, and with it the cable.
        subprocess.run(["ip", "link", "delete", LAPTOP], check=False)
        subprocess.run(["ip", "netns", "delete", LAPTOP], check=False)
        run(LAB, "down")
        shutil.rmtree(control)


def test_the_controller_is_set_up_from_the_bundle(laptop: Laptop, bundle: Path) -> None:
    assert "Ready" in laptop.run("make", "controller", f"BUNDLE={bundle}")
    laptop.ansible(
        "playbooks/bootstrap.yml",
        f"--connection-password-file={STATE}/password",
        f"--become-password-file={STATE}/password",
    )


def test_half_a_bundle_is_refused_before_any_node_is_changed(
    laptop: Laptop, bundle: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half.tar"
    with bundle.open("rb") as whole, half.open("wb") as part:
        part.write(whole.read(bundle.stat().st_size // 2))
    # In another cache: what was once opened whole is not read again.
    said = laptop.ansible("site.yml", "-e", f"bundle={half}", "-e", f"cluster_cache={tmp_path}/cache", code=2)
    assert "copy it again. Nothing has been changed" in " ".join(said.split())
    assert all("changed=0" in line for line in said.splitlines() if "changed=" in line)


def test_a_bundle_for_other_wheels_is_refused_before_any_node_is_changed(
    laptop: Laptop, bundle: Path, tmp_path: Path
) -> None:
    other = tmp_path / "requirements"
    shutil.copytree(ROOT / "requirements", other)
    with (other / "node.txt").open("a") as lock:
        lock.write("# another one\n")
    said = laptop.ansible(
        "site.yml", "-e", f"bundle={bundle}", "-e", f"python_env_requirements={other}/node.txt", code=2
    )
    assert "needs the wheels for torch's build cpu as these playbooks lock them" in " ".join(said.split())
    assert all("changed=0" in line for line in said.splitlines() if "changed=" in line)


def test_five_nodes_become_a_cluster_and_learn(laptop: Laptop, bundle: Path) -> None:
    text = run(ROOT / "tests/lab/spanish-docs").splitlines()[-1]  # text is brought along, too
    laptop.ansible("site.yml", "-e", f"bundle={bundle}")
    again = laptop.ansible("site.yml")
    recap = [line for line in again.splitlines() if "changed=" in line]
    assert len(recap) == 5
    assert all("changed=0" in line for line in recap), again[-3000:]
    laptop.ansible("playbooks/prepare.yml", "-e", f"text={text}", "-e", "preset=gpt2-nano")
    laptop.ansible("launch.yml", "-e", "preset=gpt2-nano", "-e", "steps=100", "-e", "wait=true")
    done = [
        json.loads(run(LAB, "exec", node, "cat", "/var/lib/aura/runs/gpt2-nano/done.json")) for node in NODES
    ]
    assert done[0]["validation_loss"] < done[0]["first_validation_loss"] - 1
    assert len({result["parameters_checksum"] for result in done}) == 1
    assert json.loads(run(LAB, "status", "--json"))["downloaded"] == 0
