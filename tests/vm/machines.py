"""The lab's virtual machines as a test sees them: one per kind of PC, booted once, and given back as it was then."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests/lab/lab"
BOOT_LIMIT = 900  # an emulated machine on a busy computer
BOOTED = "booted"  # the snapshot that every test starts from
# So many run at once; the one that was not asked for the longest time is switched off (1 GiB of memory each).
MOST_RUNNING = 3


class LabFailed(AssertionError):
    """A lab command said no; what it said."""


def lab(*words: str, limit: float = 300, stdin: str = "") -> str:
    """Run tests/lab/lab; its stdout."""
    done = subprocess.run(
        [LAB, *words], text=True, capture_output=True, input=stdin, timeout=limit, check=False
    )
    if done.returncode != 0:
        raise LabFailed(f"lab {' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def wait_for(what: str, reached: Callable[[], object], limit: float = 300) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + limit
    while not reached():
        assert time.monotonic() < deadline, f"{what}: not within {limit:.0f} s"
        time.sleep(0.5)


def answers(address: str, port: int = 22) -> bool:
    """Whether sshd answers there (a connection alone says little)."""
    try:
        with socket.create_connection((address, port), timeout=3) as connection:
            connection.settimeout(10)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


@dataclass(frozen=True)
class Machine:
    """One VM. `address` is the one that DHCP gives it, `mac` its home card's."""

    name: str
    address: str

    @property
    def mac(self) -> str:
        return "02:a1:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))

    # --- inside ------------------------------------------------------------------------------------

    def exec(self, command: str, check: bool = True, limit: float = 300) -> str:
        """Run a command of bash as root, past the network; its stdout. `check`: it has to succeed."""
        done = subprocess.run(
            [LAB, "exec", self.name, "bash", "-c", command],
            text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=limit, check=False,
        )  # fmt: skip
        if check:
            assert done.returncode == 0, (
                f"{command!r} ended with {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done.stdout

    def ssh(self, command: str) -> str:
        """Run a command as the node's user, over the network."""
        return lab("ssh", self.name, command)

    def addresses(self) -> list[str]:
        return list(self._status()["addresses"])

    @property
    def alive(self) -> bool:
        """Whether it is switched on."""
        return bool(self._status()["state"] == "running")

    def boot_id(self) -> str:
        return self.exec("cat /proc/sys/kernel/random/boot_id").strip()

    def wait_ssh(self, address: str = "", limit: float = BOOT_LIMIT) -> None:
        """Until sshd answers there, or where DHCP has put it."""
        wanted = address or self.address
        wait_for(f"sshd of {self.name} on {wanted}", lambda: answers(wanted), limit)

    def wait_inside(self, command: str, limit: float = 300) -> None:
        """Until a command succeeds in there."""
        script = f"{command} >/dev/null 2>&1 && echo yes || echo no"
        wait_for(f"{command!r} on {self.name}", lambda: self.exec(script).strip() == "yes", limit)

    # --- power -------------------------------------------------------------------------------------

    def reboot(self, wait: bool = True) -> None:
        """`wait`: until sshd answers somewhere; without it until the new boot has begun."""
        lab("reboot", self.name, *([] if wait else ["--no-wait"]), limit=2 * BOOT_LIMIT)

    def power_off(self) -> None:
        """Pull the plug."""
        lab("power-off", self.name)

    def power_on(self, wait: bool = True) -> None:
        lab("power-on", self.name, *([] if wait else ["--no-wait"]), limit=BOOT_LIMIT)

    def snapshot(self, name: str) -> None:
        lab("snapshot", self.name, name)

    def restore(self, name: str = BOOTED) -> None:
        """As it was when it had booted for the first time (or at another snapshot), with today's clock."""
        lab("restore", self.name, name)

    def add_card(self) -> None:
        """Shut down, a second card in a slot that the firmware counts first, and on again."""
        lab("add-card", self.name, limit=2 * BOOT_LIMIT)

    # --- its cable ---------------------------------------------------------------------------------

    def cut(self) -> None:
        lab("cut", self.name)

    def heal(self) -> None:
        lab("heal", self.name)

    def _status(self) -> dict[str, Any]:
        nodes = json.loads(lab("status", "--json"))["nodes"]
        return next(node for node in nodes if node["name"] == self.name)


@dataclass
class Machines:
    """All VMs of the session; called as the fixture `vm`."""

    _known: list[Machine] = field(default_factory=list)  # the one asked for last at the end

    def __call__(
        self, flavour: str = "server", cards: int = 1, ufw: bool = False, fresh: bool = False, number: int = 0
    ) -> Machine:
        """A VM of this kind, as it was when it had booted for the first time; `fresh`: with a new disk, too.

        `number`: for a second one of the same kind at the same time.
        """
        words = [flavour, *(["two"] if cards == 2 else []), *(["ufw"] if ufw else []), str(number)]
        index = 8 * number + 4 * (flavour == "desktop") + 2 * (cards == 2) + ufw
        machine = Machine("-".join(words), f"198.18.50.{200 + index}")
        if machine in self._known:
            self._known.remove(machine)
        self._known.append(machine)
        for other in self._known[:-MOST_RUNNING]:
            other.power_off()
        if fresh:
            lab("down", f"--only={machine.name}")
        try:
            machine.restore()
        except LabFailed:
            self._boot(machine, flavour, cards, ufw)
        return machine

    @staticmethod
    def _boot(machine: Machine, flavour: str, cards: int, ufw: bool) -> None:
        lab("down", f"--only={machine.name}")
        lab(
            *("up", "--kind", "vm", "--only", machine.name, "--address", machine.address),
            *("--flavour", flavour, "--cards", str(cards), *(["--ufw"] if ufw else [])),
            limit=2 * BOOT_LIMIT,
        )
        # Quiet: nothing that still starts, and nothing that holds apt's lock.
        machine.exec(
            "systemctl stop busy-apt; systemctl is-system-running --wait", check=False, limit=BOOT_LIMIT
        )
        machine.snapshot(BOOTED)

    def remove(self) -> None:
        for machine in self._known:
            lab("down", f"--only={machine.name}")
        self._known.clear()
