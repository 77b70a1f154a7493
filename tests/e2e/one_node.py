"""One more virtual node beside the five, with an inventory of its own: it is its own rank 0."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from lab_cluster import ROOT, lab

NAME, FINAL, FIRST = "sixth", "198.18.50.30", "198.18.50.130"


def inventory_of_one(folder: Path) -> Path:
    """The lab's inventory with one more PC in place of the five: it is its own rank 0."""
    shutil.copytree(ROOT / "inventory/lab", folder, ignore=shutil.ignore_patterns("state"))
    (folder / "hosts.yml").write_text(
        f"cluster: {{hosts: {{{NAME}: {{lan_address: {FINAL}, first_address: {FIRST}}}}}}}\n"
    )
    settings = folder / "group_vars/all/settings.yml"
    settings.write_text(settings.read_text() + "lan_interface: enp3s0\n")
    return folder


def new_node(inventory: Path) -> None:
    """A bare node under the name that the last one had."""
    lab("down", "--only", NAME)
    lab("up", "--only", NAME, "--address", FIRST)
    shutil.rmtree(inventory / "state", ignore_errors=True)
    (inventory / "state").mkdir(mode=0o700)
    for name in ("password", "nameservers"):
        shutil.copy(ROOT / "inventory/lab/state" / name, inventory / "state")


def bootstrap(inventory: Path) -> None:
    password = inventory / "state/password"
    ansible(
        inventory,
        "playbooks/bootstrap.yml",
        f"--connection-password-file={password}",
        f"--become-password-file={password}",
    )


def inside(script: str, name: str = NAME) -> str:
    """What a script of bash says in there, as root."""
    return lab("exec", name, "bash", "-c", script)


def ansible(inventory: Path, playbook: str, *options: str) -> str:
    done = subprocess.run(
        ["ansible-playbook", "-i", str(inventory), playbook, *options], cwd=ROOT, text=True, timeout=1500,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{playbook}:\n{done.stdout[-6000:]}"
    return done.stdout
