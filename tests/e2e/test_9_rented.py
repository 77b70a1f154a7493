"""A rented machine (docs/rented.md) on one lab node: its own address is another one than that by which it is reached.

Made ready with the example's own settings, its network is as before; it trains, and goes on where it was stopped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_cluster import ROOT, RUNS, lab
from one_node import FIRST, NAME, ansible, bootstrap, inside, new_node

pytestmark = [pytest.mark.more, pytest.mark.timeout(2400)]

OWN = "10.77.0.5"  # behind a provider's NAT; nobody reaches it from outside
# Only what a virtual node on this machine needs beside the example's settings.
SETTINGS = """
admin_networks: [198.18.50.0/28]
inventory_check_interface: auralab0
host_keys: accept
timesync_adjust_clock: false
trainer_threads: 1
"""
NETWORK = """
ip -4 -oneline address show scope global | awk '{print $2, $4}'
ip -4 route show default
find /etc/netplan /etc/cloud -type f -exec sha256sum {} + | sort
"""
NANO = ("-e", "preset=gpt2-nano", "-e", "run=rented")


@pytest.fixture
def inventory(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "rented"
    shutil.copytree(ROOT / "inventory/rented", folder, ignore=shutil.ignore_patterns("state"))
    (folder / "hosts.yml").write_text(
        f"cluster: {{hosts: {{{NAME}: {{lan_address: {OWN}, public_address: {FIRST}}}}}}}\n"
    )
    settings = folder / "group_vars/all/settings.yml"
    lines = settings.read_text().splitlines(keepends=True)
    settings.write_text("".join(line for line in lines if not line.startswith("admin_networks")) + SETTINGS)
    yield folder
    lab("down", "--only", NAME)


def test_it_becomes_ready_without_a_change_of_its_network_and_trains(inventory: Path) -> None:
    new_node(inventory)
    inside(f"ip address add {OWN}/32 dev $(ip -oneline -4 address show to {FIRST} | cut -d ' ' -f 2)")
    before = inside(NETWORK)
    assert OWN in before
    bootstrap(inventory)
    ansible(inventory, "site.yml")
    assert "changed=0" in ansible(inventory, "site.yml")
    assert inside(NETWORK) == before
    rules = inside("nft list table inet aura")
    assert "ip saddr 198.18.50.0/28 accept" in rules
    listening = inside("ss -Hltn 'sport = :6006'")
    assert "127.0.0.1:6006" in listening
    assert FIRST not in listening

    plan = subprocess.run(
        ["ansible", NAME, "-i", str(inventory), "-b", "--become-user", "aura",
         "-a", "/opt/aura/current/venv/bin/aura plan --preset auto"],
        cwd=ROOT, text=True, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert "gpt2-nano" in plan.stdout  # there is no GPU

    text = subprocess.run([ROOT / "tests/lab/spanish-docs"], text=True, capture_output=True, check=True)
    ansible(inventory, "playbooks/prepare.yml", "-e", f"text={text.stdout.splitlines()[-1]}", *NANO[:2])
    ansible(inventory, "launch.yml", *NANO, "-e", "steps=100000")
    ansible(inventory, "playbooks/stop.yml")
    stopped = json.loads(inside(f"cat {RUNS}/rented/rank-0/status.json"))
    assert stopped["state"] == "stopped"
    steps = stopped["step"] + 5
    ansible(inventory, "launch.yml", *NANO, "-e", f"steps={steps}", "-e", "wait=true")
    assert json.loads(inside(f"cat {RUNS}/rented/done.json"))["step"] == steps
    assert f"interrupt-step-{stopped['step']}" in inside(f"ls {RUNS}/rented/checkpoints")
