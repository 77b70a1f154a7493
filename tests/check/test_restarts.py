"""Who is asked whether nodes may be restarted for their driver, and what is done with the answer."""

from pathlib import Path

import pytest
from plays import plays_of
from recorded import HERE, run_plays, with_absolute_paths
from test_driver_decision import UP, prebuilt, seen

WAITS = seen("RTX 3060", packages=prebuilt(), nouveau=True)
NODES = {"node0": WAITS, "node1": WAITS, "node2": seen("RTX 3060", **UP)}


def said(tmp_path: Path, typed: list[str], *words: str, **may: str) -> tuple[int, str]:
    """What a run of ask_restart.yml and of the first and the last play of restarts.yml says. typed: the answers; may:
    nvidia_driver_reboot of some nodes."""
    decide = {"ansible.builtin.include_role": {"name": "nvidia_driver", "tasks_from": "decide"}}
    ask = {"ansible.builtin.import_tasks": "tasks/ask_restart.yml"}
    variables = {"ask_restart_setting": "{{ reboot | default(nvidia_driver_reboot) | string | lower }}"}
    plays = plays_of("restarts")
    assert "restart_now" in plays[1]["hosts"]
    plays[1]["tasks"] = [{"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} restarts now"}}]
    first = {"hosts": "cluster", "vars": variables, "tasks": with_absolute_paths([decide, ask])}
    hosts = {
        name: {"recorded": of, "nvidia_driver_reboot": may.get(name, "ask")} for name, of in NODES.items()
    }
    hosts["node0"]["connection"] = HERE
    return run_plays(tmp_path, [first, *plays], hosts, *words, typed=typed)


NODE1 = "node1 (driver 580.178.04 is installed, and none is loaded)"
MAY_NOT = "node1 may not be restarted from here. Type on it: sudo reboot"


@pytest.mark.parametrize(
    ("typed", "restarts"),
    [
        pytest.param(["yes"], True, id="yes"),
        pytest.param([""], False, id="Enter is no word"),
        pytest.param(["perhaps"], False, id="nor is another one"),
        pytest.param([], False, id="nobody is there"),
    ],
)
def test_a_node_restarts_when_somebody_has_said_so(typed: list[str], restarts: bool, tmp_path: Path) -> None:
    code, text = said(tmp_path, typed)
    assert code == 0, text
    assert ("node1 restarts now" in text, MAY_NOT in text) == (restarts, not restarts), text
    assert "node0 is this machine, which is not restarted from here. Type: sudo reboot" in text
    assert "node0 restarts now" not in text
    assert "node2" not in text.partition("TASK [Report what to type]")[2].partition("PLAY RECAP")[0]
    assert (NODE1 in text.partition("(yes/no)")[0]) == bool(typed)


def test_of_which_nodes_it_is_said_in_the_inventory_nobody_is_asked(tmp_path: Path) -> None:
    """The first one in the inventory among them."""
    code, text = said(tmp_path, ["yes"], node0="false", node2="false")
    assert code == 0, text
    assert "node1 restarts now" in text and NODE1 in text.partition("(yes/no)")[0]
    code, text = said(tmp_path, [], "-e", "reboot=false")
    assert code == 0 and MAY_NOT in text


def test_another_word_is_refused(tmp_path: Path) -> None:
    code, text = said(tmp_path, [], "-e", "reboot=perhaps")
    refusal = (
        "reboot (or nvidia_driver_reboot) is 'perhaps'; it is true, false or ask. Nothing has been changed"
    )
    assert code != 0 and refusal in text
    assert "restarts now" not in text
