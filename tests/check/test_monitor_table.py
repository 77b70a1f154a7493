"""The table of playbooks/monitor.yml, and the units that bring a person news: what is made of what nodes say."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
from expressions import filled_in, loaded, problems, says, variables_of

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
    lines = table({
        "node0": [{**LOAD, "gpus": [GPU, LOST]}, [rank(0), rank(1, loss=None, eta=None)], 1001],
        "node1": [LOAD, [rank(2)], 1200],
        "node2": None,
    })  # fmt: skip
    assert [" ".join(line.split()) for line in lines] == [
        "node device load memory °C W link Mbit/s rank state step loss tokens/s ETA",
        "node0 NVIDIA RTX 4090 97% 12.0 / 24.0 GB 71 321 420+398 of 1000 0/3 training 40/900 3.2199 15400 2:05",
        "GPU is lost - - - - - 1/3 training 40/900 - 15400 -",
        "node1 CPU 12% 8.0 / 64.0 GB - - 420+398 of 1000 2/3 training 40/900 3.2199 15400 2:05 stale 200 s",
        "node2 does not answer",
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
    node = {"trainer_answers": True, "script_status": {}, "trainer_status": [
        {**one, "node": "node0", "unit": {"ActiveState": "active"}, "state": "training"} for one in ranks
    ]}  # fmt: skip
    text = (tree.ROOT / "playbooks/templates/status.j2").read_text(encoding="utf-8")
    shown = filled_in(text, {"ansible_play_hosts": ["node0"], "hostvars": {"node0": node}})
    assert wanted in str(shown).splitlines()


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


@pytest.mark.parametrize(
    ("visible", "local", "card"), [("GPU-a,GPU-b", 1, "GPU-b"), ("GPU-a", 0, "GPU-a"), ("-1", 0, "")]
)
def test_a_rank_says_on_which_card_it_trains(visible: str, local: int, card: str) -> None:
    text = (tree.ROOT / "roles/trainer/files/rank-status").read_text()
    program: dict[str, Any] = {}
    exec(text.removesuffix("main()\n"), program)  # noqa: S102 - our own
    assert program["card"]({"CUDA_VISIBLE_DEVICES": visible, "LOCAL_RANK": str(local)}) == card


def test_a_node_without_a_trainer_has_a_line_too() -> None:
    _, line = table({"node0": [None, [], 1000]})
    assert line.split()[:2] == ["node0", "CPU"]


SECRET = "https://discord.com/api/webhooks/1/abcdef"  # noqa: S105 - made up


def unit_of(role: str, tasks: str = "main", **variables: Any) -> str:
    """The unit that the role has made by the role service."""
    (told,) = (
        task["vars"]
        for task in loaded(f"roles/{role}/tasks/{tasks}.yml")
        if task.get("ansible.builtin.include_role") == {"name": "service"}
    )
    text = "lookup('ansible.builtin.template', 'service.j2')"
    return says("service", text, **(variables_of(role) | told | variables))


def test_the_unit_that_tells_a_person_holds_no_address() -> None:
    nodes = {"node1": "192.168.50.21", "node2": "192.168.50.22"}
    unit = unit_of("notify", "configure", notify_services=[SECRET], notify_name="node1", notify_nodes=nodes)
    (start,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert start.endswith("--node node1 --nodes node1=192.168.50.21 node2=192.168.50.22")
    assert "LoadCredential=webhooks:/etc/aura/webhooks.json" in unit and SECRET not in unit
    webhooks = "lookup('ansible.builtin.template', 'webhooks.json.j2')"
    assert SECRET in says("notify", webhooks, notify_services=[SECRET])


@pytest.mark.parametrize("bucket", ["", "s3://data/runs"])
def test_copies_are_of_aura_only_without_a_key(bucket: str) -> None:
    """What has a secret shares its user with nobody; what lies in the shared directory is aura's on all nodes."""
    unit = unit_of("run_copies", run_copies_bucket=bucket, run_copies_mount="/srv/aura")
    for line in ("User=aura\n", "PrivateNetwork=yes", "ConditionPathIsMountPoint=/srv/aura"):
        assert (line in unit) is (bucket == ""), line
    assert ("LoadCredential=s3:/etc/aura/s3-credentials" in unit) is (bucket != "")


@pytest.mark.parametrize("role", ["tensorboard", "notify", "gpu_watch"])
def test_every_service_has_a_user_of_its_own(role: str) -> None:
    unit = unit_of(role, "configure" if role == "notify" else "main")
    assert re.search(r"^User=aura-", unit, re.M)


@pytest.mark.parametrize("tells", [True, False])
def test_systemd_takes_the_unit_of_what_looks_after_the_cards(tells: bool, tmp_path: Path) -> None:
    """No node of the lab has one, so nothing else makes it in `make test`."""
    # What a person has of its program is not here; what systemd says of a program is that it is not there.
    text = unit_of("gpu_watch", gpu_watch_tells=tells, service_command="/bin/true")
    for line in ("SupplementaryGroups=aura-notify", "ReadWritePaths=-/var/lib/aura-notify"):
        assert (line in text.splitlines()) == tells
    unit = tmp_path / "aura-watch.service"
    unit.write_text(text)
    said = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert said.returncode == 0 and "aura-watch.service" not in said.stderr, said.stderr


@pytest.mark.parametrize(
    ("role", "settings", "sentence"),
    [
        ("notify", {"services": [SECRET]}, ""),
        ("notify", {}, "nobody is named"),
        ("notify", {"heartbeat_url": SECRET, "heartbeat_seconds": 0}, "at least 1"),
        ("notify", {"services": [SECRET], "nodes": {"node7": "x"}}, "node1 is not in notify_nodes"),
        ("gpu_watch", {}, ""),
        ("gpu_watch", {"interval": 60}, "from 1 to 30"),
        ("object_storage", {"access_key": "a", "secret_key": "b"}, ""),
        ("object_storage", {"access_key": "a"}, "there is no key for object storage"),
        ("object_storage", {"access_key": "a", "secret_key": "two words"}, "no spaces and no line breaks"),
        ("object_storage", {"access_key": "a", "secret_key": "b", "endpoint": "minio.lan"}, "an address such as"),
        ("object_storage", {"access_key": "a", "secret_key": "b", "region": "Madrid, ES"}, "a word such as"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(role: str, settings: dict[str, Any], sentence: str) -> None:
    said = problems(role, {}, **{"name": "node1", **settings})
    assert (sentence in said) if sentence else said == ""
    assert SECRET not in said and "two words" not in said
