"""The first hour at a terminal, as the README has it: PCs with users of different names, and the faults one meets.

hosts.yml → bootstrap → site → prepare → launch. What is wrong is said of all PCs at once, and changes nothing on any.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_cluster import ROOT, lab
from one_node import inside
from terminal import at_a_terminal

pytestmark = [pytest.mark.more, pytest.mark.timeout(3600)]

PCS = {"pc0": "198.18.50.131", "pc1": "198.18.50.132", "pc2": "198.18.50.133"}  # as the router has given them
USERS = {"pc0": "ubuntu", "pc1": "ada", "pc2": "ubuntu"}
OTHER = "ada's own password"
# What virtual nodes behind this machine need in place of inventory/lan's settings.
SETTINGS = {
    "lan_gateway": "198.18.50.1",
    "admin_networks": "[198.18.50.0/24]",
    "inventory_check_interface": "auralab0",
    "timesync_adjust_clock": "false",
    "shared_directory": '""',
    "trainer_threads": "1",
}
# Bash: where a card of this node's own is.
CARD = "$(ip -o -4 route show default | awk '{print $5; exit}')"
# What would show that something was done to a PC.
STATE = r"""
getent passwd; hostname; nft list ruleset 2>/dev/null
ip -4 -o address show scope global | awk '{print $2, $4}'; dpkg-query --show
find /etc /opt /usr/local -xdev -newer /root/began ! -path '*/apt/*' ! -name ld.so.cache -printf '%p %T@\n' | sort
"""
FAULTS = (
    # what is done to a PC, what mends it, and what is said
    (
        "pc0",
        "useradd --uid 1234 aura",
        "userdel aura",
        "there is already: .*1234",
    ),
    (
        "pc0",
        "mkdir -p /etc/ufw; echo ENABLED=yes > /etc/ufw/ufw.conf",
        "rm -r /etc/ufw",
        "ufw is active there, and two firewalls would contradict each other",
    ),
    (
        "pc2",  # has the address that pc0 shall have
        f"ip address add 198.18.50.31/24 dev {CARD}",
        f"ip address delete 198.18.50.31/24 dev {CARD}",
        "shall have 198.18.50.31, but another machine in the LAN answers there",
    ),
    (
        "pc1",
        "sed -i '1i 10.1.2.3 node2' /etc/hosts",
        "sed -i 1d /etc/hosts",
        "lines that are not ours lead names of nodes elsewhere: .* node2",
    ),
    (
        "pc1",
        f"mkdir -p /etc/network; echo iface {CARD} inet dhcp > /etc/network/interfaces",
        "rm -r /etc/network",
        "in /etc/network/interfaces too, and two masters would fight over it",
    ),
    (
        "pc1",
        "mount -t tmpfs -o size=100m tmpfs /opt",
        "umount /opt",
        "has 0.1 GB free for /opt, and Python, torch and its releases need about 2 GB",
    ),
    (
        "pc2",
        "systemd-run --quiet --unit=firewalld sleep 3600",
        "systemctl stop firewalld",
        "firewalld is active there, and two firewalls would contradict each other",
    ),
    (
        "pc2",
        "ip link add lan1 type veth peer name lan2; ip address add 198.18.50.77/24 dev lan1; "
        "ip link set lan1 up; ip link set lan2 up",
        "ip link delete lan1",
        "several network cards have an address in 198.18.50.0/24",
    ),
)
WRONG_SETTINGS = {
    "torch_backend": "cu126",
    "lan_services": "[game]",
    "lan_nameservers": "[198.18.50.254]",
}
SAID = (
    *(told for *_, told in FAULTS),
    "torch_backend is cu126, but it has no NVIDIA card",
    r"firewall_lan_services \(lan_services\) names game",
    "finds no name server at 198.18.50.254",
)


def states() -> dict[str, str]:
    return {name: inside(STATE, name) for name in PCS}


def with_settings(text: str, settings: dict[str, str]) -> str:
    lines = [line for line in text.splitlines() if line.partition(":")[0] not in settings]
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in settings.items())]) + "\n"


class Person:
    """Who types what the README says, and answers what is asked."""

    def __init__(self, inventory: Path) -> None:
        self.inventory = inventory
        nameservers = (ROOT / "inventory/lab/state/nameservers").read_text().split()
        self.settings = SETTINGS | {"lan_nameservers": f"[{', '.join(nameservers)}]"}
        self.password = (ROOT / "inventory/lab/state/password").read_text().strip()

    def writes_the_inventory(self) -> Path:
        """inventory/lan with the addresses and users of these PCs; where its settings are."""
        shutil.copytree(ROOT / "inventory/lan", self.inventory, ignore=shutil.ignore_patterns("state"))
        hosts = {
            f"node{number}": {
                "lan_address": f"198.18.50.{31 + number}",
                "first_address": PCS[name],
                "first_user": user,
            }
            for number, (name, user) in enumerate(USERS.items())
        }
        (self.inventory / "hosts.yml").write_text(json.dumps({"cluster": {"hosts": hosts}}))
        settings = self.inventory / "group_vars/all/settings.yml"
        settings.write_text(with_settings(settings.read_text(), self.settings))
        return settings

    def types(self, *words: str, answers: tuple[str, ...] = ("",), fails: bool = False) -> str:
        command = ["ansible-playbook", "-i", str(self.inventory), *words]
        code, said = at_a_terminal(command, list(answers), 1500)
        assert (code != 0) == fails, said[-6000:]
        return said

    def bootstrap(self, *words: str, password: str = "", keys: bool = False, fails: bool = False) -> str:
        answers = (password or self.password, "", *(["yes"] if keys else []))
        return self.types("playbooks/bootstrap.yml", "-k", "-K", *words, answers=answers, fails=fails)


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    for name, address in PCS.items():
        lab("down", "--only", name)
        lab("up", "--only", name, "--address", address)
        inside("touch -d '+2 seconds' /root/began; sleep 3", name)
    inside(f'useradd --create-home --shell /bin/bash --groups sudo ada; echo "ada:{OTHER}" | chpasswd', "pc1")
    inside("gpasswd --delete ubuntu sudo", "pc2")
    yield Person(tmp_path / "home")
    for name in PCS:
        lab("down", "--only", name)


def test_the_first_hour(person: Person) -> None:
    settings = person.writes_the_inventory()
    good = settings.read_text()

    bare = states()
    said = person.bootstrap("--check")
    assert said.count("The real run asks whether the host key above is its own") == len(PCS), said
    assert not (person.inventory / "state/known_hosts").exists()
    assert not any(inside("journalctl --unit=ssh | grep -i password || true", name) for name in PCS)
    said = person.bootstrap(keys=True, fails=True)
    assert "node1 bootstrap ada is not let in: is that the user that you made there (first_user)" in said, (
        said
    )
    assert "node2 bootstrap ubuntu may not become root (ubuntu is not in the sudoers file" in said
    assert "Nothing has been changed on any node." in said
    assert states() == bare
    inside("gpasswd --add ubuntu sudo", "pc2")
    person.bootstrap("--limit", "cluster:!node1")
    person.bootstrap("--limit", "node1", password=OTHER)
    said = person.types("playbooks/bootstrap.yml")  # nobody's password any more
    assert not re.search("changed=[1-9]", said)
    assert "NOPASSWD" not in inside("sudo -l -U ada", "pc1")

    settings.write_text(with_settings(good, WRONG_SETTINGS))
    for name, fault, _, _ in FAULTS:
        inside(fault, name)
    faulty = states()
    said = person.types("site.yml", fails=True)
    missing = [sentence for sentence in SAID if not re.search(sentence, said)]
    assert not missing, f"{missing} not in: {said}"
    assert "Nothing has been changed on any node." in said
    assert states() == faulty

    settings.write_text(good)
    for name, _, mended, _ in FAULTS:
        inside(mended, name)
    assert "Ready. Can it train?" in person.types("site.yml")
    assert not re.search("changed=[1-9]", person.types("site.yml"))
    person.types("playbooks/connectivity.yml")
    docs = subprocess.run([ROOT / "tests/lab/spanish-docs"], text=True, capture_output=True, check=True)
    preset = ("-e", "preset=gpt2-nano")
    person.types("playbooks/prepare.yml", "-e", f"text={docs.stdout.splitlines()[-1]}", *preset)
    person.types("launch.yml", *preset, "-e", "run=hour", "-e", "steps=40", "-e", "wait=true")
    done = json.loads(inside("cat /var/lib/aura/runs/hour/done.json", "pc0"))
    assert done["validation_loss"] < done["first_validation_loss"] - 0.3
