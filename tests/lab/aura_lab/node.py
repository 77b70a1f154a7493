"""What a node is, whatever carries it: a PC with a disk, a cable to the lab's switch, and a plug in the wall."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Self

from aura_lab import host, network

# What a command inside a node finds in its environment, besides TERM.
ENVIRONMENT = [
    "HOME=/root",
    "USER=root",
    "LANG=C.UTF-8",
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
]


@dataclass
class Node(ABC):
    """What is fixed about a node (address: the one that DHCP gives it) and what outlives a power cycle."""

    kind: ClassVar[str]
    boot_limit: ClassVar[float]  # seconds until sshd must answer

    name: str
    address: str
    nic: str
    netplan: str
    suite: str = ""  # of the distribution; empty: this machine's own
    image: str = ""
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
        host.write(self.home / "node.json", json.dumps({"kind": self.kind} | asdict(self)) + "\n")

    def reload(self) -> None:
        """Read again what another command may have changed meanwhile."""
        self.__dict__.update(self.of(host.read_json(self.home / "node.json")).__dict__)

    @classmethod
    def of(cls, record: dict[str, object]) -> Self:
        return cls(**{key: value for key, value in record.items() if key != "kind"})  # type: ignore[arg-type]

    # --- what each kind does in its own way ----------------------------------------------------------

    @abstractmethod
    def create(self, password_hash: str) -> None:
        """A new disk: the image, and what differs from PC to PC."""

    @abstractmethod
    def power_on(self) -> None:
        """Start booting; `wait_until_ready` waits for it."""

    @abstractmethod
    def power_off(self) -> None:
        """Pull the plug: nothing in the node gets a chance to finish anything."""

    @abstractmethod
    def leader(self) -> host.Process | None:
        """The process that ends when the node is switched off."""

    @abstractmethod
    def problem(self) -> str:
        """Why it will never come up, as far as can be seen from outside; '' as long as it may."""

    @abstractmethod
    def execute(self, words: list[str]) -> int:
        """Run a command as root inside, past the network, with our stdin and stdout; its exit code."""

    @abstractmethod
    def addresses(self) -> list[str]:
        """The IPv4 addresses that it has now on the lab's cards."""

    @abstractmethod
    def host_keys(self) -> list[str]:
        """Its sshd's public keys, as lines of type and key, read past the network."""

    @abstractmethod
    def reboot(self, deadline: float) -> None:
        """Ask its systemd to reboot; returns when the new boot has begun."""

    @abstractmethod
    def connect(self) -> None:
        """Plug the cable in, or out, and shape it: what `cut` and `rate` say, for a node that runs."""

    def remove(self) -> None:
        self.power_off()
        host.remove_tree(self.home)

    # --- what they have in common ----------------------------------------------------------------------

    def inside(self) -> host.Process:
        leader = self.leader()
        if leader is None:
            raise host.LabError(f"{self.name} is off: tests/lab/lab power-on {self.name}")
        return leader

    def set_cable(self, connected: bool) -> None:
        self.cut = not connected
        self.save()
        if self.leader():
            self.connect()

    def set_rate(self, rate: str) -> None:
        network.bits_per_second(rate)
        self.rate = rate
        self.save()
        if self.leader():
            self.connect()

    def wait_until_ready(self, deadline: float) -> None:
        """Until sshd answers on any address that the node has (at first the one from DHCP)."""
        addresses, looked = [self.address], time.monotonic()
        while time.monotonic() < deadline:
            host.stop_if_interrupted()
            if any(ssh_answers(address) for address in addresses):
                return
            if time.monotonic() - looked > 1:
                problem = self.problem()
                if problem:
                    raise host.LabError(f"{self.name} does not boot ({problem}); its console: {self.console}")
                addresses = [self.address, *self.addresses()]
                looked = time.monotonic()
            time.sleep(0.1)
        raise host.LabError(f"sshd on {self.name} did not answer in time; its console: {self.console}")

    def last_words(self) -> str:
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        return " / ".join(text.strip().splitlines()[-2:])

    def _install(self, password_hash: str) -> None:
        """A tree at `root`: the image below, and above it what differs from PC to PC. It stays mounted."""
        host.remove_tree(self.home)
        for name in ("upper", "work", "root"):
            (self.home / name).mkdir(parents=True)
            (self.home / name).chmod(0o755)
        self.created = False
        self.save()
        self._mount()
        host.write(self.root / "etc/machine-id", secrets.token_hex(16) + "\n", 0o444)
        for name, text in self._netplan_files().items():
            host.write(self.root / "etc/netplan" / name, text, 0o600)
        host.run("usermod", f"--root={self.root}", "--password", password_hash, "ubuntu")

    def _netplan_files(self) -> dict[str, str]:
        return {
            self.netplan: "# This is the network config written by the installer.\n"
            "network:\n  version: 2\n  renderer: networkd\n"
            f"  ethernets:\n    {self.nic}:\n      dhcp4: true\n"
        }

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


def names() -> list[str]:
    """All nodes that have a disk, in the order of their addresses."""
    found = [path.parent.name for path in host.BASE.glob("*/node.json")]
    return sorted(found, key=lambda name: (len(name), name))


def ssh_answers(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=1) as connection:
            connection.settimeout(5)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
