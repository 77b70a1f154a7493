"""What a node is now: packages, files, units, users, network, firewall, sshd, GPUs. The only way a role looks."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_state
author: Aura
short_description: Says what a node is now, and changes nothing
description:
  - One call answers all that a role wants to know of a node. The keys of the answer are always there.
  - Roles call the action of the same name, which reads O(meta/look.yml) of the role and runs this module as root.
options:
  packages: {description: Names of apt packages., type: list, elements: str, default: []}
  files: {description: "Files, links and directories, by their absolute paths.", type: list, elements: str, default: []}
  texts: {description: "Text files to read; C(~NAME/) is a user's home.", type: list, elements: str, default: []}
  units: {description: "systemd units, by their full names.", type: list, elements: str, default: []}
  users: {description: Names of users., type: list, elements: str, default: []}
  groups: {description: Names of groups., type: list, elements: str, default: []}
  uids: {description: Numbers of which it is wanted who has them., type: list, elements: int, default: []}
  mounts: {description: Directories of which it is wanted what is mounted., type: list, elements: str, default: []}
  addresses: {description: Addresses of which it is wanted who else has them., type: list, elements: str, default: []}
  network: {description: "Network cards, and the files of netplan.", type: bool, default: false}
  firewall: {description: "Active firewalls, and the loaded table C(inet aura).", type: bool, default: false}
  sshd: {description: What sshd makes of its settings., type: bool, default: false}
  gpu: {description: "NVIDIA's graphics cards, and the driver that has them.", type: bool, default: false}
  upgrades: {description: "What apt would upgrade.", type: bool, default: false}
  clock: {description: What chrony makes of the clock., type: bool, default: false}
attributes:
  check_mode: {support: full}
"""
EXAMPLES = r"""
- name: See what is there
  node_state:
    role: time_sync
  register: __time_sync_seen
"""
RETURN = r"""
missing: {description: Those of O(packages) that are not installed., type: list, elements: str, returned: always}
apt_lists: {description: Whether apt knows which packages there are., type: bool, returned: always}
files:
  description: >-
    By path: kind (file, directory, link, absent, other), sha256 (of a file), mode (C(0644)), owner, group, target (of a
    link), mtime (seconds since the epoch).
  type: dict
  returned: always
texts: {description: "By path: the content, empty where there is no such file.", type: dict, returned: always}
units:
  description: >-
    By name: exists, active, state, enabled, enabled_state, started (seconds since the epoch, 0 when it does not run),
    reload (systemd has not read its files yet), stale (its files have changed since it was started).
  type: dict
  returned: always
users: {description: "By name: uid, gid, home, shell. Who does not exist is left out.", type: dict, returned: always}
groups: {description: "By name: the number. A group that does not exist is left out.", type: dict, returned: always}
taken:
  description: "Who has one of O(uids): kind (user or group), name, number."
  type: list
  elements: dict
  returned: always
mounts:
  description: >-
    By path: mounted (whether something is mounted right there), where (its mount point), source, type and options
    (a list) of the file system in which it lies, owner (empty where there is nothing), empty (whether there is
    nothing in it), used (whether a file or a link is anywhere below it), free (bytes left in that file system).
    What is mounted is not looked into, and then both are false; of what is mounted over the network the owner is
    not asked for either.
  type: dict
  returned: always
session:
  description: >-
    The connection over which this was asked: C(client) and C(here) (addresses) and C(port); empty and 0 without SSH.
  type: dict
  returned: always
cards: {description: The network cards; see module_utils/node_network.py., type: list, elements: dict, returned: always}
owners:
  description: >-
    By those of O(addresses) that the node does not have itself, and by card: the MAC address of who has it in that
    card's LAN, or empty.
  type: dict
  returned: always
ifupdown:
  description: The cards that C(/etc/network/interfaces) configures.
  type: list
  elements: str
  returned: always
netplan: {description: "The texts of netplan's files, by path.", type: dict, returned: always}
netplan_before:
  description: Originals of such files that the role static_network has kept in C(/var/backups/aura), by path.
  type: dict
  returned: always
ufw: {description: Whether ufw is switched on., type: bool, returned: always}
firewalld: {description: Whether firewalld runs., type: bool, returned: always}
table: {description: "The table C(inet aura) as nft lists it; empty when not loaded.", type: str, returned: always}
table_comment: {description: The table's own comment., type: str, returned: always}
sshd: {description: "What C(sshd -T) says: lists of values by keyword.", type: dict, returned: always}
sshd_socket: {description: Whether ssh.socket listens in place of sshd., type: bool, returned: always}
gpu:
  description: >-
    C(cards) on the PCI bus (pci, device_id, boot_vga, bound: the kernel's driver), C(driver) (version of the loaded
    one, or empty), C(smi) (what nvidia-smi says of each card: uuid, name, pci, compute_capability, memory_mib,
    display_active and so on; empty when it does not answer), C(elsewhere) (C(WSL) or C(container) where the driver is
    another system's) and C(machine) (what decides about a driver; empty without a card). See module_utils/node_gpu.py.
  type: dict
  returned: always
upgrades:
  description: >-
    Packages that apt would upgrade: package, installed (empty when it is new), candidate, security, together (whether
    playbooks/upgrade.yml alone moves it), held (whether a hold keeps it where it is: its own, or that of a package that
    it needs). From the package lists that the node has.
  type: list
  elements: dict
  returned: always
reboot_required: {description: Whether something installed waits for the next boot., type: bool, returned: always}
start: {description: What a restart meets; see module_utils/node_start.py., type: dict, returned: always}
wsl: {description: Whether the node is Linux under Windows (WSL 2)., type: bool, returned: always}
clock:
  description: >-
    C(source): the address whose time chrony follows, empty while it follows nobody else's. C(offset): the seconds by
    which it still finds the clock wrong.
  type: dict
  returned: always
hostname: {description: The node's name., type: str, returned: always}
boot_id: {description: The kernel's name for this boot., type: str, returned: always}
python: {description: The version of the node's Python., type: str, returned: always}
machine: {description: "The kind of processor, C(x86_64) say.", type: str, returned: always}
now: {description: "The node's time, in seconds since the epoch.", type: float, returned: always}
distribution: {description: "C(Ubuntu) or C(Debian), as in ansible_facts.", type: str, returned: always}
distribution_version: {description: "For example C(22.04).", type: str, returned: always}
distribution_major_version: {description: "For example C(22).", type: str, returned: always}
"""

