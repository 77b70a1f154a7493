"""Which cards of a node train, and which build of torch they get: a table of nodes.

The driver versions are ones that NVIDIA has released. The nodes are synthetic, in the shape of the fact gpu (its own
test reads what nvidia-smi writes), with what NVIDIA's list "CUDA GPUs" says of a card's compute capability.
"""

from __future__ import annotations

from typing import Any

import pytest
import tree

CARDS = tree.plugin("filter/graphics_cards")
GPU = tree.plugin("module_utils/node_gpu")
CAPABILITY = {
    "GT 710": "3.5", "GTX 780": "3.5", "GTX 970": "5.2", "GT 1030": "6.1", "GTX 1080": "6.1", "TITAN V": "7.0",
    "GTX 1650": "7.5", "RTX 3060": "8.6", "RTX 3090": "8.6", "RTX 4090": "8.9", "H100": "9.0", "B200": "10.0",
    "RTX 5090": "12.0",
}  # fmt: skip
# PCI ID database; the first two are too old for torch.
DEVICE = {
    "GT 710": "10de:128b", "GTX 780": "10de:1004", "GTX 970": "10de:13c2", "GTX 1080": "10de:1b80",
    "GT 1030": "10de:1d01", "RTX 5090": "10de:2b85",
}  # fmt: skip
OLD, LTS, GUIDES, NEW = "470.256.02", "525.60.11", "535.183.01", "580.95.05"


def node(
    *names: str, driver: str = NEW, display: tuple[int, ...] = (), seen: int | None = None
) -> dict[str, Any]:
    """A node with these cards; `display`: which of them drive one, `seen`: how many nvidia-smi sees."""
    bus, smi = [], []
    for number, name in enumerate(names):
        pci, device = f"0000:{number:02x}:00.0", DEVICE.get(name, f"10de:25{number:02x}")
        generation = GPU.generation(device)
        bus.append({
            "pci": pci, "boot_vga": number in display, "device_id": device, "generation": generation,
            "capability": GPU.CAPABILITY[generation],
        })  # fmt: skip
        smi.append({
            "uuid": f"GPU-{number}000-{name.replace(' ', '')}", "name": name, "pci": pci,
            "compute_capability": CAPABILITY[name], "memory_mib": 8192, "display_active": number in display,
        })  # fmt: skip
    return {"cards": bus, "driver": driver, "smi": smi if seen is None else smi[:seen], "elsewhere": ""}


NEWEST, KEPT, OLDER_CARD = node("RTX 3060"), node("RTX 3060", driver=GUIDES), node("GTX 1080")
OLD_DRIVER, NO_DRIVER = node("RTX 3060", driver=OLD), node("RTX 3060", driver="", seen=0)
TWO = node("GTX 1650", "RTX 3090", display=(0,))
ONE_OF_TWO = node("RTX 3060", "RTX 3090", seen=1)


@pytest.mark.parametrize(
    ("gpu", "build"),
    [
        pytest.param(node(driver=""), "cpu", id="no card"),
        pytest.param(NO_DRIVER, "cpu", id="a card without a driver yet"),
        pytest.param(node("GTX 970", driver=GUIDES), "cu126", id="Maxwell"),
        pytest.param(OLDER_CARD, "cu126", id="Pascal with a new driver"),
        pytest.param(node("TITAN V"), "cu126", id="Volta"),
        pytest.param(node("GTX 1650", driver=GUIDES), "cu126", id="Turing with the guides' driver"),
        pytest.param(node("GTX 1650"), "cu130", id="Turing"),
        pytest.param(node("RTX 3060", driver="525.60.13"), "cu126", id="the first driver of CUDA 12"),
        pytest.param(node("RTX 3060", driver="579.99"), "cu126", id="just before CUDA 13"),
        pytest.param(node("RTX 3060", driver="580.65.06"), "cu130", id="the first driver of CUDA 13"),
        pytest.param(node("RTX 4090"), "cu130", id="Ada"),
        pytest.param(node("H100", driver=GUIDES), "cu126", id="Hopper"),
        pytest.param(node("B200"), "cu130", id="Blackwell for data centres"),
        pytest.param(node("RTX 5090"), "cu130", id="Blackwell"),
        pytest.param(node("GTX 1080", "RTX 4090"), "cu126", id="the build that has code for both"),
        pytest.param(node("GT 1030", "RTX 5090", display=(0,)), "cu130", id="the display's card does not train"),
    ],
)  # fmt: skip
def test_auto_takes_the_build_that_fits_cards_and_driver(gpu: dict[str, Any], build: str) -> None:
    assert CARDS.torch_build(gpu) == {"build": build, "problem": ""}
    assert CARDS.torch_build(gpu, build) == {"build": build, "problem": ""}  # who names it gets it
    assert CARDS.torch_build(gpu, "cpu") == {"build": "cpu", "problem": ""}


