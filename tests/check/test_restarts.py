"""Who is asked whether nodes may be restarted for their driver, and what is done with the answer."""

import json
from pathlib import Path

import pytest
import tree
import yaml
from terminal import at_a_terminal

START = {"passphrase": False, "live": False, "windows": "", "boot_entry": ""}
WAITS = {"action": "restart", "why": "nouveau", "own": False, "start": START, "script": False}
NODES = {"node0": WAITS | {"own": True}, "node1": WAITS, "node2": WAITS | {"action": "none"}}


def said(tmp_path: Path, typed: list[str], *words: str, **told: str) -> tuple[int, str]:
    """What a run of ask_restart.yml and of the first and the last play of restarts.yml says. typed: the answers; told:
    nvidia_driver_reboot of some nodes."""
    ask = {"ansible.builtin.import_tasks": str(tree.ROOT / "playbooks/tasks/ask_restart.yml")}
    variables = {"ask_restart_told": "{{ reboot | default(nvidia_driver_reboot) | string | lower }}"}
    plays = yaml.safe_load((tree.ROOT / "playbooks/restarts.yml").read_text())
    assert "restart_now" in plays[1]["hosts"]
    plays[1]["tasks"] = [{"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} restarts now"}}]
    first = {"hosts": "cluster", "gather_facts": False, "vars": variables, "tasks": [ask]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([first, *plays], sort_keys=False))
    hosts = {
        name: {"nvidia_driver_decision": decision, "nvidia_driver_reboot": told.get(name, "ask")}
        for name, decision in NODES.items()
    }
    groups = {"cluster": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}
    (tmp_path / "hosts.json").write_text(json.dumps(groups))
    # What was decided stays: no card is looked at.
    decide = tmp_path / "roles/nvidia_driver/tasks/decide.yml"
    decide.parent.mkdir(parents=True, exist_ok=True)
    decide.write_text("[]")
    run = ["ansible-playbook", "-i", str(tmp_path / "hosts.json"), str(tmp_path / "play.yml"), *words]
    return at_a_terminal(run, typed, ANSIBLE_ROLES_PATH=str(tmp_path / "roles"))


MAY_NOT = "node1 may not be restarted from here. Type on it: sudo reboot"


@pytest.mark.parametrize(
    ("typed", "restarts"),
    [
        pytest.param([""], True, id="Enter is yes"),
        pytest.param(["perhaps", "no"], False, id="no, at the second attempt"),
        pytest.param([], False, id="nobody is there"),
    ],
)
def test_a_node_restarts_when_somebody_has_said_so(typed: list[str], restarts: bool, tmp_path: Path) -> None:
    code, text = said(tmp_path, typed)
    assert code == 0, text
    assert ("node1 restarts now" in text, MAY_NOT in text) == (restarts, not restarts), text
    assert "node0 is this machine, which is not restarted from here. Type: sudo reboot" in text
    assert "node0 restarts now" not in text
    assert "node2" not in text.partition("TASK [Say what to type]")[2].partition("PLAY RECAP")[0]
    assert ("node1 (nouveau)" in text.partition("[Y/n]")[0]) == bool(typed)


def test_of_which_nodes_it_is_said_in_the_inventory_nobody_is_asked(tmp_path: Path) -> None:
    """The first one in the inventory among them."""
    code, text = said(tmp_path, [""], node0="false", node2="false")
    assert code == 0, text
    assert "node1 restarts now" in text and "node1 (nouveau)" in text.partition("[Y/n]")[0]
    code, text = said(tmp_path, [], "-e", "reboot=false")
    assert code == 0 and MAY_NOT in text


def test_another_word_is_refused(tmp_path: Path) -> None:
    code, text = said(tmp_path, [], "-e", "reboot=perhaps")
    refusal = (
        "reboot (or nvidia_driver_reboot) is 'perhaps'; it is true, false or ask. Nothing has been changed"
    )
    assert code != 0 and refusal in text
    assert "restarts now" not in text