import glob
import grp
import hashlib
import os
import platform
import pwd
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Sequence

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node_gpu import gpu
from ansible.module_utils.node_network import cards, netplan_files, netplan_originals, of_ifupdown, owners
from ansible.module_utils.node_packages import missing, said, waiting
from ansible.module_utils.node_start import in_wsl, start
from ansible.module_utils.node_units import units


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def texts(paths: list[str]) -> dict[str, str]:
    return {path: read(os.path.expanduser(path)) for path in paths}


def file_state(path: str) -> dict[str, object]:
    state: dict[str, object] = dict.fromkeys(("sha256", "mode", "owner", "group", "target"), "")
    try:
        status = os.lstat(path)
    except OSError:
        return {"kind": "absent", **state, "mtime": 0.0}
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
    state["mode"] = f"{stat.S_IMODE(status.st_mode):04o}"
    state["owner"], state["group"] = (
        name_of(pwd.getpwuid, status.st_uid),
        name_of(grp.getgrgid, status.st_gid),
    )
    if kind == "file":
        with open(path, "rb") as file:
            state["sha256"] = hashlib.sha256(file.read()).hexdigest()
    elif kind == "link":
        state["target"] = os.readlink(path)
    return {"kind": kind, **state, "mtime": status.st_mtime}


def name_of(find: Callable[[int], Sequence[str]], number: int) -> str:
    try:
        return find(number)[0]
    except KeyError:
        return str(number)


