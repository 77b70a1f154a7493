"""node0 as the controller: the repository and its tools are put there, and playbooks run from inside."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from lab_cluster import LAB, ROOT, copy_repository

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
        self.run("mkdir -p aura .cache/aura")
        # The repository as a clone has it, the keys of the cluster, and the wheels that are already here.
        with tempfile.TemporaryDirectory() as clone:
            copy_repository(Path(clone))
            send(Path(clone), ["."], "aura")
        send(ROOT, ["inventory/lab/state"], "aura")
        wheelhouses = [path.name for path in cache.glob("wheelhouse-*") if "." not in path.name]
        send(cache, wheelhouses, ".cache/aura")
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
        return self.run(f"cd aura && .venv/bin/ansible-playbook {' '.join(words)}")


def send(folder: Path, names: list[str], to: str) -> None:
    pack = shlex.join(["tar", "-C", str(folder), "-c", *names])
    unpack = shlex.join([*map(str, INSIDE), f"tar -x -C {to}"])
    subprocess.run(["bash", "-o", "pipefail", "-c", f"{pack} | {unpack}"], check=True, timeout=300)
