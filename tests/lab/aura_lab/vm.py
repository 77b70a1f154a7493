"""A node in a virtual machine: QEMU, with a kernel, a clock, a disk and PCI slots of its own."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISFIFO, S_ISREG
from typing import ClassVar

from aura_lab import host, network, qemu
from aura_lab.node import ENVIRONMENT, Node

FLAVOURS = ["server", "desktop"]
DISK = "12G"  # sparse
# What an Ubuntu desktop has and a server, as the lab sees it, has not.
_DESKTOP_PACKAGES = ["network-manager", "unattended-upgrades", "needrestart"]
_RENDERER = """# Let NetworkManager manage all devices on this system
network:
  version: 2
  renderer: NetworkManager
"""
_EXEC_LIMIT = 3600.0
_ORDER_AGAIN = 60.0  # seconds; a guest that has not even begun with it by then has missed it
_HANGS = 120.0  # seconds without a word and without an answer: it is the emulated machine that hangs, not its system
# Without the guards against a processor's faults an emulated boot needs a third less; on a busy computer it may take
# so long that systemd would give up its first services.
_KERNEL_SETTINGS = "root=/dev/vda rw console=ttyS0 mitigations=off systemd.default_timeout_start_sec=600"


@dataclass
class VM(Node):
    """`cards`: 1, or 2 with one on the switch without a router. `card_below`: the second one sits in the slot that
    the firmware counts first, as a graphics card in the uppermost one does, so that the home card is renamed."""

    kind: ClassVar[str] = "vm"
    boot_limit: ClassVar[float] = 600

    flavour: str = "server"
    cards: int = 1
    card_below: bool = False
    ufw: bool = False

    @property
    def disk(self) -> Path:
        return self.home / "disk.qcow2"

    @property
    def _monitor(self) -> Path:
        return self.home / "monitor.sock"

    @property
    def _monitor_option(self) -> str:
        """Also what QEMU's process is known by."""
        return f"unix:{self._monitor},server=on,wait=off"

    @property
    def agent(self) -> qemu.Agent:
        return qemu.Agent(self.home / "agent.sock")

    def leader(self) -> host.Process | None:
        return next(iter(host.processes_with(self._monitor_option)), None)

    def problem(self) -> str:
        return "" if self.leader() else f"QEMU has ended: {self.last_words() or 'its console is empty'}"

    # --- its disk ----------------------------------------------------------------------------------

    def create(self, password_hash: str) -> None:
        self._install(password_hash)
        host.run("ssh-keygen", "-q", "-A", "-f", self.root)  # RSA takes an emulated machine many seconds
        if self.flavour == "server":
            purge = ["env", "DEBIAN_FRONTEND=noninteractive", "dpkg", "--purge", *_DESKTOP_PACKAGES]
            host.run("chroot", self.root, *purge)
        else:
            host.run("systemctl", f"--root={self.root}", "disable", "systemd-networkd.service")
        if self.ufw:
            # In a network of its own: ufw shall write its files, not load its rules here.
            host.run("unshare", "--net", "chroot", self.root, "ufw", "allow", "22/tcp")
            settings = self.root / "etc/ufw/ufw.conf"
            host.write(settings, settings.read_text().replace("ENABLED=no", "ENABLED=yes"))
        bare = self.home / "bare.img"
        host.run("mke2fs", "-q", "-t", "ext4", "-d", self.root, bare, DISK)
        host.unmount(self.root)
        for name in ("upper", "work"):
            shutil.rmtree(self.home / name)
        host.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", bare, "-F", "raw", self.disk)
        self.created = True
        self.save()

    def _netplan_files(self) -> dict[str, str]:
        if self.flavour == "server":
            return super()._netplan_files()
        cloud = f"network:\n  version: 2\n  ethernets:\n    {self.nic}:\n      dhcp4: true\n"
        said = "# This file is generated from information provided by the datasource.\n"
        return {"01-network-manager-all.yaml": _RENDERER, "50-cloud-init.yaml": said + cloud}

    # --- power -------------------------------------------------------------------------------------

    def power_on(self, snapshot: str = "") -> None:
        if self.leader():
            return
        self.power_off()
        for card in range(self.cards):
            network.plug_tap(self.name, card)
        with self.console.open("ab") as console:
            process = subprocess.Popen(
                self._command(snapshot), stdin=subprocess.DEVNULL, stdout=console, stderr=console,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            try:
                self.connect()  # before its processor runs: a cut cable was never seen plugged in
                qemu.monitor(self._monitor, {"execute": "cont"})
                return
            except qemu.NoAnswer as problem:
                if process.poll() is not None:
                    raise host.LabError(f"QEMU does not start {self.name}: {self.last_words()}") from problem
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def power_off(self) -> None:
        """What the guest has flushed is in the file; what it had only in its memory is lost, as on a PC."""
        for process in host.processes_with(self._monitor_option):
            process.kill(signal.SIGKILL)
        for card in (0, 1):
            network.unplug(self.name, card)
        for socket in (self._monitor, self.agent.path):
            socket.unlink(missing_ok=True)

    def reboot(self, deadline: float) -> None:
        before = self._boot_id(deadline)
        ordered = -math.inf
        said = _Silence(self.console)
        while True:
            try:
                if self._boot_id(min(deadline, time.monotonic() + 10)) != before:
                    return
                if time.monotonic() > ordered + _ORDER_AGAIN:
                    self.agent.tell("guest-shutdown", 10, mode="reboot")
                    ordered = time.monotonic()
            except qemu.NoAnswer:
                # Between the two. What waits for a service that does not end says so every second.
                if said.seconds() > _HANGS:
                    print(f"lab: {self.name} is silent on its way down: reset", file=sys.stderr)
                    qemu.monitor(self._monitor, {"execute": "system_reset"})
                    said = _Silence(self.console)
            if self.problem():
                raise host.LabError(f"{self.name} does not reboot: {self.problem()}")
            if time.monotonic() > deadline:
                raise host.LabError(
                    f"{self.name} does not reboot; its console, {self.console}, ends with: {self.last_words()}"
                )
            time.sleep(0.5)

    def _boot_id(self, deadline: float) -> bytes:
        limit = max(1.0, deadline - time.monotonic())
        return self.agent.run(["/bin/cat", "/proc/sys/kernel/random/boot_id"], limit)[1]

    def shut_down(self, deadline: float) -> None:
        """As somebody who is going to open the case does it."""
        leader = self.leader()
        if leader:
            self.agent.tell("guest-shutdown", mode="powerdown")
        while leader and leader.alive() and time.monotonic() < deadline:
            host.reap(leader.pid)
            time.sleep(0.1)
        self.power_off()

    def add_card(self, deadline: float) -> None:
        if self.cards > 1:
            raise host.LabError(f"{self.name} has two network cards already.")
        was_on = self.leader() is not None
        self.shut_down(min(deadline, time.monotonic() + 120))
        self.cards, self.card_below = 2, True
        self.save()
        if was_on:
            self.power_on()
            # Not until sshd answers: that the home card has a new name now may be the end of its network.
            self.agent.ask("guest-ping", deadline - time.monotonic())

    # --- snapshots: disk, memory and processors, inside the disk's file ----------------------------

    def snapshot(self, name: str) -> None:
        self.inside()
        qemu.human(self._monitor, f"savevm {name}", limit=300)
        known = host.read_json(self.home / "snapshots.json")
        known[name] = {"cards": self.cards, "card_below": self.card_below, "cut": self.cut, "rate": self.rate}
        host.write(self.home / "snapshots.json", json.dumps(known) + "\n")

    def restore(self, name: str) -> None:
        """Running, as it was then; only the clock says what time it is now."""
        known = host.read_json(self.home / "snapshots.json")
        if name not in known:
            raise host.LabError(f"{self.name} has no snapshot {name} ({', '.join(known) or 'none at all'}).")
        same_slots = all(getattr(self, key) == known[name][key] for key in ("cards", "card_below"))
        self.__dict__.update(known[name])
        self.save()
        if not same_slots:
            self.power_off()
        if self.leader():
            qemu.human(self._monitor, f"loadvm {name}", limit=300)
            self.connect()
        else:
            self.power_on(snapshot=name)
        self.agent.ask("guest-set-time", 120, time=time.time_ns())

    # --- from outside ------------------------------------------------------------------------------

    def execute(self, words: list[str]) -> int:
        self.inside()
        if not words:
            raise host.LabError(
                f"A shell on a VM: tests/lab/lab ssh {self.name} (exec needs a command here)."
            )
        mode = os.fstat(0).st_mode
        stdin = sys.stdin.buffer.read() if S_ISFIFO(mode) or S_ISREG(mode) else b""
        command = ["/usr/bin/env", "-i", *ENVIRONMENT, f"TERM={os.environ.get('TERM', 'dumb')}", *words]
        code, out, error = self.agent.run(command, _EXEC_LIMIT, stdin)
        sys.stdout.buffer.write(out)
        sys.stdout.flush()
        sys.stderr.buffer.write(error)
        return code

    def addresses(self) -> list[str]:
        if not self.leader():
            return []
        try:
            cards = self.agent.ask("guest-network-get-interfaces", 5)
        except qemu.NoAnswer:
            return []  # still booting
        ours = {network.mac(self.address, card) for card in (0, 1)}
        return [
            entry["ip-address"]
            for card in cards
            if card.get("hardware-address") in ours
            for entry in card.get("ip-addresses", [])
            if entry["ip-address-type"] == "ipv4"
        ]

    def host_keys(self) -> list[str]:
        command = ["/bin/sh", "-c", "cat /etc/ssh/ssh_host_*_key.pub"]
        return self.agent.run(command, 60)[1].decode().splitlines()

    def connect(self) -> None:
        for card in range(self.cards):
            plugged = card > 0 or not self.cut
            network.set_cable(self.name, plugged, card)
            # The link in the card itself, or the guest would never see that the cable is out.
            link = {"name": f"cable{card}", "up": plugged}
            qemu.monitor(self._monitor, {"execute": "set_link", "arguments": link})
        network.shape_tap(self)

    # --- the machine -------------------------------------------------------------------------------

    def _command(self, snapshot: str) -> list[str]:
        """A PC whose disk, serial port and home card each have a PCI bus of their own, so that the card is enp3s0.

        Buses are numbered in the order of their ports' slots: one more below 8 moves all of them by one.
        """
        log = ["-chardev", f"file,id=console,path={self.console},append=on", "-serial", "chardev:console"]
        machine = [
            "qemu-system-x86_64", "-name", self.name, "-machine", "q35", *accelerator(self.image),
            "-smp", "2", "-m", "1024", "-nodefaults", "-no-user-config", "-display", "none", *log,
            "-kernel", _boot_file(self.image, "vmlinuz"), "-initrd", _boot_file(self.image, "initrd.img"),
            "-append", _KERNEL_SETTINGS, "-qmp", self._monitor_option, "-S",
            *_port(8, "disk"), "-device", "virtio-blk-pci,drive=disk,bus=disk",
            "-drive", f"file={self.disk},if=none,id=disk,format=qcow2,cache=writeback,discard=unmap",
            *_port(9, "serial"), "-device", "virtio-serial-pci,bus=serial",
            "-chardev", f"socket,path={self.agent.path},server=on,wait=off,id=agent",
            "-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
        ]  # fmt: skip
        slots = [10, 7 if self.card_below else 11]
        for card in range(self.cards):
            # The firmware calls the first card of a board eno1, wherever it sits.
            onboard = ",acpi-index=1" if self.nic == "eno1" and card == 0 else ""
            machine += [
                *_port(slots[card], f"port{card}"),
                "-netdev", f"tap,id=cable{card},ifname={network.link_name(self.name, card)},script=no,downscript=no",
                "-device", f"virtio-net-pci,netdev=cable{card},bus=port{card},romfile=,"
                f"mac={network.mac(self.address, card)}{onboard}",
            ]  # fmt: skip
        return machine + (["-loadvm", snapshot] if snapshot else [])


class _Silence:
    """How long a console has said nothing."""

    def __init__(self, console: Path) -> None:
        self.console, self.size, self.since = console, console.stat().st_size, time.monotonic()

    def seconds(self) -> float:
        size = self.console.stat().st_size
        if size != self.size:
            self.size, self.since = size, time.monotonic()
        return time.monotonic() - self.since


def _boot_file(image: str, name: str) -> str:
    """The kernel (or its initrd) that the image was built with; it has one."""
    return str(next(Path(image, "boot").glob(f"{name}-*")))


def _port(slot: int, name: str) -> list[str]:
    return ["-device", f"pcie-root-port,id={name},bus=pcie.0,addr={slot:x}.0,chassis={slot}"]


# --- how the processor is made ---------------------------------------------------------------------

_EMULATED = ["-accel", "tcg,thread=multi", "-cpu", "max"]
_REAL = ["-accel", "kvm", "-cpu", "max"]
_trying = threading.Lock()


def accelerator(image: str) -> list[str]:
    """KVM if this machine's really boots a kernel (/dev/kvm alone says little), else emulation. Tried once per boot."""
    memory = host.cache() / "lab" / "kvm.json"
    with _trying:  # several nodes start at once
        known = host.read_json(memory)
        if known.get("boot_id") != host.boot_id():
            known = {"boot_id": host.boot_id(), "works": _kvm_boots(image)}
            host.write(memory, json.dumps(known) + "\n")
    return _REAL if known["works"] else _EMULATED


def _kvm_boots(image: str) -> bool:
    """A kernel whose first process ends at once, so that it panics and the machine with it.

    Where KVM hangs it does so before the kernel's first word, which a real processor says in a fraction of a second.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    console = host.OWN / "kvm.log"
    console.unlink(missing_ok=True)
    command = [
        "setpriv", "--pdeathsig", "KILL",
        "qemu-system-x86_64", "-machine", "q35", *_REAL, "-m", "512", "-nodefaults", "-no-user-config", "-no-reboot",
        "-display", "none", "-serial", f"file:{console}", "-kernel", _boot_file(image, "vmlinuz"),
        "-initrd", _boot_file(image, "initrd.img"), "-append", "console=ttyS0 panic=-1 rdinit=/bin/false",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    started = time.monotonic()
    try:
        while process.poll() is None:
            said = console.read_bytes() if console.exists() else b""
            if time.monotonic() - started > (60 if b"Linux version" in said else 10):
                host.say("KVM does not boot a kernel here: VMs are emulated, which is slow")
                return False
            host.stop_if_interrupted()
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    return console.exists() and b"Kernel panic" in console.read_bytes()