@pytest.mark.parametrize(
    ("gpu", "backend", "words"),
    [
        pytest.param(OLD_DRIVER, "auto", f"cu126 needs driver 525.60.13 or later, and it has {OLD}", id="old"),
        pytest.param(
            node("RTX 3060", driver=LTS), "auto", f"needs driver 525.60.13 or later, and it has {LTS}",
            id="just before",
        ),
        pytest.param(node("GTX 780", driver=OLD), "auto", "no code for GTX 780 (compute capability 3.5", id="Kepler"),
        pytest.param(
            node("RTX 5090", driver="570.86.10"), "auto", "cu130 needs driver 580", id="Blackwell, driver 570"
        ),
        pytest.param(node("GTX 1080", "RTX 5090"), "auto", "say with training_cards which", id="no build for both"),
        pytest.param(
            KEPT, "cu130",
            f"torch_backend cu130 needs driver 580 or later, and it has {GUIDES}: take torch_backend cu126", id="pair",
        ),
        pytest.param(OLDER_CARD, "cu130", "GTX 1080 (compute capability 6.1; cu130: from 7.5 on): take", id="card"),
        pytest.param(
            node("RTX 5090"), "cu126", "12.0; cu126: from 5.0 to 9.0): take torch_backend cu130", id="too new"
        ),
        pytest.param(node(driver=""), "cu126", "no NVIDIA card: take cpu, or auto", id="no card"),
        pytest.param(NEWEST, "cuda", "auto or one of cpu, cu126, cu130, cu132", id="unknown word"),
        pytest.param(OLD_DRIVER, "cu118", "has to be auto or one of", id="a build that 2.13 has not"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_pair(gpu: dict[str, Any], backend: str, words: str) -> None:
    found = CARDS.torch_build(gpu, backend)
    assert found["build"] == ""
    assert words in found["problem"]


@pytest.mark.parametrize(
    ("gpu", "wanted", "coming", "build"),
    [
        pytest.param(NO_DRIVER, "free", "580", "cu130", id="nouveau has the card"),
        pytest.param(NO_DRIVER, "free", "535.183.01", "cu126", id="an older one is there"),
        pytest.param(OLD_DRIVER, "free", "580", "cu130", id="a newer one takes its place"),
        pytest.param(node("RTX 5090", driver="570.86.10"), "free", "580", "cu130", id="Blackwell"),
        pytest.param(node("GTX 1080", driver="", seen=0), "free", "580", "cu126", id="Pascal"),
        pytest.param(
            node("GT 710", "RTX 3060", driver="", seen=0), "free", "580", "cu130", id="a card for the monitor, too old"
        ),
        pytest.param(
            node("GT 1030", "RTX 3060", driver="", seen=0, display=(0,)), "free", "580", "cu130", id="a monitor's"
        ),
        pytest.param(NO_DRIVER, "none", "580", "cpu", id="it shall train on its processor"),
        pytest.param(node("GT 710", driver="", seen=0), "free", "", "cpu", id="no driver will come"),
        pytest.param(node("GT 710", driver="", seen=0), "none", "", "cpu", id="nor is one asked for"),
    ],
)  # fmt: skip
def test_the_build_is_for_the_driver_that_runs_after_the_restart(
    gpu: dict[str, Any], wanted: str, coming: str, build: str
) -> None:
    assert CARDS.torch_build(gpu, wanted=wanted, driver=coming) == {"build": build, "problem": ""}


@pytest.mark.parametrize(
    ("gpu", "build", "driver", "words"),
    [
        pytest.param(NEWEST, "cu132", "", "", id="nothing is known that would not fit"),
        pytest.param(NO_DRIVER, "cu126", "", "", id="the driver comes later"),
        pytest.param(OLD_DRIVER, "cu130", "580", "", id="the driver is going to be replaced"),
        pytest.param(OLD_DRIVER, "cu130", "535.183.01", "535.183.01", id="by one that is too old"),
        pytest.param(OLD_DRIVER, "cu118", "580", "cu118", id="no build"),
        pytest.param(node("GTX 1080", driver=OLD), "cu130", "580", "no code for GTX 1080", id="no code"),
    ],
)  # fmt: skip
def test_who_names_a_build_gets_it_where_it_will_fit(
    gpu: dict[str, Any], build: str, driver: str, words: str
) -> None:
    found = CARDS.torch_build(gpu, build, driver=driver)
    assert words in found["problem"] if words else found == {"build": build, "problem": ""}


def cluster(**nodes: dict[str, Any] | tuple[dict[str, Any], str]) -> dict[str, dict[str, str]]:
    """Nodes with a torch_backend, or with auto."""
    told = {name: of if isinstance(of, tuple) else (of, "auto") for name, of in nodes.items()}
    return CARDS.torch_builds({
        name: {"gpu": gpu, "backend": backend, "wanted": "free", "driver": ""} for name, (gpu, backend) in told.items()
    })  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "release", "build"),
    [
        (NEWEST, "releases/3f2a-cu126-91bc", "cu126"),
        (NEWEST, "", "cu130"),
        (NEWEST, "releases/3f2a-cpu-91bc", "cu130"),  # it has a card now
        (node("RTX 5090"), "releases/3f2a-cu126-91bc", "cu130"),  # another card
        (NEWEST, "releases/odd", "cu130"),
    ],
)
def test_a_node_that_is_looked_at_alone_keeps_its_build_where_it_fits(
    gpu: dict[str, Any], release: str, build: str
) -> None:
    """The older card of another node, for which it has that build, is not seen."""
    of = {"gpu": gpu, "backend": "auto", "wanted": "free", "driver": "", "release": release}
    assert CARDS.torch_builds({"node1": of})["node1"] == {"build": build, "problem": ""}
    assert CARDS.torch_builds({"node1": {**of, "backend": "cu130"}})["node1"]["build"] == "cu130"


@pytest.mark.parametrize(
    ("nodes", "builds"),
    [
        pytest.param({"a": NEWEST, "b": node("RTX 5090")}, "cu130 cu130", id="all are new"),
        pytest.param({"a": NEWEST, "b": KEPT}, "cu126 cu126", id="one PC with a kept older driver"),
        pytest.param({"a": NEWEST, "b": OLDER_CARD}, "cu126 cu126", id="one PC with an older card"),
        pytest.param({"a": NEWEST, "b": node(driver="")}, "cu130 cpu", id="one without a card"),
        pytest.param({"a": NEWEST, "b": (KEPT, "cpu")}, "cu130 cpu", id="one that trains on its processor"),
        pytest.param({"a": NEWEST, "b": (NEWEST, "cu126")}, "cu126 cu126", id="one that is told its build"),
        pytest.param({"a": NEWEST, "b": (NEWEST, "cu132")}, "cu132 cu132", id="one that is told the newest build"),
        pytest.param(
            {"a": (OLDER_CARD, "cu126"), "b": (node("RTX 5090"), "cu130")}, "cu126 cu130", id="a person has said both"
        ),
    ],
)  # fmt: skip
def test_all_cards_of_a_cluster_get_the_newest_build_that_all_can_use(
    nodes: dict[str, Any], builds: str
) -> None:
    """Another build brings another NCCL, and those refuse each other."""
    found = cluster(**nodes)
    assert not any(of["problem"] for of in found.values())
    assert " ".join(of["build"] for of in found.values()) == builds


def test_cards_without_a_build_in_common_are_named() -> None:
    found = cluster(a=OLDER_CARD, b=node("RTX 5090"), c=node(driver=""))
    assert "(a: cu126; b: cu130 or cu132)" in found["a"]["problem"] == found["b"]["problem"]
    assert found["c"] == {"build": "cpu", "problem": ""}
    told = cluster(a=(OLDER_CARD, "cu126"), b=node("RTX 5090"))
    assert (told["a"]["problem"], bool(told["b"]["problem"])) == ("", True)


@pytest.mark.parametrize(
    ("gpu", "wanted", "names", "left_out"),
    [
        pytest.param(node(driver=""), "free", [], [], id="no card"),
        pytest.param(NEWEST, "free", ["RTX 3060"], [], id="one card"),
        pytest.param(node("RTX 3060", display=(0,)), "free", ["RTX 3060"], [], id="the only one, with a display"),
        pytest.param(TWO, "free", ["RTX 3090"], ["GTX 1650 (GPU-0000-GTX1650)"], id="the display's is left out"),
        pytest.param(TWO, "all", ["GTX 1650", "RTX 3090"], [], id="all"),
        pytest.param(TWO, ["all"], ["GTX 1650", "RTX 3090"], [], id="all, as a list"),
        pytest.param(TWO, "gpu-0000", ["GTX 1650"], ["RTX 3090 (GPU-1000-RTX3090)"], id="by the beginning of a UUID"),
        pytest.param(TWO, ["GPU-1000-RTX3090", "GPU-0000-GTX1650"], ["RTX 3090", "GTX 1650"], [], id="in that order"),
        pytest.param(TWO, "none", [], ["GTX 1650 (GPU-0000-GTX1650)", "RTX 3090 (GPU-1000-RTX3090)"], id="none"),
        pytest.param(
            node("RTX 3060", "RTX 3060", display=(0, 1)), "free", ["RTX 3060", "RTX 3060"], [],
            id="all drive a display",
        ),
        pytest.param(ONE_OF_TWO, "GPU-0000", ["RTX 3060"], [], id="the other one, which is not named, fell off"),
        # A GT 710 for the monitor, which driver 580 does not know and which is too old for torch, stops nobody.
        pytest.param(node("RTX 3060", "GT 710", seen=1), "free", ["RTX 3060"], [], id="too old, beside one that works"),
        pytest.param(node("RTX 3060", "GT 710", seen=1), "all", ["RTX 3060"], [], id="all, and one is too old"),
        pytest.param(node("GT 710", driver="", seen=0), "none", [], [], id="none, and the only one is too old"),
    ],
)  # fmt: skip
def test_the_cards_that_train(
    gpu: dict[str, Any], wanted: Any, names: list[str], left_out: list[str]
) -> None:
    found = CARDS.training_cards(gpu, wanted)
    names_found = [card["name"] for card in found["cards"]]
    assert (names_found, found["left_out"], found["problem"]) == (names, left_out, "")


@pytest.mark.parametrize(
    ("gpu", "wanted", "words"),
    [
        pytest.param(
            NO_DRIVER, "free",
            "it has one NVIDIA card (10de:2500 at 0000:00:00.0), but no NVIDIA driver is loaded", id="no driver",
        ),
        pytest.param(node("RTX 3060", seen=0), "free", f"but driver {NEW} does not answer", id="a driver that hangs"),
        pytest.param(ONE_OF_TWO, "free", "does not see 10de:2501 at 0000:01:00.0", id="one fell off"),
        pytest.param(ONE_OF_TWO, "all", "2 NVIDIA cards, but", id="one of all fell off"),
        pytest.param(NO_DRIVER, "GPU-0000", "no NVIDIA driver is loaded", id="told, no driver"),
        pytest.param(TWO, "GPU-9", "GPU-9, which is none of its cards. There are: GTX 1650 (GPU-0000", id="unknown"),
        pytest.param(TWO, "GPU-", "means several of its cards", id="ambiguous"),
        pytest.param(TWO, "", "is none of its cards", id="empty"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_train_is_named(gpu: dict[str, Any], wanted: str, words: str) -> None:
    found = CARDS.training_cards(gpu, wanted)
    assert found["cards"] == []
    assert words in found["problem"]


def test_whoever_says_so_trains_without_the_card_that_has_no_driver() -> None:
    assert CARDS.training_cards(NO_DRIVER, without_driver=True)["problem"] == ""
    half = CARDS.training_cards(ONE_OF_TWO, without_driver=True)
    assert [card["name"] for card in half["cards"]] == ["RTX 3060"]
