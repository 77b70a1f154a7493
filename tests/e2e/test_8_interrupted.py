"""site.yml dies in the middle of a role, of each one in turn; the run after it leaves what an undisturbed one leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from lab_cluster import LAB, ROOT, Cluster

ROLES = (
    *("base", "safe_change", "static_network", "firewall", "node_name"),
    *("sshd", "time_sync", "python_env", "trainer", "tensorboard"),
)
# What a node is, as far as site.yml has a say in it.
STATE = r"""
cd /
for path in etc/netplan etc/hosts etc/hostname etc/aura etc/aura-firewall.nft etc/chrony etc/ssh/sshd_config.d etc/systemd/system \
    etc/sudoers.d usr/local/lib/aura usr/local/sbin opt/aura/current var/lib/aura-safe-change; do
  [ -e $path ] && find $path \( -type f -o -type l -o -type d \) ! -name '*.dpkg-*' \
    -printf '%p %y %M %u %g %l ' \( -type f -exec sha256sum {} \; -o -printf '\n' \)
done | sed 's/  .*//' | sort
stat --format '%n %F %U %G %a' /var/lib/aura /var/lib/aura/*
getent passwd aura
dpkg-query --show --showformat '${Package}\n' | sort
nft -s list ruleset
sshd -T | sort
systemctl list-units --no-legend --plain --state=active --type=service,timer,socket | awk '{print $1, $3, $4}' | grep -v session | sort
systemctl list-unit-files --no-legend --state=enabled,masked | sort
ip -4 -o address show scope global | awk '{print $2, $4}'
"""
# Files that differ from one installation to the next without meaning anything.
OWN_WAYS = ("machine-id", "chrony.drift", "ssh_host_")


def state(node: str) -> list[str]:
    done = subprocess.run([LAB, "exec", node, "bash", "-c", STATE], text=True, capture_output=True, timeout=120, check=True)
    return [line for line in done.stdout.splitlines() if not any(word in line for word in OWN_WAYS)]


def die_in(role: str, inventory: Path) -> bool:
    """Run site.yml and kill it when the role begins to change something; whether it came so far."""
    process = subprocess.Popen(
        ["ansible-playbook", "-i", str(inventory), "site.yml"], cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    forgets = f"TASK [{role} : What was seen before does not hold any more]"
    seen: list[str] = []
    began = killed = False
    for line in process.stdout:
        seen.append(line)
        # The task after the first one of what changes: it has been started, and will not be waited for.
        if began and line.startswith("TASK ["):
            os.killpg(process.pid, signal.SIGKILL)
            killed = True
            break
        began = began or line.startswith(forgets)
    process.wait(60)
    process.stdout.close()
    assert killed or process.returncode == 0, "".join(seen[-60:])
    return killed


@pytest.mark.more
@pytest.mark.timeout(1500)
def test_what_is_left_half_done_is_finished_by_the_next_run(cluster: Cluster, tmp_path: Path) -> None:
    """A sixth and a seventh PC: one goes through site.yml undisturbed, the other one dies in every role."""
    left, right = state_after(cluster, tmp_path, undisturbed=True), state_after(cluster, tmp_path, undisturbed=False)
    assert left == right