def users(names: list[str]) -> dict[str, dict[str, object]]:
    wanted = set(names)
    return {
        entry.pw_name: {
            "uid": entry.pw_uid,
            "gid": entry.pw_gid,
            "home": entry.pw_dir,
            "shell": entry.pw_shell,
        }
        for entry in pwd.getpwall()
        if entry.pw_name in wanted
    }


def groups(names: list[str]) -> dict[str, int]:
    wanted = set(names)
    return {entry.gr_name: entry.gr_gid for entry in grp.getgrall() if entry.gr_name in wanted}


def taken(numbers: list[int]) -> list[dict[str, object]]:
    found = [
        {"kind": "user", "name": user.pw_name, "number": user.pw_uid}
        for user in pwd.getpwall()
        if user.pw_uid in numbers
    ]
    found += [
        {"kind": "group", "name": group.gr_name, "number": group.gr_gid}
        for group in grp.getgrall()
        if group.gr_gid in numbers
    ]
    return found


NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs")


def mounts(paths: list[str], table: str) -> dict[str, dict[str, object]]:
    """table: /proc/self/mountinfo. What a server gives is never touched: it may be off."""
    lines = []
    for line in table.splitlines():
        own, _, rest = line.partition(" - ")
        where, options = own.split(" ")[4:6]
        kind, source, more = rest.split(" ")[:3]
        lines.append((unescaped(where), unescaped(source), kind, [*options.split(","), *more.split(",")]))
    found = {}
    for path in paths:
        holders = [line for line in lines if path == line[0] or path.startswith(f"{line[0].rstrip('/')}/")]
        # The longest name is the nearest; of several on one place the last one covers the others. What is no absolute
        # path lies nowhere: the role that asked will say so.
        nowhere: tuple[str, str, str, list[str]] = ("", "", "", [])
        where, source, kind, options = max(reversed(holders), key=lambda line: len(line[0]), default=nowhere)
        found[path] = {
            "mounted": where == path, "where": where, "source": source, "type": kind,
            "options": sorted(set(options)), "owner": "" if where == path and kind in NETWORK else owner(path),
            "empty": where != path and not (os.path.isdir(path) and os.listdir(path)),
            "used": where != path and used(path), "free": 0 if kind in NETWORK else free(where),
        }  # fmt: skip
    return found


def owner(path: str) -> str:
    """Whose it is; of a link: whose that is where it leads."""
    try:
        return name_of(pwd.getpwuid, os.stat(path).st_uid)
    except OSError:
        return ""


def free(where: str) -> int:
    """Bytes that are left in the file system that is mounted there."""
    try:
        left = os.statvfs(where)
    except OSError:
        return 0
    return left.f_bavail * left.f_frsize


def used(path: str) -> bool:
    """Empty directories do not count."""
    return any(
        files or any(os.path.islink(os.path.join(place, name)) for name in directories)
        for place, directories, files in os.walk(path)
    )


def unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def session() -> dict[str, object]:
    """SSH_CONNECTION, which sudo takes away: from the first of our ancestors that still has it."""
    process = os.getpid()
    while process > 1:
        found = re.search(r"(?:^|\0)SSH_CONNECTION=(\S+) \d+ (\S+) (\d+)", read(f"/proc/{process}/environ"))
        if found:
            return {"client": found[1], "here": found[2], "port": int(found[3])}
        parent = re.search(r"^PPid:\s*(\d+)", read(f"/proc/{process}/status"), re.MULTILINE)
        process = int(parent[1]) if parent else 0
    return {"client": "", "here": "", "port": 0}


def distribution() -> dict[str, str]:
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', read("/etc/os-release"), re.MULTILINE))
    version = release.get("VERSION_ID", "")
    return {
        "distribution": {"ubuntu": "Ubuntu", "debian": "Debian"}.get(
            release.get("ID", ""), release.get("NAME", "")
        ),
        "distribution_version": version,
        "distribution_major_version": version.partition(".")[0],
    }


