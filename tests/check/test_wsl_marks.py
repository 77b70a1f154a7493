"""Linux under Windows is told from a PC and from a container, and its card counts, from synthetic facts: WSL's kernel
names, what its systemd leaves in /run, and nvidia-smi's line, as public reports show them. No WSL was at hand."""

import os
from typing import Any

import pytest
import tree

CARDS = tree.plugin("filter/graphics_cards")
WSL_KERNEL, PC_KERNEL = "6.6.87.2-microsoft-standard-WSL2", "5.15.0-203-generic"


@pytest.mark.parametrize(
    ("kernel", "paths", "container", "wsl"),
    [
        pytest.param(PC_KERNEL, [], "", False, id="a PC"),
        pytest.param(WSL_KERNEL, ["/run/WSL", "/run/systemd/container"], "wsl", True, id="WSL with systemd"),
        pytest.param(WSL_KERNEL, [], "", True, id="WSL before systemd"),
        pytest.param("6.6.87-mine", ["/run/WSL"], "", True, id="WSL with a kernel of one's own"),
        pytest.param(WSL_KERNEL, ["/run/systemd/container"], "wsl", True, id="without Windows's programs"),
        pytest.param(WSL_KERNEL, ["/run/systemd/container"], "systemd-nspawn", False, id="nspawn on WSL"),
        pytest.param(WSL_KERNEL, ["/.dockerenv"], "", False, id="docker on WSL"),
        pytest.param(PC_KERNEL, ["/run/systemd/container"], "lxc", False, id="a container on a PC"),
    ],
)
def test_what_is_wsl(
    kernel: str, paths: list[str], container: str, wsl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tree.plugin("module_utils/node_start")
    monkeypatch.setattr(start.platform, "release", lambda: kernel)
    monkeypatch.setattr(start, "read_file", lambda path: container)
    monkeypatch.setattr(os.path, "exists", lambda path: path in paths)
    monkeypatch.setattr(os.path, "isdir", lambda path: path in paths)
    assert start.in_wsl() is wsl


# The PCI bus of WSL has no NVIDIA card: nvidia-smi alone knows it.
LINE = (
    "GPU-5a1e77aa, 00000000:01:00.0, {capability}, 12288, Enabled, Enabled, {driver}, [N/A], [N/A], [N/A], [N/A], "
    "NVIDIA GeForce RTX 3060\n"
)


def gpu(monkeypatch: pytest.MonkeyPatch, driver: str, capability: str = "8.6") -> dict[str, Any]:
    node_gpu = tree.plugin("module_utils/node_gpu")
    asked: list[str] = []

    def said(program: str, *words: str, **_: object) -> str:
        asked.append(program)
        return LINE.format(driver=driver, capability=capability) if driver else ""

    monkeypatch.setattr(node_gpu, "in_wsl", lambda: True)
    monkeypatch.setattr(node_gpu, "in_container", lambda: True)
    monkeypatch.setattr(node_gpu, "cards_on_bus", lambda: [])
    monkeypatch.setattr(node_gpu, "read_output", said)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/usr/lib/wsl/lib/nvidia-smi")
    found = node_gpu.read_gpus()
    assert asked == ["/usr/lib/wsl/lib/nvidia-smi"]
    return found


@pytest.mark.parametrize(
    ("driver", "capability", "build"),
    [("591.44", "8.6", "cu130"), ("537.58", "8.6", "cu126"), ("581.80", "6.1", "cu126"), ("", "", "cpu")],
)
def test_windows_driver_decides_which_torch(
    driver: str, capability: str, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gpu(monkeypatch, driver, capability)
    assert (found["elsewhere"], found["driver"], found["machine"]) == ("WSL", driver, {})
    assert CARDS.torch_build(found) == {"build": build, "problem": ""}
    trains = [card["uuid"] for card in CARDS.training_cards(found)["cards"]]
    assert trains == (["GPU-5a1e77aa"] if driver else [])


def test_a_driver_of_windows_is_not_replaced_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere one that is too old for every build is no reason to stop: nvidia_driver brings another."""
    found = gpu(monkeypatch, "512.15")
    assert "needs driver 525.60.13 or later, and it has 512.15" in CARDS.torch_build(found)["problem"]
    assert CARDS.torch_build(found, driver="580") == {"build": "cu130", "problem": ""}
