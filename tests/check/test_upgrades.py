"""What upgrade.yml and reboot.yml go by: what apt would move, what it has moved, and who comes back by itself."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from expressions import filled_in
from plays import played, plays_of

PACKAGES = tree.plugin("module_utils/node_packages")
UPGRADES = tree.plugin("filter/upgrades")

SIMULATION = """\
Reading package lists...
Inst base-files [12ubuntu4.6] (12ubuntu4.7 Ubuntu:22.04/jammy-updates [amd64])
Inst linux-image-5.15.0-203-generic (5.15.0-203.213 Ubuntu:22.04/jammy-security [amd64])
Inst linux-image-generic [5.15.0.200.198] (5.15.0.203.201 Ubuntu:22.04/jammy-security [amd64]) []
Inst linux-libc-dev [5.15.0-200.210] (5.15.0-203.213 Ubuntu:22.04/jammy-security [amd64])
Inst libnvidia-compute-580-server [580.95-0ubuntu0.22.04.1] (580.105-0ubuntu0.22.04.1 Ubuntu:22.04 [amd64])
Inst containerd [1.7.12-0ubuntu1] (1.7.28-0ubuntu1 Ubuntu:22.04/jammy-updates [amd64])
Conf linux-image-generic (5.15.0.203.201 Ubuntu:22.04/jammy-updates [amd64])
"""


def test_what_moves_together_waits() -> None:
    found = PACKAGES.upgrades(SIMULATION)
    together = [one for one in found if one["together"]]
    assert [(one["package"], one["installed"], one["security"]) for one in together] == [
        ("linux-image-5.15.0-203-generic", "", True),
        ("linux-image-generic", "5.15.0.200.198", True),
        ("libnvidia-compute-580-server", "580.95-0ubuntu0.22.04.1", False),
        ("containerd", "1.7.12-0ubuntu1", False),
    ]
    assert [one["package"] for one in found if not one["together"]] == ["base-files", "linux-libc-dev"]


# Somebody has said apt-mark hold linux-modules-nvidia-580-server-open-generic: without --ignore-hold it is kept back.
HELD = """\
The following packages have been kept back:
  linux-modules-nvidia-580-server-open-generic
