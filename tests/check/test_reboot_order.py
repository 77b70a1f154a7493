"""Which nodes restart, in which order, what a person is asked and told about the others, and when ranks are back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from expressions import filled_in
from plays import plays_of
from recorded import AWAY, BOOT, HERE, run_plays, with_absolute_paths

ORDER = tree.plugin("filter/reboot_order")
PASSPHRASE = BOOT | {"passphrase": True}
WINDOWS = BOOT | {"windows": "firmware", "boot_entry": "0003"}


def upgrade(held: bool = False) -> dict[str, object]:
    return {
        "package": "libc6",
        "installed": "1",
        "candidate": "2",
        "security": True,
        "together": False,
        "held": held,
    }


def node(boot: dict[str, Any] = BOOT, connection: str = AWAY, **more: Any) -> dict[str, Any]:
    """Its variables."""
    facts = {"boot": boot, "env": {"SSH_CONNECTION": connection} if connection else {}}
    return {"inventory_hostname": "node3", "ansible_facts": facts, "reboot_units": {"stdout": ""}, **more}


WSL = BOOT | {"wsl": True}
WAITS: dict[str, Any] = {"reboot_upgrades": [upgrade()]}


@pytest.mark.parametrize(
    ("of", "for_upgrade", "words"),
    [
        pytest.param(node(), False, "", id="comes back"),
        pytest.param(node(BOOT | {"live": True}), False, "node3: it runs a live system", id="live"),
        pytest.param(node(PASSPHRASE), False, "node3: one of its disks asks for a passphrase", id="passphrase"),
        pytest.param(
            node(WINDOWS), False,
            "come back in Windows. Sit down at it and type: sudo efibootmgr --bootnext 0003 && sudo reboot",
            id="the firmware starts Windows",
        ),
        pytest.param(
            node(BOOT | {"windows": "GRUB"}), False, "type: sudo grub-reboot 0 && sudo reboot", id="GRUB does",
        ),
        pytest.param(node(WSL), False, "node3: it is Linux under Windows (WSL)", id="Windows has it"),
        pytest.param(node(WSL), True, "", id="Windows has it, and nothing waits"),
        pytest.param(
            node(WSL, **WAITS), True,
            "upgrade, then in PowerShell there: wsl --shutdown; Start-ScheduledTask -TaskName 'Aura WSL'.",
            id="Windows, upgrade",
        ),
        pytest.param(node(PASSPHRASE, HERE), False, "", id="its person sits at it"),
        pytest.param(node(PASSPHRASE, ""), False, "", id="its person sits at it, without SSH"),
        pytest.param(node(PASSPHRASE), True, "", id="nothing to upgrade"),
        pytest.param(node(PASSPHRASE, reboot_upgrades=[upgrade(held=True)]), True, "", id="all is held"),
        pytest.param(node(PASSPHRASE, **WAITS), True, "upgrade && sudo reboot", id="upgrade"),
        pytest.param(node(PASSPHRASE | {"reboot_required": True}), True, "asks for a passphrase", id="a reboot waits"),
    ],
)  # fmt: skip
def test_who_does_not_come_back_by_itself_is_not_rebooted(
    of: dict[str, Any], for_upgrade: bool, words: str
) -> None:
    said = " ".join(ORDER.reboot_blockers([of], for_upgrade))
    assert words in said
    assert bool(words) == bool(said)
    assert not said or "--limit 'cluster:!node3'" in said


@pytest.mark.parametrize("playbook", ["reboot", "upgrade"])
def test_it_is_refused_before_the_first_node_goes(playbook: str, tmp_path: Path) -> None:
    """The playbook's own tasks that look, up to the first that would touch a node."""
    plays = plays_of(playbook)
    before = next(
        play for play in plays if any("reboot_order" in str(task) for task in play.get("tasks", []))
    )
    assert plays.index(before) < next(number for number, play in enumerate(plays) if "serial" in play)
    looks = [task for task in before["tasks"] if "reboot_order" in str(task) or "read_upgrades" in str(task)]
    say = {
        "ansible.builtin.debug": {"msg": "{{ inventory_hostname }} is one of {{ group_names | join(' ') }}."}
    }
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/apt-get").write_text(
        "#!/bin/sh\necho 'Inst libc6 [1] (2 Ubuntu:22.04/jammy-security [amd64])'\n"
    )
    (tmp_path / "bin/apt-get").chmod(0o755)
    script = {"boot": {"passphrase": True}, "runs": ["aura-script.service"]}
    hosts = {
        "node0": {"recorded": {}, "connection": HERE},
        "node1": {"recorded": {}},
        "node2": {"recorded": script},
    }
    play = before | {"tasks": [*with_absolute_paths(looks), say]}
    code, said = run_plays(tmp_path, [play], hosts)
    assert code != 0
    assert "node2: one of its disks asks for a passphrase" in said, said
    assert ("sudo apt-get --with-new-pkgs upgrade && sudo reboot" in said) is (playbook == "upgrade")
    assert "A script runs on node2, and a reboot would end it." in said
    assert "No node has been touched." in said
    assert "is one of" not in said
    code, said = run_plays(tmp_path, [play], hosts, "--limit", "cluster:!node2")
    assert code == 0, said
    assert "node0 is one of cluster reboot_own." in said
    assert "node1 is one of cluster reboot_others." in said


def rank(**status: Any) -> dict[str, Any]:
    return {"unit": {"ActiveState": "active"}, "status": status}


