"""A clock that is months or minutes off is right when timesync has ended, and again whenever it is not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import VirtualCluster
from machines import Machine

pytestmark = [pytest.mark.more, pytest.mark.timeout(5400)]

PLAYBOOK = """
- name: One clock
  hosts: cluster
  gather_facts: false
  any_errors_fatal: true
  force_handlers: true
  tasks:
    - ansible.builtin.include_role: {name: timesync, tasks_from: set_clock}
    - ansible.builtin.include_role: {name: base, tasks_from: package_lists}
    - ansible.builtin.include_role: {name: timesync}
"""
NEAR = 10  # seconds: two questions to two emulated machines do not arrive at the same time


def ahead(machine: Machine) -> float:
    """Seconds by which a machine's clock is ahead of this computer's."""
    asked = time.time()
    said = float(machine.exec("date +%s.%N"))
    return said - (asked + time.time()) / 2


def test_a_clock_that_is_far_off_is_set(vm: Callable[..., Machine], tmp_path: Path) -> None:
    server, client = vm("server"), vm("server", number=1)
    cluster = VirtualCluster([server, client], tmp_path / "inventory")
    cluster.write(**{m.name: {"lan_address": m.address} for m in (server, client)})
    playbook = tmp_path / "clock.yml"
    playbook.write_text(PLAYBOOK)
    for machine in (server, client):
        machine.wait_ssh()
        machine.exec("systemctl disable --now systemd-timesyncd")
    cluster.bootstrap()

    # apt would take no list ("not valid yet"), so chrony would never come.
    client.exec("date --set '-60 days'")
    assert ahead(client) < -5_000_000
    said = " ".join(cluster.ansible(str(playbook)).split())
    assert re.search(rf"{client.name}: its clock is 518\d{{4}} s behind the controller's", said), said
    found = re.search(rf"{client.name}: (\S+) s from the clocks of the other nodes at most", said)
    assert found, said
    assert float(found[1]) <= 0.1
    assert abs(ahead(client) - ahead(server)) < NEAR
    again = cluster.ansible(str(playbook))
    assert all("changed=0" in line for line in again.splitlines() if "changed=" in line), again

    # Long after its start chrony sets no clock at once any more.
    client.exec("date --set '+3 minutes'")
    client.wait_inside("chronyc -n -c tracking | awk -F, '{ exit !($5 < -100 || $5 > 100) }'")
    mended = cluster.ansible(str(playbook))
    assert re.search(rf"^{client.name} .*changed=[1-9]", mended, re.MULTILINE), mended
    assert abs(ahead(client) - ahead(server)) < NEAR
