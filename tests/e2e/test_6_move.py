"""Three nodes of a finished cluster go to another subnet and come back, and nobody is lost on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from controller_node import ControllerNode
from lab_cluster import ROOT, Cluster

MOVED = ["node0", "node1", "node2"]
HOME, ELSEWHERE = "198.18.50", "198.18.60"
# Five runs of site.yml, perhaps on a busy computer.
pytestmark = [pytest.mark.more, pytest.mark.timeout(2400)]


def write_inventory(place: Path, to: str, since: str) -> str:
    """The lab's inventory with three nodes, which shall be in `to` and are in `since`."""
    source = ROOT / "inventory/lab"
    place.mkdir()
    shutil.copytree(source / "group_vars", place / "group_vars")
    shutil.copytree(source / "state", place / "state")
    nodes = {
        name: {"lan_address": f"{to}.2{name[-1]}", "first_address": f"{since}.2{name[-1]}"} for name in MOVED
    }
    (place / "hosts.yml").write_text(yaml.safe_dump({"cluster": {"hosts": nodes}}))
    settings = place / "group_vars/all/settings.yml"
    own = yaml.safe_load(settings.read_text())
    both = [network.replace(HOME, net) for net in (HOME, ELSEWHERE) for network in own["admin_networks"]]
    settings.write_text(yaml.safe_dump({**own, "lan_gateway": f"{to}.1", "admin_networks": both}))
    return str(place)


def where(cluster: Cluster) -> dict[str, list[str]]:
    """Every IPv4 address of the moved nodes' cards; how long it stays."""
    found = {}
    for node in MOVED:
        links = json.loads(cluster.sh(node, "ip -json -4 address show scope global up"))
        addresses = [entry for link in links for entry in link["addr_info"]]
        found[node] = [entry["local"] + (" (lent)" if entry.get("dynamic") else "") for entry in addresses]
    return found


def all_in(network: str) -> dict[str, list[str]]:
    return {node: [f"{network}.2{node[-1]}"] for node in MOVED}


def nothing_waits(cluster: Cluster) -> bool:
    script = "aura-rollback status; systemctl list-units --all --plain --no-legend 'aura-rollback-*'"
    return all("pending" not in (said := cluster.sh(node, script)) and "-undo" not in said for node in MOVED)


@pytest.fixture
def at_home_again(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """Whatever happens here, later tests find the five nodes as they were."""
    yield
    if where(cluster) != all_in(HOME):
        cluster.ansible("site.yml", inventory=write_inventory(tmp_path / "rescue", HOME, ELSEWHERE))
    cluster.ansible("site.yml")


def let_in_from_both(cluster: Cluster, tmp_path: Path) -> None:
    """The first step of a move: the firewalls know both networks, and nobody has moved."""
    cluster.ansible("site.yml", inventory=write_inventory(tmp_path / "both", HOME, HOME))
    assert where(cluster) == all_in(HOME)


def test_from_one_subnet_to_another_and_back(cluster: Cluster, tmp_path: Path, at_home_again: None) -> None:
    there = write_inventory(tmp_path / "there", ELSEWHERE, HOME)
    # Both networks are in admin_networks, but the firewalls that are loaded do not know that yet.
    for options in (["--check"], ["--tags", "network"]):
        said = " ".join(cluster.refused("site.yml", *options, inventory=there).split())
        assert f"its firewall would not let you in from {ELSEWHERE}.1," in said
        assert where(cluster) == all_in(HOME)
    let_in_from_both(cluster, tmp_path)

    said = cluster.ansible("site.yml", "--check", "--diff", inventory=there)
    assert f"and shall have {ELSEWHERE}.20/24" in " ".join(said.split())
    assert where(cluster) == all_in(HOME)

    cluster.ansible("site.yml", inventory=there)
    assert where(cluster) == all_in(ELSEWHERE)
    assert nothing_waits(cluster)
    again = cluster.ansible("site.yml", inventory=there)
    assert all("changed=0" in line for line in again.splitlines() if "changed=" in line), again[-3000:]

    cluster.ansible("site.yml", inventory=write_inventory(tmp_path / "back", HOME, ELSEWHERE))
    assert where(cluster) == all_in(HOME)
    assert nothing_waits(cluster)


def test_the_same_from_a_controller_that_is_node0(
    cluster: Cluster, node0: ControllerNode, tmp_path: Path, at_home_again: None
) -> None:
    let_in_from_both(cluster, tmp_path)
    for to, since in ((ELSEWHERE, HOME), (HOME, ELSEWHERE)):
        place = write_inventory(tmp_path / to, to, since)
        # The keys and known hosts are the ones that node0 has.
        hosts = (Path(place) / "hosts.yml").read_text()
        settings = (Path(place) / "group_vars/all/settings.yml").read_text()
        copy = "set -e; cd aura/inventory; rm -rf move; cp -a lab move"
        for name, text in (("hosts.yml", hosts), ("group_vars/all/settings.yml", settings)):
            copy += f"\ncat >move/{name} <<'END'\n{text}\nEND"
        node0.run(copy)
        said = node0.ansible("site.yml", inventory="inventory/move")
        assert where(cluster) == all_in(to), said[-3000:]
        assert nothing_waits(cluster)
    node0.run("rm -rf aura/inventory/move")
