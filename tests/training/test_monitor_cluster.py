"""The table of `aura monitor --cluster`: what is made of what nodes say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from aura.commands import monitor
from aura.commands.monitor_cluster import read_one, table
from aura.errors import ConfigError

GPU = {
    "index": 0, "name": "NVIDIA RTX 4090", "load_percent": 97, "used_bytes": 12 * 2**30, "total_bytes": 24 * 2**30,
    "error": "", "temperature": 71, "power_watts": 321.4,
}  # fmt: skip
LOST = {**dict.fromkeys(GPU), "index": 1, "name": "", "error": "GPU is lost"}
LOAD = {
    "cpu_percent": 12.5, "ram_used_bytes": 8 * 2**30, "ram_total_bytes": 64 * 2**30, "gpus": [],
    "links": {"enp3s0": {"speed": 1000, "sent": 420.0, "received": 398.4}, "wg0": {"speed": 0, "sent": 0.0}},
}  # fmt: skip


HOSTS = """
cluster:
  hosts:
    node0: {ansible_connection: local, ansible_become: false, ansible_python_interpreter: /usr/bin/python3}
    node1: {ansible_host: missing.invalid}
"""


def rank(number: int, **said: Any) -> dict[str, Any]:
    known = {
        "state": "training", "step": 40, "max_steps": 900, "loss": 3.21987, "tokens_per_second": 15400.3, "eta": 7500.0,
        "updated": 1000.0, "setting": "strategy=sharded wire=int4",
    }  # fmt: skip
    return {"rank": number, "world_size": 3, "status": known | said}


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AURA_LANG", "en")


def test_every_node_and_card_has_a_line() -> None:
    lines = table({
        "node0": [{**LOAD, "gpus": [GPU, LOST]}, [rank(0), rank(1, loss=None, eta=None)], 1001],
        "node1": [LOAD, [rank(2)], 1200],
        "node2": "Connection refused",
    })  # fmt: skip
    assert [" ".join(line.split()) for line in lines] == [
        "node device load memory °C W link Mbit/s rank state step loss tokens/s ETA",
        "node0 NVIDIA RTX 4090 97% 12.0 / 24.0 GB 71 321 420+398 / 1000 0/3 training 40/900 3.2199 15400 2:05",
        "GPU is lost - - - - - 1/3 training 40/900 - 15400 -",
        "node1 CPU 12% 8.0 / 64.0 GB - - 420+398 / 1000 2/3 training 40/900 3.2199 15400 2:05 stale 200 s",
        "node2 no answer: Connection refused",
        "strategy=sharded wire=int4",
    ]


def test_a_mixture_is_validated_by_part() -> None:
    parts = {"fineweb2-es": 0.9302, "fineweb-edu": 0.8704}
    said = {"bits_per_byte": 0.91249, "bits_per_byte_of_parts": parts}
    # What a rank said before it died does not count beside one that is further.
    old = {"bits_per_byte": 2.0, "bits_per_byte_of_parts": {"fineweb2-es": 2.0}, "step": 1}
    ranks = [rank(0, **old), rank(1, **said)]
    wanted = "Validation: 0.9125 bits per byte (fineweb2-es 0.9302, fineweb-edu 0.8704)."
    assert table({"node0": [LOAD, ranks[:1], 1000], "node1": [LOAD, ranks[1:], 1000]})[-2] == wanted


UUIDS = ["GPU-aaaa", "GPU-bbbb", "GPU-cccc"]


@pytest.mark.parametrize(
    ("uuids", "ranks", "wanted"),
    [
        pytest.param(UUIDS, ["GPU-bbbb"], {"card 0": "-/-", "card 1": "0/3", "card 2": "-/-"}, id="0 is the display's"),
        pytest.param(UUIDS, ["GPU-cccc", "GPU-aaaa"], {"card 0": "1/3", "card 1": "-/-", "card 2": "0/3"}, id="order"),
        pytest.param(UUIDS, [""], {**dict.fromkeys(("card 0", "card 1", "card 2"), "-/-"), "CPU": "0/3"}, id="no card"),
        pytest.param(
            ["GPU-aaaa", "", "GPU-cccc"], ["GPU-bbbb", "GPU-cccc"],
            {"card 0": "-/-", "card 1": "0/3", "card 2": "1/3"}, id="1 is lost",
        ),
        pytest.param(UUIDS, [None], {"card 0": "0/3", "card 1": "-/-", "card 2": "-/-"}, id="an older rank-status"),
    ],
)  # fmt: skip
def test_a_rank_stands_beside_its_own_card(
    uuids: list[str], ranks: list[str | None], wanted: dict[str, str]
) -> None:
    said = [rank(number) | ({} if card is None else {"card": card}) for number, card in enumerate(ranks)]
    cards = [GPU | {"index": n, "name": f"card {n}", "uuid": uuid} for n, uuid in enumerate(uuids)]
    _, *lines = table({"node0": [{**LOAD, "gpus": cards}, said, 1001]})
    assert dict(re.findall(r"(card \d|CPU).* (\S+/[3-])  ", "\n".join(lines))) == wanted


def test_a_node_without_a_trainer_has_a_line_too() -> None:
    _, line = table({"node0": [None, [], 1000]})
    assert line.split()[:2] == ["node0", "CPU"]


def test_a_node_that_prints_more_than_json_has_a_line_too() -> None:
    assert read_one({"stdout": "[null, [], 1000]"}) == [None, [], 1000]
    _, line = table({"node0": read_one({"stdout": "Disk is full\n[null, [], 1000]"})})
    assert line.startswith("node0    no answer: 'Disk is full")


def test_elsewhere_than_on_the_controller_it_says_where_it_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"There is no ansible\.cfg here"):
        monitor.main(["--cluster", "--once"])
    (tmp_path / "ansible.cfg").touch()
    with pytest.raises(ConfigError, match=r"(?s)Ansible has failed: .*nowhere"):
        monitor.main(["--cluster", "--once", "-i", "nowhere"])


def test_what_the_nodes_say_is_asked_by_ansible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """node0 has no trainer and is this machine; node1 is nobody."""
    (tmp_path / "ansible.cfg").write_text("[defaults]\ninterpreter_python = auto_silent\n")
    (tmp_path / "hosts.yml").write_text(HOSTS)
    monkeypatch.chdir(tmp_path)
    assert monitor.main(["--cluster", "--once", "-i", "hosts.yml"]) == 0
    _, node0, node1 = capsys.readouterr().out.splitlines()
    assert node0.split()[:2] == ["node0", "CPU"]
    assert node1.startswith("node1    no answer: ") and "missing.invalid" in node1
