"""node0 as the controller: the repository and its tools are put there, and playbooks run from inside."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from lab_cluster import LAB, ROOT

AS_ROOT = [LAB, "exec", "node0", "env", "LC_ALL=C.UTF-8", "bash", "-c"]
INSIDE = [
    *(LAB, "exec", "node0", "runuser", "-u", "ubuntu", "--"),
    *("env", "-C", "/home/ubuntu", "HOME=/home/ubuntu", "LC_ALL=C.UTF-8", "bash", "-c"),
]


class ControllerNode:
    """What a person who sits at node0 can do."""

    def __init__(self) -> None:
        cache = Path(
            os.environ.get("AURA_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "aura"
        ).expanduser()
        files = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True,
        ).stdout  # fmt: skip
        self.run("mkdir -p aura .cache/aura")
        # The repository as a clone has it, the keys of the cluster, and the wheels that are already here.
        send(["tar", "-C", str(ROOT), "-c", "--null", "-T", "-"], "tar -x -C aura", files)
        send(["tar", "-C", str(ROOT), "-c", "inventory/lab/state"], "tar -x -C aura")
        wheelhouses = [path.name for path in cache.glob("wheelhouse-*") if "." not in path.name]
        send(["tar", "-C", str(cache), "-c", *wheelhouses], "tar -x -C .cache/aura")
        # As root: a bare node's sudo asks for a password. It has no package lists yet, and apt is busy after a boot.
        apt = "apt-get -qq -o DPkg::Lock::Timeout=300"
        self.run(f"{apt} update && {apt} install -y make python3-venv rsync sshpass >/dev/null", AS_ROOT)
        self.run("cd aura && make controller")

    def run(self, script: str, words: list[str | Path] = INSIDE) -> str:
        """Run a script there as its user, past the network, which may change meanwhile; its output."""
        done = subprocess.run(
            [*words, script],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            timeout=1800, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}:\n{done.stdout[-6000:]}"
        return done.stdout

    def ansible(self, playbook: str, *options: str, inventory: str = "inventory/lab") -> str:
        words = ["-i", inventory, "-e", "inventory_check_interface=", playbook, *options]
        # Ansible's own recap is what the tests read.
        program = "ANSIBLE_STDOUT_CALLBACK=default .venv/bin/ansible-playbook"
        return self.run(f"cd aura && {program} {' '.join(words)}")


def send(pack: list[str], unpack: str, names: bytes = b"") -> None:
    packed = subprocess.Popen(pack, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert packed.stdin is not None
    unpacked = subprocess.Popen([*INSIDE, unpack], stdin=packed.stdout)
    packed.stdin.write(names)
    packed.stdin.close()
    assert unpacked.wait(300) == 0
    assert packed.wait(10) == 0
