"""site.yml dies in the middle of each role in turn; the run after that leaves what an undisturbed one leaves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_cluster import ROOT, lab
from one_node import NAME, ansible, bootstrap, inside, inventory_of_one, new_node

# Not among them: packages (changes nothing where it is alone), what goes through rollback (see its scenario), and what
# asks for a graphics card or a kernel of its own (nvidia_driver, nfs).
ROLES = (
    *("base", "network", "hostname"),
    *("timesync", "python_env", "trainer", "tensorboard", "run_copies"),
)
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


def die_in(role: str, inventory: Path) -> bool:
    """Run site.yml and kill it when the role has begun to change something; whether it came so far."""
    process = subprocess.Popen(
        ["ansible-playbook", "-i", str(inventory), "site.yml"], cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    forgets = f"TASK [{role} : What was seen before does not hold any more]"
    seen: list[str] = []
    begun = 0
    for line in process.stdout:
        seen.append(line)
        begun += line.startswith(forgets) or (begun > 0 and line.startswith("TASK ["))
        if begun == 2:  # the first task that changes something has been sent
            os.killpg(process.pid, signal.SIGKILL)
            break
    process.wait(60)
    process.stdout.close()
    assert begun == 2 or process.returncode == 0, "".join(seen)[-6000:]
    return begun == 2


@pytest.fixture
def inventory(tmp_path: Path) -> Iterator[Path]:
    one = inventory_of_one(tmp_path / "one")
    settings = one / "group_vars/all/settings.yml"
    settings.write_text(settings.read_text() + SETTINGS)
    yield one
    lab("down", "--only", NAME)


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_what_is_left_half_done_is_finished_by_the_next_run(inventory: Path) -> None:
    new_node(inventory)
    bootstrap(inventory)
    ansible(inventory, "site.yml")
    undisturbed = state()

    new_node(inventory)
    bootstrap(inventory)
    # bootstrap has done hostname's work.
    inside("hostnamectl set-hostname somebody")
    died_in = [role for role in ROLES if die_in(role, inventory)]
    assert died_in == list(ROLES)
    ansible(inventory, "site.yml")
    assert "changed=0" in ansible(inventory, "site.yml").strip().splitlines()[-1]
    assert state() == undisturbed
