"""Which cards of a node train, and which build of torch they get: tables of nodes.

The nodes are synthetic, in the shape of the fact gpu, with what NVIDIA's list "CUDA GPUs" says of compute capabilities.
"""

from __future__ import annotations

from typing import Any

import pytest
import tree

CARDS = tree.plugin("filter/graphics_cards")
GPU = tree.plugin("modules/gpu_facts")
# By name: compute capability, and number in the PCI ID database.
KNOWN = {
    "GT 710": ("3.5", "128b"), "GTX 970": ("5.2", "13c2"), "GT 1030": ("6.1", "1d01"), "GTX 1080": ("6.1", "1b80"),
    "GTX 1650": ("7.5", "1f82"), "RTX 3060": ("8.6", "2503"), "RTX 3090": ("8.6", "2204"), "RTX 4090": ("8.9", "2684"),
    "RTX 5090": ("12.0", "2b85"),
}  # fmt: skip
LTS, GUIDES, NEW = "525.60.11", "535.183.01", "580.95.05"


def node(*names: str, driver: str = NEW, display: tuple[int, ...] = (), seen: int = 9) -> dict[str, Any]:
    """A node with these cards; display: which of them drive one, seen: how many nvidia-smi sees."""
    bus, smi = [], []
    for number, name in enumerate(names):
        pci, device_id = f"0000:{number:02x}:00.0", f"10de:{KNOWN[name][1]}"
        capability = GPU.CAPABILITY[GPU.generation(device_id)]
        bus.append(
            {"pci": pci, "boot_vga": number in display, "device_id": device_id, "capability": capability}
        )
        smi.append({
            "uuid": f"GPU-{number}000-{name[-4:]}", "name": name, "pci": pci, "compute_capability": KNOWN[name][0],
            "memory_mib": 8192, "display_active": number in display,
        })  # fmt: skip
    return {"cards": bus, "driver": driver, "smi": smi[:seen], "elsewhere": ""}


NEWEST, KEPT, OLDER_CARD = node("RTX 3060"), node("RTX 3060", driver=GUIDES), node("GTX 1080")
OLD_DRIVER, NO_DRIVER = node("RTX 3060", driver=LTS), node("RTX 3060", driver="", seen=0)
TWO, ONE_OF_TWO = node("GTX 1650", "RTX 3090", display=(0,)), node("RTX 3060", "RTX 3090", seen=1)


# build: what torch_build gives, or words of what it says.
@pytest.mark.parametrize(
    ("gpu", "told", "build"),
    [
        pytest.param(node(driver=""), {}, "cpu", id="no card"),
        pytest.param(NO_DRIVER, {}, "cpu", id="a card without a driver yet"),
        pytest.param(NEWEST, {"backend": "cpu"}, "cpu", id="told"),
        pytest.param(node("GTX 970", driver=GUIDES), {}, "cu126", id="Maxwell"),
        pytest.param(OLDER_CARD, {}, "cu126", id="Pascal with a new driver"),
        pytest.param(node("GTX 1650", driver=GUIDES), {}, "cu126", id="the guides' driver"),
        pytest.param(node("RTX 3060", driver="580.65.06"), {}, "cu130", id="the first driver of CUDA 13"),
        pytest.param(node("RTX 5090"), {}, "cu130", id="Blackwell"),
        pytest.param(node("GTX 1080", "RTX 4090"), {}, "cu126", id="the build that has code for both"),
        pytest.param(node("GT 1030", "RTX 5090", display=(0,)), {}, "cu130", id="the display's card does not train"),
        pytest.param(NEWEST, {"backend": "cu132"}, "cu132", id="who names a build gets it"),
        pytest.param(OLD_DRIVER, {}, f"cu126 needs driver 525.60.13 or later, and it has {LTS}", id="old driver"),
        pytest.param(node("RTX 5090", driver="570.86.10"), {}, "cu130 needs driver 580", id="Blackwell, driver 570"),
        pytest.param(node("GTX 1080", "RTX 5090"), {}, "say with training_cards which", id="no build for both"),
        pytest.param(KEPT, {"backend": "cu130"}, f"cu130 needs driver 580 or later, and it has {GUIDES}", id="pair"),
        pytest.param(OLDER_CARD, {"backend": "cu130"}, "no code for GTX 1080 (compute capability 6.1)", id="card"),
        pytest.param(NEWEST, {"backend": "cu118"}, "auto or one of cpu, cu126, cu130, cu132", id="no such build"),
        pytest.param(NEWEST, {"wanted": "GPU-9"}, "which is none of its cards", id="no such card"),
        # The driver that runs after the restart counts.
        pytest.param(NO_DRIVER, {"driver": "580"}, "cu130", id="nouveau has the card"),
        pytest.param(NO_DRIVER, {"driver": "535.183.01"}, "cu126", id="an older one comes"),
        pytest.param(OLD_DRIVER, {"driver": "580"}, "cu130", id="a newer one takes its place"),
        pytest.param(node("GTX 1080", driver="", seen=0), {"driver": "580"}, "cu126", id="Pascal, no driver yet"),
        pytest.param(
            node("GT 710", "RTX 3060", driver="", seen=0), {"driver": "580"}, "cu130", id="one for the monitor, too old"
        ),
        pytest.param(NO_DRIVER, {"driver": "580", "wanted": "none"}, "cpu", id="it shall train on its processor"),
        pytest.param(node("GT 710", driver="", seen=0), {}, "cpu", id="no driver will come"),
    ],
)  # fmt: skip
def test_a_node_gets_the_build_that_fits_cards_and_driver(gpu: Any, told: Any, build: str) -> None:
    found = CARDS.torch_build(gpu, **told)
    assert build in (found["problem"] or found["build"]), found
    assert bool(found["build"]) != bool(found["problem"])


