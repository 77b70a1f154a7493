"""The validation in the table of ranks, and the units that bring a person news."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
from expressions import loaded, says, variables_of


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
    unit = unit_of("notify", notify_services=[SECRET], notify_name="node1")
    (start,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert start.endswith("--faults /run/aura-watch --state /var/lib/aura-notify --node node1")
    assert "LoadCredential=webhooks:/etc/aura/webhooks.json" in unit and SECRET not in unit
    webhooks = "lookup('ansible.builtin.template', 'webhooks.json.j2')"
    assert SECRET in says("notify", webhooks, notify_services=[SECRET])


@pytest.mark.parametrize("role", ["tensorboard", "notify", "gpu_watch"])
def test_every_service_has_a_user_of_its_own(role: str) -> None:
    assert re.search(r"^User=aura-", unit_of(role), re.M)


def test_systemd_takes_the_unit_of_what_looks_after_the_cards(tmp_path: Path) -> None:
    """No node of the lab has one, so nothing else makes it in `make test`."""
    # What a person has of its program is not here; what systemd says of a program is that it is not there.
    unit = tmp_path / "aura-watch.service"
    unit.write_text(unit_of("gpu_watch", service_command="/bin/true"))
    said = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert said.returncode == 0 and "aura-watch.service" not in said.stderr, said.stderr
