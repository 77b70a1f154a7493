"""What a launch makes of nodes with graphics cards: who trains, what is refused, and what each rank is told.

No machine that runs these tests has a card. The recorded nodes are synthetic, in the shape that gpu_facts gives.
"""

from typing import Any

import tree
from expressions import filled_in, loaded, says

group = tree.plugin("filter/process_group")
ADDRESS = "192.168.50.20"
RUN = {
    "trainer_run": "probe", "trainer_preset": "gpt2-nano", "trainer_corpus": "es", "trainer_language": "en",
    "trainer_overrides": {"save_every": 20}, "__trainer_launch": "20261125-1",
}  # fmt: skip


def card(number: int, name: str, capability: str, display: bool = False) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{number}a1b", "name": name, "pci": f"0000:0{number}:00.0", "compute_capability": capability,
        "display_active": display, "memory_mib": {"3060": 12288, "3090": 24576, "1650": 4096}.get(name[-4:], 8192),
    }  # fmt: skip


RTX3060, RTX3090, GTX1650 = (
    card(1, "RTX 3060", "8.6", display=True), card(2, "RTX 3090", "8.6"), card(1, "GTX 1650", "7.5", display=True),
)  # fmt: skip


def node(
    name: str, build: str, *smi: dict[str, Any], silent: str = "", of: str = "8.6", trainer: str = "3f2a", **how: Any
) -> Any:  # fmt: skip
    """A node with this trainer in this build; `silent`: the number of one more card that no driver knows."""
    cards = [{"pci": known["pci"], "device_id": "10de:2504", "capability": "8.6"} for known in smi]
    if silent:
        cards.append({"pci": "0000:05:00.0", "device_id": f"10de:{silent}", "capability": of})
    facts = {
        "gpu": {"cards": cards, "driver": "580.95.05" if smi else "", "smi": list(smi), "elsewhere": ""},
        "all_ipv4_addresses": [ADDRESS],
    }
    release = f"{trainer}-{build}-91bc" if trainer else ""
    return group.group_member(facts, name, release, how.pop("address", ADDRESS), **how)


def variables(members: list[Any], *records: str) -> dict[str, Any]:
    """What a play knows of these nodes. records: what each of them has said of the run's last step."""
    names = [one["name"] for one in members]
    said = [{"stdout": text} for text in [*records, *[""] * len(members)]]
    of = [
        {"__trainer_member": one, "__trainer_record": text} for one, text in zip(members, said, strict=False)
    ]
    return {**RUN, "ansible_play_hosts_all": names, "hostvars": dict(zip(names, of, strict=True))}


def requested(members: list[Any], name: str, *records: str, **how: Any) -> list[dict[str, str]]:
    """The variables of each rank of a node."""
    known = {**variables(members, *records), "inventory_hostname": name, **how}
    (own,) = (one for one in members if one["name"] == name)
    texts = [
        says("trainer", "lookup('ansible.builtin.template', 'rank.env.j2')", item=local, __trainer_member=own, **known)
        for local in range(own["ranks"])
    ]  # fmt: skip
    return [
        dict(line.split("=", 1) for line in text.splitlines() if not line.startswith("#")) for text in texts
    ]


def holds(tasks: str, name: str, **known: Any) -> bool:
    """Whether an assertion of the role holds."""
    (task,) = (one for one in loaded(f"roles/trainer/tasks/{tasks}.yml") if one["name"] == name)
    that = f"{{{{ {task['ansible.builtin.assert']['that']} }}}}"
    own = task.get("vars", {})
    return bool(filled_in(that, {**known, **own}))


def test_every_card_gets_a_rank_and_the_displays_is_left_out() -> None:
    members = [
        node("node0", "cu130", RTX3060, silent="128b", of="3.5"),  # a GT 710 beside it, for the monitor
        node("node1", "cu130", GTX1650, RTX3090),
        node("node2", "cu126", GTX1650, RTX3090, wanted="all"),
        node("node3", "cpu"),
    ]
    assert group.group_problems(members) == []
    ranks = [requested(members, one["name"]) for one in members]
    assert [[rank["RANK"] for rank in of] for of in ranks] == [["0"], ["1"], ["2", "3"], ["4"]]
    all_alike = {"WORLD_SIZE": "5", "AURA_PEERS": ",".join([ADDRESS] * 5), "AURA_LAUNCH": "20261125-1"}
    for rank in (rank for of in ranks for rank in of):
        assert rank | all_alike == rank
    cards = [of[0]["CUDA_VISIBLE_DEVICES"] for of in ranks]
    assert cards == ["GPU-1a1b", "GPU-2a1b", "GPU-1a1b,GPU-2a1b", "-1"]
    assert group.group_notes(members) == [
        "Unlike builds of torch: cpu on node3; cu126 on node2; cu130 on node0, node1.",
        "node1 does not train on GTX 1650 (GPU-1a1b) (training_cards says which cards train).",
    ]


