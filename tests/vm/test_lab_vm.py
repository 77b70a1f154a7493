"""The lab's virtual machines are what the tests that use them take them for."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import LAB, Machine, Machines, answers, lab, wait_for


@pytest.fixture(scope="module")
def container() -> Iterator[str]:
    """A container node beside the machines, on the same switch."""
    lab("up", "--only", "container", "--address", "198.18.50.230", limit=900)
    yield "container"
    lab("down", "--only", "container")


def cards(machine: Machine) -> dict[str, str]:
    """Its network cards: hardware address -> name."""
    links = json.loads(machine.exec("ip -json link"))
    return {link["address"]: link["ifname"] for link in links if link["ifname"] != "lo"}


def home_addresses(machine: Machine) -> list[str]:
    links = json.loads(machine.exec(f"ip -json -4 address show dev {cards(machine)[machine.mac]}"))
    return [entry["local"] for link in links for entry in link.get("addr_info", [])]


# --- server ----------------------------------------------------------------------------------------


def test_it_is_a_pc_with_a_kernel_of_its_own(vm: Machines) -> None:
    machine = vm()
    assert (
        machine.exec("cat /proc/sys/kernel/random/boot_id")
        != Path("/proc/sys/kernel/random/boot_id").read_text()
    )
    assert machine.exec("systemd-detect-virt --container", check=False).strip() == "none"
    assert machine.exec("systemctl is-system-running", check=False).strip() == "running"
    assert cards(machine) == {machine.mac: "enp3s0"}
    assert machine.addresses() == [machine.address]
    assert machine.ssh("id -un; hostname").split() == ["ubuntu", "ubuntu"]
    assert "asks" in machine.ssh("sudo -n true 2>/dev/null && echo does not || echo asks")
    assert machine.exec("command -v nmcli || echo none").strip() == "none"


def test_exec_needs_no_network(vm: Machines) -> None:
    machine = vm()
    machine.cut()
    assert not answers(machine.address)
    assert machine.exec("cat /sys/class/net/enp3s0/carrier").strip() == "0"  # it sees that the cable is out
    machine.heal()
    machine.wait_ssh()


def test_exec_is_the_same_for_both_kinds(vm: Machines, container: str) -> None:
    for name in (vm().name, container):
        assert lab("exec", name, "echo $((20 + 3)); id -u").split() == ["23", "0"]
        assert lab("exec", name, "printf", "%s|", "one two", "three") == "one two|three|"
        assert lab("exec", name, "sha1sum", stdin="hello\n").startswith(
            "f572d396fae9206628714fb2ce00f72e94f2258f"
        )
        assert subprocess.run([LAB, "exec", name, "exit 7; #"], check=False).returncode == 7


def test_a_power_cut_keeps_what_was_synced_and_nothing_else_and_a_reboot_boots(vm: Machines) -> None:
    machine = vm()
    first = machine.boot_id()
    machine.exec("echo kept >/root/synced; sync /root/synced; echo gone >/run/in-memory")
    machine.power_off()
    assert not machine.alive
    assert not answers(machine.address)
    machine.power_on()
    assert machine.exec("cat /root/synced; cat /run/in-memory || true").split() == ["kept"]
    second = machine.boot_id()
    machine.reboot()
    assert len({first, second, machine.boot_id()}) == 3
    machine.wait_ssh()


def test_a_snapshot_brings_everything_back_but_the_time(vm: Machines) -> None:
    machine = vm()
    before = machine.boot_id()
    machine.exec("rm -r /etc/netplan; ip address flush dev enp3s0; systemctl stop ssh; date -s @86400")
    machine.restore()
    assert machine.boot_id() == before
    assert home_addresses(machine) == [machine.address]
    machine.exec("ls /etc/netplan/00-installer-config.yaml")
    assert_clock(machine)
    machine.wait_ssh()
    machine.power_off()  # and from its disk alone
    machine.restore()
    assert machine.boot_id() == before
    assert_clock(machine)
    assert machine.ssh("true") == ""


def assert_clock(machine: Machine) -> None:
    earliest = time.time() - 2
    said = float(machine.exec("date +%s.%N"))
    assert earliest <= said <= time.time() + 2


def test_the_card_has_a_permanent_address_that_udev_knows(vm: Machines) -> None:
    machine = vm()
    machine.exec("ip link set enp3s0 down; ip link set enp3s0 address 02:00:00:00:00:01")
    (link,) = json.loads(machine.exec("ip -json link show enp3s0"))
    assert (link["address"], link["permaddr"]) == ("02:00:00:00:00:01", machine.mac)
    machine.exec(
        "mkdir -p /run/systemd/network; printf '[Match]\\nPermanentMACAddress=%s\\n[Link]\\nAlias=found\\n' "
        f"{machine.mac} >/run/systemd/network/00-permanent.link"
    )
    said = machine.exec("udevadm test-builtin net_setup_link /sys/class/net/enp3s0 2>&1")
    assert "00-permanent.link" in said, said


def test_a_new_card_renames_the_old_one(vm: Machines) -> None:
    """As a graphics card in the uppermost slot does; the installer's netplan file then names no card any more."""
    machine = vm()
    machine.add_card()
    found = cards(machine)
    assert found.pop(machine.mac) == "enp4s0"
    assert list(found.values()) == ["enp1s0"]
    assert home_addresses(machine) == []
    machine.restore()
    assert cards(machine) == {machine.mac: "enp3s0"}


