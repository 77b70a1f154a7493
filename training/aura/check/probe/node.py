"""What a node sees of itself, read only."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import pwd
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

from aura.check.probe.wire import Json, Settings

RELEASE_LINK = Path("/opt/aura/current")
STATE_DIRECTORY = Path("/var/lib/aura")
PACKAGES = ("aura", "torch", "numpy", "tokenizers", "safetensors", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def describe_node(settings: Settings) -> Json:
    """Names, addresses, interface, link, release, versions, disk: all of this node, read only."""
    routes = {peer: find_route(settings.peers[peer]) for peer in settings.others}
    addresses = find_addresses()
    interface = next((name for name, found in addresses.items() if settings.address in found), None)
    return {
        "hostname": socket.gethostname(),
        "addresses": addresses,
        "interface": interface,
        "link": describe_link(interface) if interface else None,
        "routes": routes,
        "resolves": resolve([*dict.fromkeys([socket.gethostname(), *settings.peers])]),
        "release": find_release(),
        "versions": find_versions(),
        "disk": describe_disk(),
    }


def ask_ip(*words: str) -> list[Json]:
    """The answer of iproute2's `ip -json`, or [] where there is none."""
    program = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        return []
    try:
        command = [program, "-json", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
        answer = json.loads(done.stdout or "[]")
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    return [entry for entry in answer if isinstance(entry, dict) and entry]


def find_addresses() -> dict[str, list[str]]:
    """{interface: [IPv4 addresses]}"""
    found = {}
    for entry in ask_ip("-4", "address", "show"):
        locals_ = [info["local"] for info in entry.get("addr_info", []) if "local" in info]
        if locals_ and "ifname" in entry:
            found[entry["ifname"]] = locals_
    return found


def find_route(address: str) -> Json:
    """The interface that the kernel takes towards an address."""
    answer = ask_ip("route", "get", address)
    return {"interface": answer[0].get("dev") if answer else None}


def describe_link(interface: str) -> Json:
    """Speed (Mbit/s) and duplex as the driver tells them, None where it does not (a virtual interface, say)."""
    directory = Path("/sys/class/net") / interface
    speed: int | None = None
    duplex: str | None = None
    try:
        speed = int((directory / "speed").read_text())
        duplex = (directory / "duplex").read_text().strip()
    except (OSError, ValueError):
        pass
    return {
        "speed_mbit": speed if speed and speed > 0 else None,
        "duplex": duplex,
        "physical": (directory / "device").exists(),
    }


def resolve(names: list[str], limit: float = 5.0) -> dict[str, list[str] | None]:
    """{name: [IPv4 addresses]} as this node resolves them; None where the answer took longer than the limit."""
    found: dict[str, list[str] | None] = {name: None for name in names}

    def look_up(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            found[name] = sorted({str(answer[4][0]) for answer in answers})
        except OSError:
            found[name] = []

    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in names]
    end = time.monotonic() + limit
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)


def find_release() -> str | None:
    try:
        return RELEASE_LINK.readlink().name
    except OSError:
        return None


def find_versions() -> dict[str, str]:
    """Versions of what trains, from the installed metadata: importing torch would take seconds."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_disk() -> Json:
    path = STATE_DIRECTORY if STATE_DIRECTORY.exists() else Path("/")
    return {"path": str(path), "free_bytes": shutil.disk_usage(path).free}


def find_port_holder(port: int) -> Json | None:
    """Who listens on a TCP port, as far as /proc tells this user: {"pid", "command", "unit", "user"}.

    A process of another user shows only the user: its open files may not be read.
    """
    inodes: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == "0A" and int(words[1].rsplit(":", 1)[1], 16) == port:  # 0A is LISTEN
                inodes[f"socket:[{words[9]}]"] = int(words[7])
    if not inodes:
        return None
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            inode = str(descriptor.readlink())
        except OSError:
            continue
        if inode in inodes:
            process = descriptor.parent.parent
            return {
                "pid": int(process.name),
                "command": _read(process / "comm"),
                "unit": _find_unit(_read(process / "cgroup") or ""),
                "user": _user_name(inodes[inode]),
            }
    return {"pid": None, "command": None, "unit": None, "user": _user_name(next(iter(inodes.values())))}


def _find_unit(cgroup: str) -> str | None:
    """The systemd service in the text of /proc/PID/cgroup."""
    units = re.findall(r"([^/\n]+\.service)", cgroup)
    return units[-1] if units else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
