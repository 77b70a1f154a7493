"""What stands in the way, as a table."""

import tree


def test_the_table_says_all_of_all_nodes_and_the_same_only_once() -> None:
    table = tree.plugin("filter/preflight_table").preflight_table
    assert table({"node0": [], "node1": []}) == ""
    ufw = {"role": "firewall", "sentence": "ufw is active there. " + "Switch it off (sudo ufw disable). " * 5}
    disk = {"role": "base", "sentence": "its disk is full."}
    said = table({"node0": [ufw], "node1": [ufw, disk], "node2": []})
    assert said.count("ufw is active there") == 1
    assert "node0, node1  firewall" in said
    assert "node1         base      its disk is full." in said
    assert all(len(line) <= 120 for line in said.splitlines())
    assert said.splitlines()[-1] == "To go on without node0 and node1: --limit 'cluster:!node0:!node1'"
    assert "--limit" not in table({"node0": [disk], "node1": [ufw]})