Inst linux-image-5.15.0-203-generic (5.15.0-203.213 Ubuntu:22.04/jammy-security [amd64])
Inst linux-image-generic [5.15.0.200.198] (5.15.0.203.201 Ubuntu:22.04/jammy-security [amd64]) []
"""
WITHOUT_HOLDS = f"""{HELD}\
Inst linux-modules-nvidia-580-server-open-5.15.0-203-generic (5.15.0-203.213 Ubuntu:22.04/jammy-updates [amd64])
Inst linux-modules-nvidia-580-server-open-generic [5.15.0-200.210] (5.15.0-203.213 Ubuntu:22.04/jammy-updates [amd64])
"""


def test_what_a_hold_prevents_is_listed_and_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PACKAGES, "said", lambda *words: WITHOUT_HOLDS if "--ignore-hold" in words else HELD)
    found = PACKAGES.waiting()
    assert {one["package"]: one["held"] for one in found} == {
        "linux-image-5.15.0-203-generic": False,
        "linux-image-generic": False,
        "linux-modules-nvidia-580-server-open-5.15.0-203-generic": True,
        "linux-modules-nvidia-580-server-open-generic": True,
    }
    assert UPGRADES.kernels_without_driver(found, PREBUILT) == ["5.15.0-203-generic"]


def upgrade(package: str, installed: str = "", held: bool = False) -> dict[str, object]:
    return {
        "package": package, "installed": installed, "candidate": "2", "security": True, "together": True, "held": held,
    }  # fmt: skip


MODULES = "linux-modules-nvidia-580-server-open"
PREBUILT = [f"{MODULES}-5.15.0-200-generic", f"{MODULES}-generic"]
KERNEL = [upgrade("linux-image-5.15.0-203-generic"), upgrade("linux-image-generic", "5.15.0.200.198")]
MODULE = upgrade(f"{MODULES}-5.15.0-203-generic")


@pytest.mark.parametrize(
    ("upgrades", "installed", "bare"),
    [
        pytest.param(KERNEL, PREBUILT, ["5.15.0-203-generic"], id="the archive has no module for it yet"),
        pytest.param([*KERNEL, MODULE], PREBUILT, [], id="its module comes with it"),
        pytest.param(KERNEL, [*PREBUILT, str(MODULE["package"])], [], id="its module is there already"),
        pytest.param(KERNEL, [*PREBUILT, "nvidia-dkms-580-server"], [], id="modules are built as needed"),
        pytest.param(KERNEL, [], [], id="no driver"),
        pytest.param([upgrade("libnvidia-compute-580-server", "1")], PREBUILT, [], id="no kernel"),
        pytest.param([*KERNEL, MODULE | {"held": True}], PREBUILT, ["5.15.0-203-generic"], id="its module is held"),
        pytest.param([one | {"held": True} for one in KERNEL], PREBUILT, [], id="the kernel is held"),
    ],
)  # fmt: skip
def test_no_kernel_comes_without_its_driver(
    upgrades: list[dict[str, object]], installed: list[str], bare: list[str]
) -> None:
    assert UPGRADES.kernels_without_driver(upgrades, installed) == bare


def test_each_package_of_the_driver_is_a_line() -> None:
    """Of which the filter gets those that are installed."""
    tasks = [task for play in plays_of("upgrade") for task in play.get("tasks", [])]
    (task,) = (task for task in tasks if task.get("register") == "upgrade_driver")
    argv = task["ansible.builtin.command"]["argv"]
    assert argv[-2:] == ["linux-modules-nvidia-*", "nvidia-dkms-*"]
    said = subprocess.run([*argv[:-2], "dpkg", "apt"], capture_output=True, text=True, check=True).stdout
    assert sorted(said.splitlines()) == ["installed:apt", "installed:dpkg"]


def test_only_what_has_moved_asks_for_a_reboot() -> None:
    held = upgrade("linux-image-generic", "1", held=True)
    kept_back = upgrade("nvidia-utils-580-server", "1")
    before = [held, kept_back, upgrade("containerd", "1")]
    assert UPGRADES.moved(before, [held, kept_back]) == ["containerd"]
    assert UPGRADES.moved([held], []) == []
    assert UPGRADES.moved(KERNEL, []) == ["linux-image-5.15.0-203-generic", "linux-image-generic"]


START = {"passphrase": False, "live": False, "windows": "", "boot_entry": ""}


def node(**changes: Any) -> dict[str, Any]:
    return {
        "session": {"client": "192.168.50.9", "here": "192.168.50.22"},
        "start": START, "upgrades": [], "reboot_required": False, "wsl": False,
        "units": {"aura-script.service": {"active": False}}, **changes,
    }  # fmt: skip


PASSPHRASE = {"start": START | {"passphrase": True}}
OWN = {"session": {"client": "192.168.50.22", "here": "192.168.50.22"}}


@pytest.mark.parametrize(
    ("seen", "whole", "words"),
    [
        pytest.param(node(), False, "", id="comes back"),
        pytest.param(node(**PASSPHRASE), False, "node3: one of its disks asks for a passphrase", id="passphrase"),
        pytest.param(node(start=START | {"live": True}), False, "node3 runs a live system", id="live"),
        pytest.param(
            node(start=START | {"windows": "firmware", "boot_entry": "0003"}), False,
            "come back in Windows. Sit down at it and type: sudo efibootmgr --bootnext 0003 && sudo reboot",
            id="the firmware starts Windows",
        ),
        pytest.param(
            node(start=START | {"windows": "GRUB"}), False, "type: sudo grub-reboot 0 && sudo reboot", id="GRUB does",
        ),
        pytest.param(node(wsl=True), False, "node3 is Linux under Windows (WSL)", id="Windows has it"),
        pytest.param(node(wsl=True), True, "", id="Windows has it, and nothing waits"),
        pytest.param(
            node(wsl=True, upgrades=[upgrade("libc6", "1")]), True,
            "then in PowerShell there: wsl --shutdown; Start-ScheduledTask -TaskName 'Aura WSL'.",
            id="Windows, upgrade",
        ),
        pytest.param(node(**PASSPHRASE, **OWN), False, "", id="its person sits at it"),
        pytest.param(node(**PASSPHRASE), True, "", id="nothing to upgrade"),
        pytest.param(node(**PASSPHRASE, upgrades=[upgrade("libc6", "1", held=True)]), True, "", id="all is held"),
        pytest.param(
            node(**PASSPHRASE, upgrades=[upgrade("libc6", "1")]), True, "upgrade && sudo reboot", id="upgrade"
        ),
        pytest.param(node(**PASSPHRASE, reboot_required=True), True, "asks for a passphrase", id="a reboot waits"),
    ],
)  # fmt: skip
def test_who_does_not_come_back_by_itself_is_not_rebooted(
    seen: dict[str, Any], whole: bool, words: str
) -> None:
    said = UPGRADES.no_return(seen, "node3", whole)
    assert words in said
    assert bool(words) == bool(said)
    assert not said or "--limit 'cluster:!node3'" in said


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
    assert UPGRADES.ranks_waited_for([before, before], now) == waited_for


def test_a_rank_alone_has_come_back_with_another_process() -> None:
    before = [rank(state="training", loss=3.2, attempt="alone", pid=7, begun=1.0)]
    assert UPGRADES.ranks_waited_for(before, before) == 1
    again = rank(state="training", loss=3.2, attempt="alone", pid=7, begun=2.0)
    assert UPGRADES.ranks_waited_for(before, [again]) == 0


def waits(name: str, told: Any = "ask", **decision: Any) -> dict[str, Any]:
    """The variables of a node with a card."""
    about = {"action": "restart", "why": "nouveau", "own": False, "start": START, "script": False, **decision}
    return {"inventory_hostname": name, "nvidia_driver_reboot": told, "nvidia_driver_decision": about}


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        pytest.param([{"inventory_hostname": "node0"}], "", id="no cards"),
        pytest.param([waits("node0", action="none"), waits("node1", action="load")], "", id="nothing to restart"),
        pytest.param([waits("node0", own=True), waits("node1")], "node1 (nouveau)", id="the controller's own one"),
        pytest.param(
            [waits("node0", action="install"), waits("node1", **PASSPHRASE), waits("node2")],
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
    question = UPGRADES.restart_question(nodes)
    assert f": {names}.\n" in question if names else question == ""


@pytest.mark.parametrize(
    ("node", "now", "words"),
    [
        pytest.param({"inventory_hostname": "node1"}, False, "", id="no card"),
        pytest.param(waits("node1", action="none"), False, "", id="nothing waits"),
        pytest.param(waits("node1"), False, "not be restarted from here. Type on it: sudo reboot", id="nobody said"),
        pytest.param(waits("node1", False), False, "may not be restarted", id="forbidden"),
        pytest.param(waits("node1", True), True, "", id="allowed"),
        pytest.param(waits("node1", "true"), True, "", id="allowed, as -e says it"),
        pytest.param(waits("node1") | {"reboot": "true"}, True, "", id="-e reboot=true"),
        pytest.param(waits("node1", True) | {"reboot": "false"}, False, "may not be restarted", id="-e reboot=false"),
        pytest.param(waits("node1", True, own=True), False, "is this machine, which is not restarted", id="own"),
        pytest.param(waits("node1", True, script=True), False, "runs a script", id="a script runs"),
        pytest.param(waits("node1", True, **PASSPHRASE), False, "asks for a passphrase", id="passphrase"),
        pytest.param(
            waits("node1", True, start=START | {"windows": "firmware", "boot_entry": "0003"}), False,
            "Sit down at it and type: sudo efibootmgr --bootnext 0003 && sudo reboot", id="Windows",
        ),
    ],
)  # fmt: skip
def test_a_node_restarts_for_its_driver_when_it_may_and_comes_back(
    node: dict[str, Any], now: bool, words: str
) -> None:
    found = UPGRADES.restarts([node])
    assert found["now"] == (["node1"] if now else [])
    assert words in found["said"]["node1"] if words else found["said"] == {}


STAND_IN = """
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        look = self._task.args["look"]
        units = ["aura-script.service", "aura-train@0.service"]
        assert (look["units"], bool(look["upgrades"])) == (units, task_vars["upgraded"])
        return {"changed": False, **task_vars["recorded"]}
