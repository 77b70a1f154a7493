"""The table of playbooks/monitor.yml, and the units that bring a person news: what is made of what nodes say."""

from typing import Any

import pytest
import tree
from expressions import filled_in, says

GPU = {
    "index": 0, "name": "NVIDIA RTX 4090", "load_percent": 97, "used_bytes": 12 * 2**30, "total_bytes": 24 * 2**30,
    "error": "", "temperature": 71, "power_watts": 321.4,
}  # fmt: skip
LOST = {**dict.fromkeys(GPU), "index": 1, "name": "", "error": "GPU is lost"}
LOAD = {
    "cpu_percent": 12.5, "ram_used_bytes": 8 * 2**30, "ram_total_bytes": 64 * 2**30, "gpus": [],
    "links": {"enp3s0": {"speed": 1000, "sent": 420.0, "received": 398.4}, "wg0": {"speed": 0, "sent": 0.0}},
}  # fmt: skip


def rank(number: int, **said: Any) -> dict[str, Any]:
    known = {
        "state": "training", "step": 40, "max_steps": 900, "loss": 3.21987, "tokens_per_second": 15400.3, "eta": 7500.0,
        "updated": 1000.0, "setting": "strategy=sharded wire=int4",
    }  # fmt: skip
    return {"rank": number, "world_size": 3, "status": known | said}


def table(nodes: dict[str, Any]) -> list[str]:
    text = (tree.ROOT / "playbooks/templates/monitor.j2").read_text(encoding="utf-8")
    return [line for line in str(filled_in(text, {"monitor_nodes": nodes})).splitlines() if line.strip()]


def test_every_node_and_card_has_a_line() -> None:
    head, zero, lost, processor, silent, setting = table(
        {
            "node0": [{**LOAD, "gpus": [GPU, LOST]}, [rank(0), rank(1, loss=None, eta=None)], 1001],
            "node1": [LOAD, [rank(2)], 1200],
            "node2": None,
        }
    )
    for line, wanted in (
        (head, "node device load memory °C W link Mbit/s rank state step loss tokens/s ETA"),
        (
            zero,
            "node0 NVIDIA RTX 4090 97% 12.0 / 24.0 GB 71 321 420+398 of 1000 0/3 training 40/900 3.2199 15400 2:05",
        ),
        (lost, "GPU is lost - - - - - 1/3 training 40/900 - 15400 -"),
        (
            processor,
            "node1 CPU 12% 8.0 / 64.0 GB - - 420+398 of 1000 2/3 training 40/900 3.2199 15400 2:05 stale 200 s",
        ),
        (silent, "node2 does not answer"),
        (setting, "strategy=sharded wire=int4"),
    ):
        assert " ".join(line.split()) == wanted


def test_a_node_without_a_trainer_has_a_line_too() -> None:
    _, line = table({"node0": [None, [], 1000]})
    assert line.split()[:2] == ["node0", "CPU"]


SECRET = "https://discord.com/api/webhooks/1/abcdef"  # noqa: S105 - made up
SEEN: dict[str, Any] = {"files": {}, "units": {}}


def test_the_unit_that_tells_a_person_holds_no_address() -> None:
    known = {
        "notify_services": [SECRET],
        "notify_nodes": {"node1": "192.168.50.21", "node2": "192.168.50.22"},
    }
    unit = says("notify", "lookup('ansible.builtin.template', 'aura-notify.service.j2')", **known)
    (start,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert start.endswith("--node node1 --nodes node1=192.168.50.21 node2=192.168.50.22")
    assert "LoadCredential=webhooks:/etc/aura/webhooks.json" in unit and SECRET not in unit
    assert SECRET in says("notify", "lookup('ansible.builtin.template', 'webhooks.json.j2')", **known)


@pytest.mark.parametrize(
    ("role", "variables", "sentence"),
    [
        ("notify", {"notify_services": [SECRET]}, ""),
        ("notify", {}, "nobody is named"),
        ("notify", {"notify_heartbeat_url": SECRET, "notify_heartbeat_seconds": 0}, "at least 1"),
        (
            "notify",
            {"notify_services": [SECRET], "notify_nodes": {"node7": "x"}},
            "node1 is not in notify_nodes",
        ),
        ("gpu_watch", {}, ""),
        ("gpu_watch", {"gpu_watch_interval": 60}, "from 1 to 30"),
    ],
)
def test_settings_that_make_no_sense(role: str, variables: dict[str, Any], sentence: str) -> None:
    said = says(role, f"__{role}_problem", **variables, **{f"__{role}_seen": SEEN})
    assert (sentence in said) if sentence else said == ""