@pytest.mark.parametrize(
    ("nodes", "builds"),
    [
        pytest.param([NEWEST, node("RTX 5090")], "cu130 cu130", id="all are new"),
        pytest.param([NEWEST, KEPT], "cu126 cu126", id="one PC with a kept older driver"),
        pytest.param([NEWEST, OLDER_CARD], "cu126 cu126", id="one PC with an older card"),
        pytest.param([NEWEST, node(driver="")], "cu130 cpu", id="one without a card"),
        pytest.param([NEWEST, (KEPT, "cpu")], "cu130 cpu", id="one that trains on its processor"),
        pytest.param([NEWEST, (NEWEST, "cu132")], "cu132 cu132", id="one that is told its build"),
        pytest.param([(OLDER_CARD, "cu126"), (node("RTX 5090"), "cu130")], "cu126 cu130", id="a person has said both"),
        pytest.param([(NEWEST, "auto", "releases/3f2a-cu126-91bc")], "cu126", id="looked at alone, it keeps its build"),
        pytest.param([(NEWEST, "auto", "releases/3f2a-cpu-91bc")], "cu130", id="it has a card now"),
        pytest.param([(node("RTX 5090"), "auto", "releases/3f2a-cu126-91bc")], "cu130", id="another card"),
        pytest.param([OLDER_CARD, node("RTX 5090"), node(driver="")], "? ? cpu", id="none in common"),
        pytest.param([(OLDER_CARD, "cu126"), node("RTX 5090")], "cu126 ?", id="none in common with what is told"),
    ],
)  # fmt: skip
def test_all_cards_of_a_cluster_get_the_newest_build_that_all_can_use(nodes: list[Any], builds: str) -> None:
    """Another build brings another NCCL, and those refuse each other."""
    told = [(*of, "")[:3] if isinstance(of, tuple) else (of, "auto", "") for of in nodes]
    found = CARDS.torch_builds({
        str(number): {"gpu": gpu, "backend": backend, "wanted": "free", "driver": "", "release": release}
        for number, (gpu, backend, release) in enumerate(told)
    })  # fmt: skip
    assert " ".join(of["build"] or "?" for of in found.values()) == builds
    assert [bool(of["problem"]) for of in found.values()] == [build == "?" for build in builds.split()]


@pytest.mark.parametrize(
    ("gpu", "wanted", "names", "left_out"),
    [
        pytest.param(node(driver=""), "free", "", "", id="no card"),
        pytest.param(node("RTX 3060", display=(0,)), "free", "RTX 3060", "", id="the only one, with a display"),
        pytest.param(TWO, "free", "RTX 3090", "GTX 1650 (GPU-0000-1650)", id="the display's is left out"),
        pytest.param(TWO, ["all"], "GTX 1650, RTX 3090", "", id="all"),
        pytest.param(TWO, "gpu-0000", "GTX 1650", "RTX 3090 (GPU-1000-3090)", id="by the beginning of a UUID"),
        pytest.param(TWO, "none", "", "GTX 1650 (GPU-0000-1650), RTX 3090 (GPU-1000-3090)", id="none"),
        pytest.param(ONE_OF_TWO, "GPU-0000", "RTX 3060", "", id="the other one, which is not named, fell off"),
        pytest.param(node("RTX 3060", "GT 710", seen=1), "free", "RTX 3060", "", id="too old, beside one that works"),
        pytest.param(node("GT 710", driver="", seen=0), "none", "", "", id="none, and the only one is too old"),
    ],
)  # fmt: skip
def test_the_cards_that_train(gpu: dict[str, Any], wanted: Any, names: str, left_out: str) -> None:
    found = CARDS.training_cards(gpu, wanted)
    assert (", ".join(card["name"] for card in found["cards"]), ", ".join(found["left_out"])) == (
        names,
        left_out,
    )
    assert found["problem"] == ""


@pytest.mark.parametrize(
    ("gpu", "wanted", "words"),
    [
        pytest.param(NO_DRIVER, "free", "(10de:2503 at 0000:00:00.0), but no NVIDIA driver is loaded", id="no driver"),
        pytest.param(node("RTX 3060", seen=0), "free", f"but driver {NEW} does not answer", id="a driver that hangs"),
        pytest.param(ONE_OF_TWO, "all", "one of its 2 NVIDIA cards (10de:2204 at 0000:01:00.0)", id="one fell off"),
        pytest.param(NO_DRIVER, "GPU-0000", "no NVIDIA driver is loaded", id="told, no driver"),
        pytest.param(TWO, "GPU-9", "GPU-9, which is none of its cards. There are: GTX 1650 (GPU-0000", id="unknown"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_train_is_named(gpu: dict[str, Any], wanted: str, words: str) -> None:
    found = CARDS.training_cards(gpu, wanted)
    assert found["cards"] == [] and words in found["problem"]


def test_whoever_says_so_trains_without_the_card_that_has_no_driver() -> None:
    assert CARDS.training_cards(NO_DRIVER, without_driver=True)["problem"] == ""
    half = CARDS.training_cards(ONE_OF_TWO, without_driver=True)
    assert [card["name"] for card in half["cards"]] == ["RTX 3060"]