def network(wanted: bool, addresses: list[str]) -> dict[str, object]:
    if not wanted:
        return {"cards": [], "netplan": {}, "netplan_before": {}, "owners": {}, "ifupdown": []}
    nm_devices = (
        said("nmcli", "--terse", "--fields", "DEVICE,STATE", "device") if shutil.which("nmcli") else ""
    )
    found = cards(
        said("ip", "-json", "-details", "address"),
        said("ip", "-json", "-4", "route", "show", "default"),
        nm_devices,
    )
    return {
        "cards": found,
        "netplan": netplan_files(),
        "netplan_before": netplan_originals(),
        "owners": owners(addresses, found),
        "ifupdown": of_ifupdown(found),
    }


def firewall(wanted: bool) -> dict[str, object]:
    if not wanted:
        return {"ufw": False, "firewalld": False, "table": "", "table_comment": ""}
    table = said("nft", "--stateless", "list", "table", "inet", "aura")
    comment = re.search(r'^\tcomment "([^"]*)"', table, re.MULTILINE)
    return {
        "ufw": bool(re.search(r"^ENABLED=yes", read("/etc/ufw/ufw.conf"), re.MULTILINE)),
        "firewalld": said("systemctl", "is-active", "firewalld.service").strip() == "active",
        "table": table,
        "table_comment": comment[1] if comment else "",
    }


def sshd(wanted: bool) -> dict[str, object]:
    if not wanted:
        return {"sshd": {}, "sshd_socket": False}
    settings: dict[str, list[str]] = {}
    for line in said("sshd", "-T").splitlines():
        keyword, _, value = line.partition(" ")
        settings.setdefault(keyword.lower(), []).append(value)
    return {"sshd": settings, "sshd_socket": said("systemctl", "is-active", "ssh.socket").strip() == "active"}


def clock(wanted: bool) -> dict[str, object]:
    # Identifier, address, stratum, the source's time, offset, …, leap status. 7F7F0101 is this node's own clock.
    says = said("chronyc", "-n", "-c", "tracking").strip().split(",") if wanted else []
    if len(says) < 14 or says[0] in ("00000000", "7F7F0101") or says[-1] == "Not synchronised":
        return {"clock": {"source": "", "offset": 0.0}}
    return {"clock": {"source": says[1], "offset": abs(float(says[4]))}}


def main() -> None:
    lists = {
        name: {"type": "list", "elements": "str", "default": []}
        for name in "packages files texts units users groups mounts addresses".split()
    }
    numbers = {"uids": {"type": "list", "elements": "int", "default": []}}
    names = ("network", "firewall", "sshd", "gpu", "upgrades", "clock")
    switches = {name: {"type": "bool", "default": False} for name in names}
    module = AnsibleModule(argument_spec={**lists, **numbers, **switches}, supports_check_mode=True)
    asked, now = module.params, time.time()
    system = distribution()
    module.exit_json(
        changed=False,
        missing=missing(asked["packages"]),
        apt_lists=bool(glob.glob("/var/lib/apt/lists/*_Packages*")),
        files={path: file_state(path) for path in asked["files"]},
        texts=texts(asked["texts"]),
        units=units(asked["units"], now),
        users=users(asked["users"]),
        groups=groups(asked["groups"]),
        taken=taken(asked["uids"]),
        mounts=mounts(asked["mounts"], read("/proc/self/mountinfo")),
        session=session(),
        upgrades=waiting() if asked["upgrades"] else [],
        reboot_required=os.path.exists("/run/reboot-required"),
        start=start(),
        wsl=in_wsl(),
        hostname=socket.gethostname(),
        boot_id=read("/proc/sys/kernel/random/boot_id").strip(),
        python=platform.python_version(),
        machine=platform.machine(),
        now=now,
        **network(asked["network"], asked["addresses"]),
        **firewall(asked["firewall"]),
        **sshd(asked["sshd"]),
        gpu=gpu(asked["gpu"]),
        **clock(asked["clock"]),
        **system,
        ansible_facts=system,
    )


if __name__ == "__main__":
    main()