"""


@pytest.mark.parametrize("playbook", ["reboot", "upgrade"])
def test_it_is_refused_before_the_first_node_goes(playbook: str, tmp_path: Path) -> None:
    """The playbook's own tasks, in their order, up to the first that would touch a node."""
    plays = plays_of(playbook)
    before = next(play for play in plays if any("whose_turn" in str(task) for task in play.get("tasks", [])))
    turn = next(task for task in before["tasks"] if "whose_turn" in str(task))
    assert plays.index(before) < next(number for number, play in enumerate(plays) if "serial" in play)
    turn["ansible.builtin.import_tasks"] = str(tree.ROOT / "playbooks/tasks/whose_turn.yml")
    groups = "{{ inventory_hostname }} is one of {{ group_names | join(' ') }}."
    say = {"ansible.builtin.debug": {"msg": groups}}
    (tmp_path / "action").mkdir()
    (tmp_path / "action/node_state.py").write_text(STAND_IN)
    waits = {"upgrades": [upgrade("libc6", "1")]}
    script = {"units": {"aura-script.service": {"active": True}}}
    nodes = node(**OWN, **waits), node(**waits), node(**PASSPHRASE, **waits, **script)
    hosts = {f"node{number}": {"recorded": recorded} for number, recorded in enumerate(nodes)}
    known = {"ansible_connection": "local", "upgraded": playbook == "upgrade"}
    cluster = {"cluster": {"hosts": hosts, "vars": known}}

    def run(*words: str) -> tuple[int, str]:
        play = before | {"tasks": [turn, say]}
        done = played(tmp_path, [play], cluster, *words, ANSIBLE_ACTION_PLUGINS=str(tmp_path / "action"))
        return done.returncode, " ".join(done.stdout.split())

    code, said = run()
    assert code != 0
    assert "node2: one of its disks asks for a passphrase" in said
    assert "A script runs on node2, and a reboot would end it." in said
    assert "No node has been touched." in said
    assert "is one of" not in said
    code, said = run("--limit", "cluster:!node2")
    assert code == 0, said
    assert "node0 is one of cluster turn_own." in said
    assert "node1 is one of cluster turn_others." in said


