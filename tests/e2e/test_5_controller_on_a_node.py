"""A user with five PCs has no sixth: node0 is the controller itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from lab_cluster import ROOT, Cluster

SSH = [
    "ssh", "-o", f"UserKnownHostsFile={ROOT}/inventory/lab/state/known_hosts", "-o", "HostKeyAlias=node0",
    "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-i", f"{ROOT}/inventory/lab/state/id_ed25519",
    "ubuntu@198.18.50.20",
]  # fmt: skip


def on_node0(script: str, **kwargs) -> str:
    done = subprocess.run(
        [*SSH, script],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, f"{script}:\n{done.stdout[-5000:]}"
    return done.stdout


def test_site_and_launch_from_inside_node0(cluster: Cluster) -> None:
    cache = Path(
        os.environ.get("AURA_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "aura"
    ).expanduser()
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout  # fmt: skip
    on_node0("mkdir -p aura .cache/aura")
    # The repository as a clone has it, the keys of the cluster, and the wheels that are already here.
    send(["tar", "-C", str(ROOT), "-c", "--null", "-T", "-"], "tar -x -C aura", files)
    send(["tar", "-C", str(ROOT), "-c", "inventory/lab/state"], "tar -x -C aura")
    wheelhouses = [path.name for path in cache.glob("wheelhouse-*") if "." not in path.name]
    send(["tar", "-C", str(cache), "-c", *wheelhouses], "tar -x -C .cache/aura")

    on_node0("sudo apt-get -qq install -y make python3-venv rsync >/dev/null && cd aura && make controller")
    ansible = "cd aura && .venv/bin/ansible-playbook -i inventory/lab -e inventory_check_interface="
    site = on_node0(f"{ansible} site.yml")
    recap = [line for line in site.splitlines() if "changed=" in line]
    assert len(recap) >= 5
    assert all("changed=0" in line and "failed=0" in line for line in recap), site[-3000:]
    on_node0(f"{ansible} launch.yml -e preset=gpt2-nano -e run=from-node0 -e steps=3 -e wait=true")
    assert [done["step"] for done in cluster.done("from-node0")] == [3] * 5
    # Who reboots the node that it runs on does not see the end of it.
    booted = "systemctl show --property=InvocationID --value sysinit.target"
    before = on_node0(booted)
    assert "cannot reboot itself" in on_node0(f"{ansible} playbooks/reboot.yml --limit node0")
    assert on_node0(booted) == before


def send(pack: list[str], unpack: str, names: bytes = b"") -> None:
    packed = subprocess.Popen(pack, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert packed.stdin is not None
    unpacked = subprocess.Popen([*SSH, unpack], stdin=packed.stdout)
    packed.stdin.write(names)
    packed.stdin.close()
    assert unpacked.wait(300) == 0
    assert packed.wait(10) == 0
