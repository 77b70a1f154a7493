"""site.yml is killed at ten drawn moments; the run after that leaves what an undisturbed one leaves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_cluster import ROOT, lab
from one_node import NAME, ansible, bootstrap, inside, inventory_of_one, new_node

SEED = 7
MOMENTS = 10
NEVER = 1_000_000
# Copies of runs go to a directory of the node's own here: nobody shares one.
SETTINGS = "run_copies_enabled: true\nrun_copies_directory: /srv/aura/runs\n"
# What a node is, as far as site.yml has a say in it.
STATE = r"""
cd /
for path in etc/netplan etc/hosts etc/hostname etc/aura etc/aura-firewall.nft etc/chrony etc/ssh/sshd_config.d \
    etc/systemd/system etc/sudoers.d usr/local/lib/aura usr/local/sbin opt/aura/current; do
  [ -e $path ] && find $path \( -type f -o -type l -o -type d \) ! -name '*.dpkg-*' \
    -printf '%p %y %M %u %g %l ' \( -type f -exec sha256sum {} \; -o -printf '\n' \)
done | sed 's/  .*//' | sort
stat --format '%n %F %U %G %a' /var/lib/aura /var/lib/aura/*
getent passwd aura
dpkg-query --show --showformat '${Package}\n' | sort
nft -s list ruleset
sshd -T | sort
systemctl list-units --no-legend --plain --state=active --type=service,timer,socket |
  awk '{print $1, $3, $4}' | grep -v session | sort
systemctl list-unit-files --no-legend --state=enabled,masked | sort
ip -4 -o address show scope global | awk '{print $2, $4}'
"""
# Files that differ from one installation to the next without meaning anything.
OWN_WAYS = ("machine-id", "chrony.drift", "ssh_host_")


def state() -> list[str]:
    return [line for line in inside(STATE).splitlines() if not any(word in line for word in OWN_WAYS)]


def run_until(inventory: Path, tasks: int) -> int:
    """Run site.yml, and kill it with all it has started right behind that task's beginning; how many it began."""
    process = subprocess.Popen(
        ["ansible-playbook", "-i", str(inventory), "site.yml"], cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    seen: list[str] = []
    begun = 0
    for line in process.stdout:
        seen.append(line)
        begun += line.startswith(("TASK [", "RUNNING HANDLER ["))
        if begun == tasks:
            os.killpg(process.pid, signal.SIGKILL)
            break
    process.wait(60)
    process.stdout.close()
    assert begun == tasks or process.returncode == 0, "".join(seen)[-6000:]
    return begun


@pytest.fixture
def inventory(tmp_path: Path) -> Iterator[Path]:
    one = inventory_of_one(tmp_path / "one")
    settings = one / "group_vars/all/settings.yml"
    settings.write_text(settings.read_text() + SETTINGS)
    yield one
    lab("down", "--only", NAME)


@pytest.mark.more
@pytest.mark.timeout(2400)
def test_what_is_left_half_done_is_finished_by_the_next_run(inventory: Path) -> None:
    new_node(inventory)
    bootstrap(inventory)
    tasks = run_until(inventory, NEVER)
    undisturbed = state()

    new_node(inventory)
    bootstrap(inventory)
    drawn = random.Random(SEED)
    for _ in range(MOMENTS):
        moment = drawn.randint(1, tasks)
        print(f"killed at task {run_until(inventory, moment)} of {tasks}")
    ansible(inventory, "site.yml")
    assert "changed=0" in ansible(inventory, "site.yml").strip().splitlines()[-1]
    assert state() == undisturbed