def test_an_interrupted_up_leaves_nothing_behind(vm: Machines) -> None:
    vm()  # the image is there, and the lab is up
    up = subprocess.Popen([LAB, "up", "--kind", "vm", "--only", "brief", "--address", "198.18.50.240"])
    wait_for("it is plugged in", lambda: Path("/sys/class/net/al-brief").exists() or up.poll() is not None)
    up.send_signal(signal.SIGINT)
    assert up.wait(300) == 130
    assert not Path("/sys/class/net/al-brief").exists()
    assert not Path("/var/lib/aura-lab/brief").exists()
    assert not subprocess.run(
        ["pgrep", "-f", "/var/lib/aura-lab/brief/"], capture_output=True, text=True
    ).stdout


# --- the wires -------------------------------------------------------------------------------------


def test_two_networks_on_the_home_wire_with_a_router_between(vm: Machines, container: str) -> None:
    machine = vm()
    machine.exec("ip address add 198.18.60.20/24 dev enp3s0")
    assert answers("198.18.60.20")
    lab("exec", container, "ip route get 198.18.60.20 | grep via.198.18.50.1")
    wait_for("a container reaches it there", lambda: pings(container, "198.18.60.20"), 60)


def pings(node: str, address: str) -> bool:
    return "1" in lab("exec", node, f"ping -c 1 -W 5 {address} >/dev/null && echo 1 || echo 0")


def test_nothing_for_a_lab_address_leaves_this_computer(vm: Machines) -> None:
    machine = vm()
    for address in ("198.18.55.5", "198.18.61.1", "198.18.69.254"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here, pytest.raises(PermissionError):
            here.sendto(b"out", (address, 9))
    assert not pings(machine.name, "198.18.55.5")


# --- desktop ---------------------------------------------------------------------------------------


def test_a_desktop_is_networkmanagers(vm: Machines) -> None:
    machine = vm("desktop", cards=2, ufw=True)
    devices = machine.exec("nmcli --terse --fields DEVICE,STATE,CONNECTION device").splitlines()
    assert "enp3s0:connected:netplan-enp3s0" in devices
    assert machine.exec("systemctl is-active systemd-networkd", check=False).strip() == "inactive"
    assert "renderer: NetworkManager" in machine.exec("cat /etc/netplan/01-network-manager-all.yaml")
    assert "enp3s0" in machine.exec("cat /etc/netplan/50-cloud-init.yaml")
    machine.exec("dpkg-query -W unattended-upgrades needrestart ufw network-manager")
    assert home_addresses(machine) == [machine.address]
    said = machine.exec("ufw status verbose")
    assert "Status: active" in said
    assert "deny (incoming)" in said
    assert machine.ssh("echo in").strip() == "in"  # 22/tcp is let in


def test_the_second_card_is_on_a_switch_without_a_router(vm: Machines, container: str) -> None:
    machine = vm("desktop", cards=2, ufw=True)
    found = cards(machine)
    assert found.pop(machine.mac) == "enp3s0"
    (second,) = found.values()
    assert second == "enp4s0"
    machine.exec(f"nmcli device set {second} managed no; ip address add 198.18.70.20/24 dev {second}")
    machine.exec(f"ip link set {second} up")
    wait_for("sshd answers over the switch", lambda: answers("198.18.70.20"), 60)
    # Nobody forwards from there, not even to the home network.
    there = lab("exec", container, "ip -4 -brief address show enp3s0").split()[2].partition("/")[0]
    machine.exec(f"ip route add {there} via 198.18.70.1 dev {second} src 198.18.70.20")
    assert not pings(machine.name, there)
    machine.exec(f"ip route delete {there}")
    assert pings(machine.name, there)
