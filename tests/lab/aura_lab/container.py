"""A node in a container: systemd-nspawn on an overlay over the image, with this machine's kernel."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from aura_lab import host, network
from aura_lab.node import ENVIRONMENT, Node

# Writable /sys and /proc/sys for udev and `netplan apply` (the image's protect-host narrows that down
# again); /tmp on the disk as on an ordinary install.
_NSPAWN_ENVIRONMENT = {"SYSTEMD_NSPAWN_API_VFS_WRITABLE": "1", "SYSTEMD_NSPAWN_TMPFS_TMP": "0"}
# What systemd-nspawn --keep-unit ends with when the node asked for a reboot.
REBOOT = 133
_CGROUPS = [Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]


@dataclass
class Container(Node):
    kind: ClassVar[str] = "container"
    boot_limit: ClassVar[float] = 60

    # --- its processes -----------------------------------------------------------------------------

    def keeper(self) -> host.Process | None:
        """The process that starts the node, and starts it again when it reboots (`keep` below)."""
        return next(iter(host.processes_with(f"--keep={self.root}")), None)

    def leader(self) -> host.Process | None:
        """The node's own systemd, PID 1 in there."""
        containers = host.processes_with(f"--directory={self.root}")
        return next(filter(None, (_init_below(container.pid) for container in containers)), None)

    def problem(self) -> str:
        return "" if self.keeper() else self.last_words() or "its console is empty"

    # --- power -------------------------------------------------------------------------------------

    def create(self, password_hash: str) -> None:
        self._install(password_hash)
        self.created = True
        self.save()

    def power_on(self) -> None:
        if self.keeper() and self.leader():
            return
        self.power_off()
        self._mount()
        with self.console.open("ab") as console:
            subprocess.Popen(
                [sys.executable, str(host.LAB), f"--keep={self.root}", "keep", self.name],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip

    def keep(self) -> None:
        """Run the node until it is switched off. What a reboot is to a PC is a new container here."""
        while True:
            container = self._start()
            leader = self._wait_for_leader(container)
            self.reload()
            network.plug(self, leader.pid)
            if container.wait() != REBOOT:
                return
            network.unplug(self.name)

    def power_off(self) -> None:
        for keeper in host.processes_with(f"--keep={self.root}"):
            keeper.kill(signal.SIGKILL)
        leader = self.leader()
        if leader:
            leader.kill(signal.SIGKILL)
        for container in host.processes_with(f"--directory={self.root}"):
            _end(container)
        network.unplug(self.name)

    def remove(self) -> None:
        super().remove()
        for cgroup in self._cgroups():
            _remove_cgroup(cgroup)

    def reboot(self, deadline: float) -> None:
        before = self.inside()
        subprocess.run([*self._enter(before), "systemctl", "reboot"], check=True)
        while self.leader() in (before, None):
            if time.monotonic() > deadline:
                raise host.LabError(f"{self.name} does not reboot; its console: {self.console}")
            time.sleep(0.1)

    # --- from outside ------------------------------------------------------------------------------

    def execute(self, words: list[str]) -> int:
        """In place of this process, so that a shell in there has our terminal."""
        leader = self.inside()
        _join_cgroups(leader.pid)
        environment = [*ENVIRONMENT, f"TERM={os.environ.get('TERM', 'dumb')}"]
        command = [*self._enter(leader), "env", "-i", *environment, *(words or ["bash", "-l"])]
        os.execvp(command[0], command)  # noqa: S606

    def addresses(self) -> list[str]:
        leader = self.leader()
        return network.node_addresses(leader.pid, self.nic) if leader else []

    def host_keys(self) -> list[str]:
        return [path.read_text() for path in (self.root / "etc/ssh").glob("ssh_host_*_key.pub")]

    def connect(self) -> None:
        leader = self.leader()
        if leader and network.exists(network.link_name(self.name)):
            network.shape(self, leader.pid)
            network.set_cable(self.name, not self.cut)

    # --- pieces ------------------------------------------------------------------------------------

    @staticmethod
    def _enter(leader: host.Process) -> list[str]:
        namespaces = "--mount --uts --ipc --net --pid --cgroup --root --wd".split()
        return ["nsenter", f"--target={leader.pid}", *namespaces, "--"]

    def _cgroups(self) -> list[Path]:
        """The node's own cgroups, for a machine whose PID 1 is not systemd (systemd-run makes one else)."""
        return [base / "aura-lab" / self.name for base in _CGROUPS if (base / "cgroup.procs").exists()]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [
            "systemd-nspawn", f"--directory={self.root}", f"--machine=aura-{self.name}", "--boot", "--quiet",
            "--register=no", "--keep-unit", "--private-network", "--capability=CAP_NET_ADMIN", "--console=pipe",
            "--resolv-conf=off", "--timezone=off", "--link-journal=no",
            "--system-call-filter=@keyring",  # each container of Docker's has a keyring of its own
        ]  # fmt: skip
        if host.runs_systemd():
            unit = f"--unit=aura-lab-{self.name}"
            command = [
                "systemd-run",
                "--scope",
                "--quiet",
                "--collect",
                "--property=Delegate=yes",
                unit,
                *command,
            ]
        else:
            for group in self._cgroups():
                group.mkdir(parents=True, exist_ok=True)
            enter = "".join(
                f"echo $$ >{shlex.quote(str(group))}/cgroup.procs && " for group in self._cgroups()
            )
            command = ["sh", "-c", f'{enter}exec "$@"', "sh", *command]
        with self.console.open("ab") as console:
            return subprocess.Popen(
                command, env={**os.environ, **_NSPAWN_ENVIRONMENT}, stdin=subprocess.DEVNULL,
                stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip

    def _wait_for_leader(self, container: subprocess.Popen[bytes]) -> host.Process:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and container.poll() is None:
            leader = _init_below(container.pid)
            # Not before it has left this machine's network: the cable would be plugged in here.
            if leader and _network_of(str(leader.pid)) != _network_of("self"):
                return leader
            time.sleep(0.02)
        raise host.LabError(f"systemd-nspawn did not start {self.name}")


def _init_below(supervisor: int) -> host.Process | None:
    """The child that is PID 1 of a namespace of its own."""
    try:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        depth = len(_namespace_pids("self"))
        for child in children:
            pids = _namespace_pids(child)
            if len(pids) == depth + 1 and pids[-1] == "1":
                return host.Process.of(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


def _network_of(pid: str) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/net").readlink()
    except FileNotFoundError:
        return None


def _namespace_pids(pid: str) -> list[str]:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return line.split()[1:]
    return []


def _end(process: host.Process) -> None:
    """nspawn ends by itself once its node is gone; if not, it is made to."""
    deadline = time.monotonic() + 3
    while process.alive() and time.monotonic() < deadline:
        host.reap(process.pid)
        time.sleep(0.02)
    process.kill(signal.SIGKILL)


def _remove_cgroup(cgroup: Path) -> None:
    """Remove an empty tree of cgroups; the kernel may need a moment until the last process has left."""
    deadline = time.monotonic() + 3
    while cgroup.exists():
        for directory, _, _ in os.walk(cgroup, topdown=False):
            with suppress(OSError):
                Path(directory).rmdir()
        if time.monotonic() > deadline:
            host.say(f"{cgroup} is still in use; left behind")
            return
        time.sleep(0.02)
    with suppress(OSError):
        cgroup.parent.rmdir()


def _join_cgroups(pid: int) -> None:
    """Move this process to where systemd in the node looks for its own (nsenter leaves that out)."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, kind, group = line.split(":", 2)
        roots = {"name=systemd": ["systemd"], "": ["unified", "."]}.get(kind, [])
        for root in roots:
            members = Path("/sys/fs/cgroup") / root / group.lstrip("/") / "cgroup.procs"
            if members.exists():
                members.write_text(str(os.getpid()))
