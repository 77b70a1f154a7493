"""PCs with a desktop become nodes: NetworkManager keeps its card, and they survive what happens to PCs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import VirtualCluster
from machines import Machine

pytestmark = [pytest.mark.more, pytest.mark.timeout(5400)]


def nothing_changed(output: str) -> bool:
    recap = [line for line in output.splitlines() if "changed=" in line and "ok=" in line]
    return bool(recap) and all("changed=0" in line and "failed=0" in line for line in recap)


def of_network_manager(machine: Machine) -> list[str]:
    """The cards that NetworkManager holds, with what they run."""
    said = machine.exec("nmcli --terse --fields DEVICE,TYPE,STATE,CONNECTION device")
    return [line for line in said.splitlines() if ":ethernet:connected:" in line]


def test_three_desktops_become_nodes_and_stay_so(vm: Callable[..., Machine], tmp_path: Path) -> None:
    machines = [vm("desktop", number=number) for number in range(3)]
    for machine in machines:
        # What makes it a desktop: without this the test proves nothing.
        machine.wait_inside("nmcli --terse --fields TYPE,STATE device | grep -q ethernet:connected")
        machine.wait_ssh()
    cluster = VirtualCluster(machines, tmp_path)
    cluster.write()
    cluster.bootstrap()
    cluster.site()
    assert nothing_changed(cluster.site())

    for machine in machines:
        machine.reboot(wait=False)
    for machine in machines:
        machine.wait_ssh(cluster.final(machine))
        assert machine.addresses() == [cluster.final(machine)]
        assert any("netplan-0-aura" in line for line in of_network_manager(machine))
        tables = machine.exec("nft list tables")
        assert "inet aura" in tables
    assert nothing_changed(cluster.site())

    # A card in a slot that is counted first takes the name away from the LAN's card.
    changed = machines[2]
    card = of_network_manager(changed)[0].partition(":")[0]
    changed.add_card()
    changed.wait_ssh(cluster.final(changed))
    assert changed.addresses() == [cluster.final(changed)]
    # It finds its peers by the way that leads to them, and they find it: no rule knows the card's name.
    listen = "import socket; s = socket.create_server(('', 12355)); [s.accept() for _ in range(9)]"
    changed.exec(f'systemd-run --quiet --unit=rendezvous python3 -c "{listen}"')
    changed.wait_inside("ss -Htln 'sport = 12355' | grep -q .")
    knock = f"import socket; socket.create_connection(('{cluster.final(changed)}', 12355), 10)"
    machines[0].exec(f'python3 -c "{knock}"')
    assert not re.search(
        rf"^{card}:ethernet:connected:netplan-0-aura$", "\n".join(of_network_manager(changed)), re.M
    )


def test_an_active_ufw_is_refused_with_the_way_out(vm: Callable[..., Machine], tmp_path: Path) -> None:
    machine = vm("desktop", ufw=True)
    machine.wait_ssh()
    cluster = VirtualCluster([machine], tmp_path)
    cluster.write()
    cluster.bootstrap()
    output = " ".join(cluster.site(expect=1).split())
    assert "ufw is active" in output
    assert "sudo ufw disable" in output
    machine.exec("ufw disable")
    cluster.site()
    assert nothing_changed(cluster.site())


def test_the_home_card_of_a_pc_with_two_is_left_alone(vm: Callable[..., Machine], tmp_path: Path) -> None:
    """The LAN is the switch that has no router; the card at home keeps its lease and the way out."""
    machine = vm("desktop", cards=2)
    machine.wait_ssh()
    home = machine.exec("ip -o route show default | awk '{print $5; exit}'").strip()
    cards = machine.exec("ls /sys/class/net").split()
    switch = next(card for card in cards if card not in ("lo", home))
    before = machine.exec(f"ip -4 -o address show dev {home} | awk '{{print $4}}'; ip route show default")
    cluster = VirtualCluster([machine], tmp_path)
    switched: dict[str, object] = {
        "lan_address": "198.18.70.40",
        "lan_gateway": "",
        "lan_nameservers": [],
        "admin_networks": ["198.18.50.0/28", "198.18.70.0/28"],
    }
    cluster.write(**{machine.name: switched})
    cluster.bootstrap()
    # Both have a link, and only the owner knows.
    unsaid = " ".join(cluster.site(expect=1).split())
    assert "lan_interface" in unsaid
    assert home in unsaid
    assert switch in unsaid
    cluster.write(**{machine.name: switched | {"lan_interface": switch}})
    cluster.site()
    assert (
        machine.exec(f"ip -4 -o address show dev {home} | awk '{{print $4}}'; ip route show default")
        == before
    )
    assert "198.18.70.40/24" in machine.exec(f"ip -4 -o address show dev {switch}")
