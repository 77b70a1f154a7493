"""A cluster of virtual machines, and the playbooks that a person runs on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from machines import Machine

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "inventory/lab/state"


@dataclass
class VirtualCluster:
    machines: Sequence[Machine]
    inventory: Path

    def final(self, machine: Machine) -> str:
        """Its own in every test: a machine of an earlier one may still be there."""
        return f"198.18.50.{int(machine.address.rpartition('.')[2]) - 160}"

    def write(self, **settings: dict[str, object]) -> None:
        """The inventory: the lab's settings, these machines. settings: more variables of a host, by its name."""
        shutil.copytree(ROOT / "inventory/lab/group_vars", self.inventory / "group_vars", dirs_exist_ok=True)
        lines = ["cluster:", "  hosts:"]
        for machine in self.machines:
            own: dict[str, object] = {"lan_address": self.final(machine), "first_address": machine.address}
            own["timesync_adjust_clock"] = (
                True  # a container's clock is this computer's, a machine has its own
            )
            own |= settings.get(machine.name, {})
            lines.append(
                f"    {machine.name}: {{{', '.join(f'{key}: {value!r}' for key, value in own.items())}}}"
            )
        (self.inventory / "hosts.yml").write_text("\n".join(lines) + "\n")
        state = self.inventory / "state"
        state.mkdir(mode=0o700, exist_ok=True)
        for name in ("password", "nameservers"):
            shutil.copy(STATE / name, state)

    def bootstrap(self) -> str:
        password = self.inventory / "state/password"
        return self.ansible(
            "playbooks/bootstrap.yml",
            f"--connection-password-file={password}",
            f"--become-password-file={password}",
        )

    def site(self, *options: str, expect: int = 0) -> str:
        return self.ansible("tests/vm/site_without_trainer.yml", *options, expect=expect)

    def share(self, *options: str, expect: int = 0) -> str:
        """The roles about shared files only, on nodes that have been through site()."""
        return self.ansible("tests/vm/shared_files.yml", *options, expect=expect)

    def overlay(self, *options: str, expect: int = 0) -> str:
        """The role overlay only, on nodes that have been through site()."""
        return self.ansible("tests/vm/overlay.yml", *options, expect=expect)

    def facts(self, machine: Machine) -> str:
        """All that Ansible's own module finds out about a node, its mounts too."""
        return self._run("ansible", machine.name, "-m", "ansible.builtin.setup", expect=0)

    def ansible(self, playbook: str, *options: str, expect: int = 0) -> str:
        return self._run("ansible-playbook", playbook, *options, expect=expect)

    def _run(self, program: str, *words: str, expect: int) -> str:
        # An emulated machine takes seconds for what a PC does at once.
        slow = {"ANSIBLE_TIMEOUT": "90", "ANSIBLE_SSH_RETRIES": "2"}
        done = subprocess.run(
            [program, "-i", "playbooks/no_hosts", "-i", str(self.inventory), *words], cwd=ROOT, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=2400, check=False,
            env=os.environ | slow,
        )  # fmt: skip
        assert (done.returncode != 0) == (expect != 0), (
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-6000:]}"
        )
        return done.stdout
