"""What upgrade.yml goes by: what apt would move, what it has moved, and whether a node reboots for it."""

from __future__ import annotations

import pytest
import tree
import yaml
from expressions import filled_in

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
    found = UPGRADES.parse_upgrades(SIMULATION, SIMULATION)
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


def test_what_a_hold_prevents_is_listed_and_does_not_move() -> None:
    found = UPGRADES.parse_upgrades(HELD, WITHOUT_HOLDS)
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
    set_fact = next(
        told for task in tasks if "upgrade_moves" in (told := task.get("ansible.builtin.set_fact", {}))
    )
    waits = {"reboot_upgrades": [*KERNEL, upgrade("nvidia-utils-580-server", "1", held=True)]}
    assert filled_in(set_fact["upgrade_moves"], waits) == [one["package"] for one in KERNEL]
    known = {
        "upgrade_moves": [one["package"] for one in KERNEL],
        "upgrade_kernel": set_fact["upgrade_kernel"],
        "reboot_upgrades": left,
        "ansible_facts": {"boot": {"reboot_required": required}},
        "ansible_check_mode": check,
    }
    assert filled_in(expression, known) is reboots
