"""The validation in the table of ranks, and the units that bring a person news."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
from expressions import filled_in, loaded, preflight_sentences, says, variables_of


def test_a_mixture_is_validated_by_part() -> None:
    parts = {"fineweb2-es": 0.9302, "fineweb-edu": 0.8704}
    # What a rank said before it died does not count beside one that is further.
    old = {"bits_per_byte": 2.0, "bits_per_byte_of_parts": {"fineweb2-es": 2.0}, "step": 1}
    said = {"bits_per_byte": 0.91249, "bits_per_byte_of_parts": parts, "step": 40}
    node = {"trainer_answers": True, "script_status": {}, "trainer_status": [
        {"rank": number, "world_size": 2, "node": "node0", "unit": {"ActiveState": "active"}, "state": "training",
         "status": {"state": "training", "max_steps": 900, "updated": 1000.0, **status}}
        for number, status in enumerate((old, said))
    ]}  # fmt: skip
    text = (tree.ROOT / "playbooks/templates/status.j2").read_text(encoding="utf-8")
    shown = filled_in(text, {"ansible_play_hosts": ["node0"], "hostvars": {"node0": node}})
    wanted = "Validation: 0.9125 bits per byte (fineweb2-es 0.9302, fineweb-edu 0.8704)."
    assert wanted in str(shown).splitlines()


@pytest.mark.parametrize(
    ("visible", "local", "card"), [("GPU-a,GPU-b", 1, "GPU-b"), ("GPU-a", 0, "GPU-a"), ("-1", 0, "")]
)
def test_a_rank_says_on_which_card_it_trains(visible: str, local: int, card: str) -> None:
    text = (tree.ROOT / "roles/trainer/files/rank-status").read_text()
    program: dict[str, Any] = {}
    exec(text.removesuffix("main()\n"), program)  # noqa: S102 - our own
    assert program["card"]({"CUDA_VISIBLE_DEVICES": visible, "LOCAL_RANK": str(local)}) == card


SECRET = "https://discord.com/api/webhooks/1/abcdef"  # noqa: S105 - made up


def unit_of(role: str, **variables: Any) -> str:
    """The unit that the role has made by the role service."""
    (told,) = (
        task["vars"]
        for task in loaded(f"roles/{role}/tasks/main.yml")
        if task.get("ansible.builtin.include_role") == {"name": "service"}
    )
    text = "lookup('ansible.builtin.template', 'service.j2')"
    return says("service", text, **(variables_of(role) | told | variables))


def test_the_unit_that_tells_a_person_holds_no_address() -> None:
    nodes = {"node1": "192.168.50.21", "node2": "192.168.50.22"}
    unit = unit_of("notify", notify_services=[SECRET], notify_name="node1", notify_nodes=nodes)
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
    assert re.search(r"^User=aura-", unit_of(role), re.M)


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
        ("object_storage", {"access_key": "a", "secret_key": "b"}, ""),
        ("object_storage", {"access_key": "a"}, "there is no key for object storage"),
        ("object_storage", {"access_key": "a", "secret_key": "two words"}, "no spaces and no line breaks"),
        ("object_storage", {"access_key": "a", "secret_key": "b", "endpoint": "minio.lan"}, "an address such as"),
        ("object_storage", {"access_key": "a", "secret_key": "b", "region": "Madrid, ES"}, "a word such as"),
        ("run_copies", {}, ""),
        ("run_copies", {"mount": "/srv/aura"}, ""),
        ("run_copies", {"bucket": "s3://data/runs"}, ""),
        ("run_copies", {"directory": "/home/ubuntu/runs"}, "lies in somebody's home"),
        ("run_copies", {"mount": "/mnt/nas"}, "which is not below /mnt/nas"),
        ("run_copies", {"bucket": "s3://data"}, "has to be like s3://bucket/directory"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(role: str, settings: dict[str, Any], sentence: str) -> None:
    said = preflight_sentences(role, {}, **{f"{role}_{name}": value for name, value in settings.items()})
    assert (sentence in said) if sentence else said == ""
    assert "two words" not in said
