"""One node: a systemd-nspawn container on an overlay over the image, with a cable to the lab's switch."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from aura_lab import host, network

# Writable /sys and /proc/sys for udev and `netplan apply` (the image's protect-host narrows that down
# again); /tmp on the disk as on an ordinary install.
_NSPAWN_ENVIRONMENT = {"SYSTEMD_NSPAWN_API_VFS_WRITABLE": "1", "SYSTEMD_NSPAWN_TMPFS_TMP": "0"}
# What systemd-nspawn --keep-unit ends with when the node asked for a reboot.
REBOOT = 133
_CGROUPS = [Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]


@dataclass
class Node:
    """What is fixed about a node (address: the one that DHCP gives it) and what outlives a power cycle."""

    name: str
    address: str
    nic: str
    netplan: str
    image: str
    rate: str = network.FULL_RATE
    cut: bool = False
    created: bool = False

    @property
    def home(self) -> Path:
        return host.BASE / self.name

    @property
    def root(self) -> Path:
        return self.home / "root"

    @property
    def console(self) -> Path:
        return self.home / "console.log"

    def save(self) -> None:
        host.write(self.home / "node.json", json.dumps(asdict(self)) + "\n")

    def reload(self) -> None:
        """Read again what another command may have changed meanwhile."""
        self.__dict__.update(host.read_json(self.home / "node.json"))

    @staticmethod
    def load(name: str) -> Node | None:
        record = host.read_json(host.BASE / name / "node.json")
        return Node(**record) if record else None

    # --- its processes -----------------------------------------------------------------------------

    def keeper(self) -> host.Process | None:
        """The process that starts the node, and starts it again when it reboots (`keep` below)."""
        return next(iter(host.processes_with(f"--keep={self.root}")), None)

    def leader(self) -> host.Process | None:
        """The node's own systemd, PID 1 in there."""
        containers = host.processes_with(f"--directory={self.root}")
        return next(filter(None, (_init_below(container.pid) for container in containers)), None)

    def inside(self) -> host.Process:
        leader = self.leader()
        if leader is None:
            raise host.LabError(f"{self.name} is off: tests/lab/lab power-on {self.name}")
        return leader

    # --- power -------------------------------------------------------------------------------------

    def create(self, password_hash: str) -> None:
        """A new disk: the image, and what differs from PC to PC."""
        host.remove_tree(self.home)
        for name in ("upper", "work", "root"):
            (self.home / name).mkdir(parents=True)
            (self.home / name).chmod(0o755)
        self.created = False
        self.save()
        self._mount()
        host.write(self.root / "etc/machine-id", secrets.token_hex(16) + "\n", 0o444)
        host.write(
            self.root / "etc/netplan" / self.netplan,
            "# This is the network config written by the installer.\nnetwork:\n  version: 2\n  renderer: networkd\n"
            f"  ethernets:\n    {self.nic}:\n      dhcp4: true\n",
            0o600,
        )
        host.run("usermod", f"--root={self.root}", "--password", password_hash, "ubuntu")
        self.created = True
        self.save()

    def power_on(self) -> None:
        """Start booting; `wait_until_ready` waits for it."""
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
        """Pull the plug: nothing in the node gets a chance to finish anything."""
        for keeper in host.processes_with(f"--keep={self.root}"):
            keeper.kill(signal.SIGKILL)
        leader = self.leader()
        if leader:
            leader.kill(signal.SIGKILL)
        for container in host.processes_with(f"--directory={self.root}"):
            _end(container)
        network.unplug(self.name)

    def remove(self) -> None:
        self.power_off()
        host.remove_tree(self.home)
        for cgroup in self._cgroups():
            _remove_cgroup(cgroup)

    def wait_until_ready(self, deadline: float) -> None:
        """Until sshd answers on any address that the node has (at first the one from DHCP)."""
        addresses, looked = [self.address], time.monotonic()
        while time.monotonic() < deadline:
            host.stop_if_interrupted()
            if any(_ssh_answers(address) for address in addresses):
                return
            if time.monotonic() - looked > 1:
                if self.keeper() is None:
                    lines = self.console.read_text(errors="replace").strip().splitlines()[-2:]
                    raise host.LabError(
                        f"{self.name} does not boot ({' / '.join(lines)}); its console: {self.console}"
                    )
                leader = self.leader()
                addresses = [self.address, *(network.node_addresses(leader.pid, self.nic) if leader else [])]
                looked = time.monotonic()
            time.sleep(0.1)
        raise host.LabError(f"sshd on {self.name} did not answer in time; its console: {self.console}")

    # --- pieces ------------------------------------------------------------------------------------

    def _mount(self) -> None:
        if os.path.ismount(self.root):
            return
        if any(character in self.image for character in ":,"):
            raise host.LabError(f"The cache directory must have no ':' or ',' in its path: {self.image}")
        layers = f"lowerdir={self.image},upperdir={self.home}/upper,workdir={self.home}/work"
        # volatile: no fsync to the real disk. Left by the last mount, its marker forbids the next one.
        marker = self.home / "work" / "work" / "incompat"
        if marker.exists():
            host.run("rm", "-rf", marker)
        if not host.succeeds("mount", "-t", "overlay", "-o", f"{layers},volatile", "overlay", self.root):
            host.run("mount", "-t", "overlay", "-o", layers, "overlay", self.root)

    def _cgroups(self) -> list[Path]:
        """The node's own cgroups, for a machine whose PID 1 is not systemd (systemd-run makes one else)."""
        return [base / "aura-lab" / self.name for base in _CGROUPS if (base / "cgroup.procs").exists()]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [
            "systemd-nspawn", f"--directory={self.root}", f"--machine=aura-{self.name}", "--boot", "--quiet",
            "--register=no", "--keep-unit", "--private-network", "--capability=CAP_NET_ADMIN", "--console=pipe",
            "--resolv-conf=off", "--timezone=off", "--link-journal=no",
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


def names() -> list[str]:
    """All nodes that have a disk, in the order of their addresses."""
    found = [path.parent.name for path in host.BASE.glob("*/node.json")]
    return sorted(found, key=lambda name: (len(name), name))


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


def _ssh_answers(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=1) as connection:
            connection.settimeout(5)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