NEW = rank(state="training", loss=3.1, attempt="2")


@pytest.mark.parametrize(
    ("now", "waited_for"),
    [
        pytest.param([NEW, rank(state="joining")], 1, id="one has done a step"),
        pytest.param([NEW, rank(state="done")], 0, id="one is through"),
        pytest.param([rank(), rank()], 2, id="nothing is known of them"),
        pytest.param([rank(state="training", loss=3.1, attempt="1"), rank()], 2, id="what they said before"),
        pytest.param([rank(state="joining"), rank(state="training", loss=None, attempt="2")], 2, id="no step"),
        pytest.param([NEW, rank(state="saving", loss=3.1, attempt="2")], 0, id="one saves"),
    ],
)  # fmt: skip
def test_ranks_have_come_back_when_they_have_done_a_step_in_a_new_attempt(
    now: list[dict[str, Any]], waited_for: int
) -> None:
    before = rank(state="training", loss=3.2, attempt="1")
    assert ORDER.ranks_waited_for([before, before], now) == waited_for


@pytest.mark.parametrize(
    ("active", "enabled", "state", "counts"),
    [
        pytest.param("active", "enabled", "training", True, id="it trains"),
        pytest.param("activating", "enabled", "", True, id="it starts again and again"),
        pytest.param("inactive", "enabled", "stopped", True, id="an upgrade that failed has stopped it"),
        pytest.param("inactive", "disabled", "stopped", False, id="stop.yml has stopped it"),
        pytest.param("inactive", "enabled", "done", False, id="the run is done"),
        pytest.param("failed", "enabled", "failed", False, id="its data is bad"),
    ],
)
def test_an_upgrade_that_is_repeated_brings_the_ranks_back(
    active: str, enabled: str, state: str, counts: bool
) -> None:
    rank = {"unit": {"ActiveState": active, "UnitFileState": enabled}, "state": state}
    tasks = yaml.safe_load((tree.ROOT / "playbooks/tasks/drain.yml").read_text())
    expression = next(task for task in tasks if "vars" in task)["ansible.builtin.set_fact"]["before_ranks"]
    assert filled_in(expression, {"ranks": [rank]}) == ([rank] if counts else [])


def waits(
    name: str = "node1",
    may: Any = "ask",
    boot: dict[str, Any] = BOOT,
    connection: str = AWAY,
    **decision: Any,
) -> dict[str, Any]:
    """The variables of a node with a card, whose driver waits for a restart."""
    about = {"action": "restart", "why": "nouveau", "runs": [], **decision}
    more = {"inventory_hostname": name, "nvidia_driver_reboot": may, "nvidia_driver_decision": about}
    return node(boot, connection) | more


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        pytest.param([node()], "", id="no cards"),
        pytest.param([waits("node0", action="none"), waits("node1", action="load")], "", id="nothing to restart"),
        pytest.param([waits("node0", connection=HERE), waits("node1")], "node1 (nouveau)", id="the controller's own"),
        pytest.param(
            [waits("node0", action="install"), waits("node1", boot=PASSPHRASE), waits("node2")],
            "node0 (nouveau), node2 (nouveau)", id="one that needs a person anyway",
        ),
        pytest.param(
            [waits("node0", False), waits("node1", "true"), waits("node2")], "node2 (nouveau)", id="said of some",
        ),
        pytest.param([waits("node0") | {"reboot": "true"}], "", id="-e reboot=true"),
    ],
)  # fmt: skip
def test_who_is_at_the_terminal_is_asked_once_about_all_nodes(
    nodes: list[dict[str, Any]], names: str
) -> None:
    question = ORDER.restart_question(nodes)
    assert f": {names}.\n" in question if names else question == ""


@pytest.mark.parametrize(
    ("of", "now", "words"),
    [
        pytest.param(node(), False, "", id="no card"),
        pytest.param(waits(action="none"), False, "", id="nothing waits"),
        pytest.param(waits(), False, "not be restarted from here. Type on it: sudo reboot", id="nobody said"),
        pytest.param(waits(may=False), False, "may not be restarted", id="forbidden"),
        pytest.param(waits(may=True), True, "", id="allowed"),
        pytest.param(waits(may="true"), True, "", id="allowed, as -e says it"),
        pytest.param(waits() | {"reboot": "true"}, True, "", id="-e reboot=true"),
        pytest.param(waits(may=True) | {"reboot": "false"}, False, "may not be restarted", id="-e reboot=false"),
        pytest.param(waits(may=True, connection=HERE), False, "is this machine, which is not restarted", id="own"),
        pytest.param(waits(may=True, runs=["aura-script.service"]), False, "runs a script", id="a script runs"),
        pytest.param(waits(may=True, runs=["aura-train@0.service"]), True, "", id="a run goes on"),
        pytest.param(waits(may=True, boot=PASSPHRASE), False, "asks for a passphrase", id="passphrase"),
        pytest.param(
            waits(may=True, boot=WINDOWS), False,
            "Sit down at it and type: sudo efibootmgr --bootnext 0003 && sudo reboot", id="Windows",
        ),
    ],
)  # fmt: skip
def test_a_node_restarts_for_its_driver_when_it_may_and_comes_back(
    of: dict[str, Any], now: bool, words: str
) -> None:
    found = ORDER.plan_restarts([of])
    assert found["now"] == (["node1"] if now else [])
    assert words in found["manual"]["node1"] if words else found["manual"] == {}