@pytest.mark.parametrize(
    ("left", "required", "check", "reboots"),
    [
        pytest.param([], False, False, True, id="the kernel has moved"),
        pytest.param(KERNEL, False, False, False, id="the kernel was kept back"),
        pytest.param(KERNEL, True, False, True, id="another package asks for it"),
        pytest.param(KERNEL, False, True, True, id="a check moves nothing, and says what it would do"),
    ],
)
def test_a_node_reboots_for_what_has_moved(
    left: list[dict[str, object]], required: bool, check: bool, reboots: bool
) -> None:
    tasks = yaml.safe_load((tree.ROOT / "playbooks/tasks/upgrade.yml").read_text())
    expression = next(told for task in tasks if (told := task.get("vars", {}).get("upgrade_reboots")))
    known = {
        "turn_seen": {"upgrades": [*KERNEL, upgrade("nvidia-utils-580-server", "1", held=True)]},
        "upgrade_seen": {"upgrades": left, "reboot_required": required},
        "ansible_check_mode": check,
    }
    assert filled_in(expression, known) is reboots


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
    assert UPGRADES.ranks_of_run([rank]) == ([rank] if counts else [])


@pytest.mark.parametrize(("file", "name"), [("take_out", "save and leave"), ("bring_back", "are started")])
def test_the_ranks_that_leave_and_come_back_are_those_of_the_run(file: str, name: str) -> None:
    """Also where the node's first one has failed."""
    tasks = yaml.safe_load((tree.ROOT / f"playbooks/tasks/{file}.yml").read_text())
    (task,) = (task for task in tasks if name in task["name"])
    assert task["ansible.builtin.systemd_service"]["name"] == "{{ item }}"
    said = [
        {"unit": {"Id": f"aura-train@{number}.service", "ActiveState": one}, "state": ""}
        for number, one in enumerate(("failed", "active", "activating"))
    ]
    units = filled_in(task["loop"], {"before_ranks": UPGRADES.ranks_of_run(said)})
    assert units == ["aura-train@1.service", "aura-train@2.service"]
