"""reset.yml leaves a node as site.yml found it, but for what it says that stays; and site.yml works on it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_cluster import lab
from one_node import FIRST, NAME, ansible, bootstrap, inside, inventory_of_one, new_node

pytestmark = [pytest.mark.more, pytest.mark.timeout(5400)]

# What a node is, as far as the roles change it. Packages stay, and what they bring.
STATE = r"""
cd /
for path in etc/netplan etc/hosts etc/hostname etc/ssh/sshd_config.d etc/sudoers.d etc/aura etc/aura-firewall.nft \
    var/lib/aura usr/local/lib/aura var/lib/aura-rollback usr/local/sbin etc/cloud etc/systemd/journald.conf.d; do
  [ -e $path ] && find $path \( -type f -o -type l -o -type d \) -printf '%p %y %M %u %g %l ' \
    \( -type f -exec sha256sum {} \; -o -printf '\n' \)
done | sed 's/  .*//' | sort
find opt/aura -maxdepth 2 -printf '%p %y %M %u %g %l\n' | sort  # a release has thousands of files
ls -d var/lib/aura-notify var/lib/aura-watch 2>/dev/null  # what is in there changes by itself
hostname
find etc/systemd/system -name '*aura*' -o -lname /dev/null | sort
getent passwd aura aura-admin
ls -d var/lib/aura-admin 2>/dev/null
nft list ruleset 2>/dev/null
sshd -T | sort
ip -4 -o address show scope global | awk '{print $2, $4}'
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Iterator[Path]:
    folder = inventory_of_one(tmp_path / "one")
    # Roles that this node would not have by itself; nobody listens at this address.
    settings = folder / "group_vars/all/settings.yml"
    more = "gpu_watch_enabled: true\nwebhooks: [{webhook_url: 'http://localhost:9', webhook_type: json}]\n"
    settings.write_text(settings.read_text() + more)
    yield folder
    lab("down", "--only", NAME)


def test_a_node_is_as_before_and_can_be_made_again(inventory: Path) -> None:
    new_node(inventory)
    before = inside(STATE)
    bootstrap(inventory)
    ansible(inventory, "site.yml")
    made = inside(STATE)
    assert FIRST not in made
    assert "aura-watch.service" in made
    assert "aura-notify.service" in made

    # Without yes it only talks.
    said = ansible(inventory, "playbooks/reset.yml")
    assert "The name and /etc/hosts are as they were" in said
    assert "-e yes=true" in said
    assert inside(STATE) == made

    # What an interrupted run has left would come back behind the reset, which waits for it.
    inside("aura-rollback arm 5 true /etc/mine; touch /etc/mine")

    ansible(inventory, "playbooks/reset.yml", "-e", "yes=true")
    assert inside(STATE) == before

    bootstrap(inventory)
    ansible(inventory, "site.yml")
    assert inside(STATE) == made
    assert "changed=0" in ansible(inventory, "site.yml", "--check")

    # What is the user's stays, and what somebody has edited is not lost.
    inside(
        "install -d -o aura -g aura /var/lib/aura/runs/mine && echo weights >/var/lib/aura/runs/mine/checkpoint"
    )
    inside("mount --bind /var/lib/aura /var/lib/aura")  # as a disk of its own
    inside("mkdir -p /etc/docker && echo '{}' >/etc/docker/daemon.json")  # docker_enabled is false
    inside("echo '198.18.50.77 printer' >>/etc/hosts")
    said = ansible(inventory, "playbooks/reset.yml", "-e", "yes=true")
    assert inside("cat /var/lib/aura/runs/mine/checkpoint; getent passwd aura").startswith("weights\naura:")
    assert inside("cat /etc/docker/daemon.json") == "{}\n"
    assert "printer" in inside("cat /var/backups/aura/edited/etc/hosts")
    bootstrap(inventory)
    ansible(inventory, "site.yml")
