"""Two PCs talk through WireGuard, and a neighbour who takes the address of one that is off gets no answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from clusters import VirtualCluster
from machines import Machine, wait_for

pytestmark = [pytest.mark.more, pytest.mark.timeout(5400)]

PLAIN, OVERLAY = "plain", "overlay"  # snapshots: after site.yml without an overlay and with one
SHARE = "/srv/aura"
PORTS = (2049, 12355)  # NFS, and the rendezvous
SERVE = """
import socket
server = socket.create_server(("", 12355))
while True:
    server.accept()[0].close()
"""
KNOCK = """
import socket, sys
source, target, *ports = sys.argv[1:]
for port in ports:
    try:
        socket.create_connection((target, int(port)), 4, source_address=(source, 0)).close()
        print(port)
    except OSError:
        pass
"""
# What comes from the other member's address in the LAN, but for the time.
WATCH = """
table inet watch {{
    chain arrives {{
        type filter hook prerouting priority raw; policy accept;
        ip saddr {address} udp dport 123 return
        ip saddr {address} udp dport 51820 counter comment "overlay"
        ip saddr {address} udp dport != 51820 counter comment "else"
        ip saddr {address} meta l4proto != udp counter comment "else"
    }}
}}
"""


@dataclass
class Members:
    """Two nodes, and a PC of somebody else at the same switch."""

    server: Machine
    other: Machine
    neighbour: Machine
    cluster: VirtualCluster

    def settings(self, overlay: bool) -> None:
        own = {"shared_directory": SHARE, "run_copies_leave_free": 1, "overlay": overlay}
        self.cluster.write(**{machine.name: own for machine in (self.server, self.other)})

    def lan(self, machine: Machine) -> str:
        return self.cluster.final(machine)

    def inside(self, machine: Machine) -> str:
        return f"10.201.0.{self.lan(machine).rpartition('.')[2]}"

    def go_back(self, snapshot: str) -> None:
        for machine in (self.server, self.other):
            machine.restore(snapshot)
            machine.wait_ssh(self.lan(machine))
        self.settings(overlay=snapshot == OVERLAY)

    def keep(self, snapshot: str) -> None:
        for machine in (self.server, self.other):
            machine.exec("sync")
            machine.snapshot(snapshot)

    def attack(self) -> set[int]:
        """The ports of the server that answer the neighbour, once it has the address of the member that is off."""
        taken = self.lan(self.other)
        self.other.power_off()
        card = self.neighbour.exec("ip -o route show default | awk '{print $5; exit}'").strip()
        self.neighbour.exec(f"ip address replace {taken}/24 dev {card}")
        self.neighbour.exec(f"arping -c 1 -A -I {card} {taken}", check=False)
        # As if it were in the overlay, too.
        self.neighbour.exec(f"ip address replace {self.inside(self.other)}/32 dev {card}")
        self.neighbour.exec(f"ip route replace {self.inside(self.server)} via {self.lan(self.server)}")
        return knock(self.neighbour, taken, self.lan(self.server)) | knock(
            self.neighbour, self.inside(self.other), self.inside(self.server)
        )


def knock(machine: Machine, source: str, target: str) -> set[int]:
    words = ["python3", "-c", KNOCK, source, target, *map(str, PORTS)]
    return {int(port) for port in machine.exec(shlex.join(words)).split()}


def serve(machine: Machine) -> None:
    machine.exec(f"systemd-run --quiet --unit=rendezvous python3 -c {shlex.quote(SERVE)}")
    machine.wait_inside("ss -Htln 'sport = 12355' | grep -q .")


@pytest.fixture(scope="module")
def provisioned(vm: Callable[..., Machine], tmp_path_factory: pytest.TempPathFactory) -> Members:
    server, other, neighbour = (vm(number=number) for number in range(3))
    cluster = VirtualCluster([server, other], tmp_path_factory.mktemp("overlay"))
    members = Members(server, other, neighbour, cluster)
    for machine in (server, other, neighbour):
        machine.wait_ssh()
    members.settings(overlay=False)
    cluster.bootstrap()
    cluster.site()
    serve(server)
    members.keep(PLAIN)
    members.settings(overlay=True)
    cluster.site()
    members.keep(OVERLAY)
    return members


@pytest.fixture
def members(provisioned: Members) -> Members:
    provisioned.neighbour.restore()
    provisioned.neighbour.wait_ssh()
    return provisioned


def test_without_an_overlay_who_has_a_members_address_is_that_member(members: Members) -> None:
    members.go_back(PLAIN)
    assert members.attack() == set(PORTS)


def test_with_an_overlay_the_members_address_opens_nothing(members: Members) -> None:
    members.go_back(OVERLAY)
    assert members.attack() == set()
    # Nor while the overlay is down on the one that is asked.
    members.server.exec("systemctl stop wg-quick@aura0")
    assert members.attack() == set()


def test_all_that_members_say_goes_through_it(members: Members) -> None:
    members.go_back(OVERLAY)
    server, other = members.server, members.other
    assert not re.search("changed=[1-9]", members.cluster.site())
    assert server.exec("stat --format '%U %a' /etc/wireguard/aura0.key").strip() == "root 600"
    key = server.exec("cat /etc/wireguard/aura0.key").strip()
    kept = [path for path in members.cluster.inventory.rglob("*") if path.is_file()]
    assert any(path.name == f"{server.name}.pub" for path in kept)
    assert not any(key.encode() in path.read_bytes() for path in kept)

    watch = WATCH.format(address=members.lan(other))
    server.exec(f"nft -f - <<'END'\n{watch}\nEND")
    assert f"{members.inside(server)} {server.name}" in other.exec("cat /etc/hosts")
    other.exec(f"ping -c 2 -W 5 {server.name}")
    assert knock(other, members.inside(other), members.inside(server)) == set(PORTS)
    wait_for(
        "the directory is mounted",
        lambda: other.exec("systemctl start aura-shared-directory; cat /proc/self/mountinfo").count(
            f"{members.inside(server)}:{SHARE}"
        ),
    )
    written = f"dd if=/dev/zero of={SHARE}/written bs=1M count=4 conv=fsync"
    other.exec(f"runuser -u aura -- sh -c {shlex.quote(written)}")
    counted = dict.fromkeys(("overlay", "else"), 0)
    for size, what in re.findall(r'bytes (\d+) comment "(\w+)"', server.exec("nft list table inet watch")):
        counted[what] += int(size)
    assert counted["else"] == 0
    assert counted["overlay"] > 4 << 20


def test_it_is_up_after_a_reboot_and_mended_where_it_was_broken(members: Members) -> None:
    members.go_back(OVERLAY)
    server, other = members.server, members.other
    server.reboot()
    server.wait_ssh(members.lan(server))
    other.wait_inside(f"ping -c 1 -W 2 {members.inside(server)}")
    server.exec("ip link delete aura0")
    assert re.search("changed=[1-9]", members.cluster.overlay("--check"))
    members.cluster.overlay()
    other.exec(f"ping -c 1 -W 5 {members.inside(server)}")
    # A PC that was installed anew has another key.
    other.exec("rm /etc/wireguard/aura0.key")
    alone = " ".join(members.cluster.overlay("--limit", other.name).split())
    assert f"{other.name} does not reach {server.name} through the overlay" in alone
    members.cluster.overlay()
    assert not re.search("changed=[1-9]", members.cluster.overlay())


def test_it_goes_when_it_is_switched_off_and_with_the_reset(members: Members) -> None:
    members.go_back(OVERLAY)
    server, other = members.server, members.other
    members.settings(overlay=False)
    members.cluster.site()
    assert not re.search("changed=[1-9]", members.cluster.site())
    assert knock(other, members.lan(other), members.lan(server)) == set(PORTS)
    for machine in (server, other):
        assert "aura0" not in machine.exec("ip link; ls /etc/wireguard")

    members.go_back(OVERLAY)
    members.cluster.ansible("playbooks/reset.yml", "-e", "yes=true")
    for machine in (server, other):
        assert "aura0" not in machine.exec("ip link; ls /etc/wireguard /etc/systemd/system")
    assert not list(members.cluster.inventory.glob("state/overlay/*.pub"))
