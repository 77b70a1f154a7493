"""The unit of what looks after the cards: no node of the lab has one, so nothing else makes it in `make test`."""

import subprocess
from pathlib import Path

import pytest
import tree
import yaml
from plays import played

SERVICE = tree.ROOT / "roles/service"


@pytest.mark.parametrize("tells", [True, False])
def test_systemd_takes_the_unit(tells: bool, tmp_path: Path) -> None:
    role = tree.ROOT / "roles/gpu_watch"
    (service,) = (task for task in yaml.safe_load((role / "tasks/main.yml").read_text()) if "vars" in task)
    unit = tmp_path / "aura-watch.service"
    # What a person has of its program is not here; what systemd says of a program is that it is not there.
    said = {"service_command": "/bin/true", "service_user": "aura-watch", "role_path": str(SERVICE)}
    play = {
        "hosts": "all",
        "gather_facts": False,
        "vars_files": [f"{place}/defaults/main.yml" for place in (SERVICE, role)],
        "tasks": [
            {
                "name": "The unit is written",
                "ansible.builtin.template": {"src": f"{SERVICE}/templates/service.j2", "dest": str(unit)},
                "vars": service["vars"] | said,
            }
        ],
    }
    groups = {"all": {"hosts": {"watch0": {"ansible_connection": "local"}}}}
    done = played(tmp_path, [play], groups, "-e", f'{{"gpu_watch_tells": {str(tells).lower()}}}')
    assert done.returncode == 0, done.stdout
    lines = unit.read_text().splitlines()
    assert (
        ("SupplementaryGroups=aura-notify" in lines)
        == ("ReadWritePaths=-/var/lib/aura-notify" in lines)
        == tells
    )
    verified = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0 and "aura-watch.service" not in verified.stderr, verified.stderr