def test_a_rank_is_told_what_to_do_and_no_network_card() -> None:
    """The variables are written at the launch, and the run may outlive the name of a card."""
    (rank,) = requested([node("node0", "cpu")], "node0")
    assert rank["AURA_TRAIN_ARGUMENTS"] == (
        "--preset gpt2-nano --corpus /var/lib/aura/corpora/es --run-dir /var/lib/aura/runs/probe --backend auto "
        "--save-every 20"
    )
    assert rank == rank | {
        "MASTER_ADDR": ADDRESS, "AURA_ADDRESS": ADDRESS, "AURA_MEMORY": "/dev/shm/aura-train", "AURA_LANG": "en",
        "AURA_RELEASE": "/opt/aura/releases/3f2a-cpu-91bc",
        "AURA_PEERS": ADDRESS,  # who is left of an earlier launch looks there
    }  # fmt: skip
    assert not {"OMP_NUM_THREADS", "AURA_IMAGE", "AURA_STEP_TOKENS"} & set(rank)
    assert not [name for name in rank if name.endswith("_SOCKET_IFNAME")]


def test_what_a_node_says_writes_no_line_for_the_others() -> None:
    """systemd ends a value at a line break, in quotes too."""
    evil = "auto\nLD_PRELOAD=/srv/aura/x.so"
    for preset, is_one in ((evil, False), ("gpt2-nano", True)):
        words = says("trainer", "__trainer_arguments", **RUN | {"trainer_preset": preset})
        one_line = "Assert that the arguments are one line"
        assert holds("launch", one_line, __trainer_arguments=words) is is_one
    for preset, settings, is_model in (
        (evil, {}, False),
        ("qwen3-125m\n", {}, False),
        ("qwen3-125m", {"run_dir": "/etc/aura"}, False),
        ("qwen3-125m", {"batch_size": 4, "compile": True}, True),
    ):
        auto = {"preset": preset, "settings": settings}
        model = "Assert that it is a model, and nothing else"
        assert holds("size", model, __trainer_auto=auto) is is_model


def test_all_that_stands_in_the_way_is_said_at_once() -> None:
    members = [
        node("node0", "cu130", RTX3060),
        node("node1", "cpu", silent="2504"),
        node("node2", "cpu", RTX3090),
        node("node3", "cu126", card(1, "RTX 5090", "12.0")),
        node("node4", "cu130", RTX3090, wanted=["GPU-9"]),
        node("node5", "cu130", RTX3090, silent="2504"),
        node("node6", "cpu", address="192.168.50.77"),
        node("node7", "cpu", trainer=""),
        node("node8", "cpu", silent="2504", trainer=""),
    ]
    said = group.group_problems(members)
    for name, words in {
        "node1": "it has an NVIDIA card (10de:2504 at 0000:05:00.0), but no NVIDIA driver is loaded",
        "node2": "its torch is the build for processors, though its driver works",
        "node3": "no build of torch fits (cu126 has no code for RTX 5090",
        "node4": "training_cards names GPU-9, which is none of its cards",
        "node5": "nvidia-smi does not see one of its 2 NVIDIA cards (10de:2504 at 0000:05:00.0)",
        "node6": "no network card has the address 192.168.50.77",
        "node7": "it has no release of the trainer",
        "node8": "it has no release of the trainer",
    }.items():
        (problem,) = (text for text in said if text.startswith(f"{name} cannot train as it is: {words}"))
        ways = {"node1": " Without that card: -e cpu=true", "node5": " Without that card: -e cpu=true"}
        # The others would not be helped by it.
        assert problem.endswith(f"Without this node: --limit 'cluster:!{name}'.{ways.get(name, '')}")


def test_another_trainer_is_refused_and_is_nothing_to_a_script() -> None:
    members = [node("node0", "cu130", RTX3060), node("node1", "cu130", RTX3060, trainer="0000")]
    (said,) = group.group_problems(members)
    assert "node0 has 3f2a-cu130-91bc, node1 has 0000-cu130-91bc" in said
    assert group.group_problems(members, same_trainer=False) == []


def test_a_run_that_has_begun_keeps_its_step_unless_another_one_is_asked_for() -> None:
    members = [node("node0", "cpu"), node("node1", "cpu"), node("node2", "cpu")]

    def step(*records: str, **overrides: int) -> int:
        known = variables(members, *records) | {"trainer_overrides": overrides}
        return int(says("trainer", "__trainer_step_tokens", **known))

    said = ("1795400020500000000 163840", "", "1795400010000000000 65536")
    assert step(*said, lr=1) == step(*said[::-1]) == 163840
    assert step(*said, global_batch_tokens=1) == step(*said, **{"global-batch-tokens": 1}) == 0
    assert step() == 0  # a new run
    (rank,) = requested(members, "node0", *said)
    assert rank["AURA_STEP_TOKENS"] == "163840"
