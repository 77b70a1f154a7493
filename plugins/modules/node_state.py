"""What a node is now: packages, files, units, users, cards, GPUs. How roles look that are not plain Ansible yet.

One call answers all that a role wants to know of a node, and changes nothing. Roles call the action of the same name,
which reads meta/look.yml of the role and runs this module as root.

What is asked, lists:
    packages, units, users, groups   names; of units in full
    files      files, links and directories, by their absolute paths
    texts      text files to read; ~NAME/ is a user's home
    uids       numbers of which it is wanted who has them
    mounts     directories of which it is wanted what is mounted
    modules    modules of the kernel
and switches: network, gpu, upgrades.

The answer, whose keys are always there:
    missing    those of `packages` that are not installed
    apt_lists  whether apt knows which packages there are
    files      by path: kind (file, directory, link, absent, other), sha256 (of a file), mode ("0644"), owner, group,
               target (of a link), mtime (seconds since the epoch)
    texts      by path: the content, empty where there is no such file
    units      by name: exists, active, enabled, enabled_state, started (seconds since the epoch, 0 when it does not
               run), reload (systemd has not read its files yet), stale (they have changed since it was started)
    users      by name: uid, gid, home, shell; who does not exist is left out
    groups     by name: the number; what does not exist is left out
    taken      who has one of `uids`: kind (user or group), name, number
    mounts     by path: mounted (whether something is mounted right there), where (its mount point), source, type and
               options (a list) of the file system in which it lies, owner (empty where there is nothing), empty
               (whether there is nothing in it; false where something is mounted), used (whether a file or a link is
               anywhere below it), free (bytes left in that file system). What comes over the network is not looked
               into: it is used, and has no owner
    modules    by name: whether the kernel has it or can load it
    session    the connection over which this was asked: client and here (addresses) and port; "" and 0 without SSH
    cards      the network cards; see module_utils/node_network.py
    gpu        cards on the PCI bus, driver, smi, elsewhere, machine; see module_utils/node_gpu.py
    upgrades   packages that apt would upgrade, from the lists that the node has: package, installed ("" when it is
               new), candidate, security, together (whether playbooks/upgrade.yml alone moves it), held (whether a hold
               keeps it where it is: its own, or that of a package that it needs)
    reboot_required   whether something installed waits for the next boot
    start      what a restart meets; see module_utils/node_start.py
    wsl        whether the node is Linux under Windows (WSL 2)
    hostname, machine (x86_64, say)
    now        the node's time, in seconds since the epoch
    distribution, distribution_version ("22.04"), distribution_major_version: as in ansible_facts
"""

from __future__ import annotations

import glob
import grp
import os
import platform
import pwd
import re
import shutil
import socket
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node_files import file_state, name_of, read
from ansible.module_utils.node_gpu import read_gpus
from ansible.module_utils.node_network import cards
from ansible.module_utils.node_packages import missing, said, waiting
from ansible.module_utils.node_start import in_wsl, read_start

NO_GPU: dict[str, object] = {"cards": [], "driver": "", "smi": [], "elsewhere": "", "machine": {}}


def texts(paths: list[str]) -> dict[str, str]:
    return {path: read(os.path.expanduser(path)) for path in paths}


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
    everybody = [("user", user.pw_name, user.pw_uid) for user in pwd.getpwall()]
    everybody += [("group", group.gr_name, group.gr_gid) for group in grp.getgrall()]
    return [
        {"kind": kind, "name": name, "number": number}
        for kind, name, number in everybody
        if number in numbers
    ]


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
        served = where == path and kind in NETWORK
        found[path] = {
            "mounted": where == path, "where": where, "source": source, "type": kind,
            "options": sorted(set(options)), "owner": "" if served else owner(path),
            "empty": where != path and not (os.path.isdir(path) and os.listdir(path)),
            "used": served or used(path), "free": 0 if kind in NETWORK else free(where),
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


def has_module(name: str) -> bool:
    """Whether the kernel has it: in use, built in, or on the disk."""
    return os.path.exists(f"/sys/module/{name}") or said("modprobe", "--show-depends", name) != ""


GENERATED = "/run/systemd/generator"  # and .early, .late: written again whenever systemd reloads, with the same in them
PROPERTIES = (
    *("LoadState", "ActiveState", "UnitFileState", "NeedDaemonReload"),
    *("ActiveEnterTimestampMonotonic", "FragmentPath", "DropInPaths"),
)


def units(names: list[str], now: float) -> dict[str, dict[str, object]]:
    if not names:
        return {}
    blocks = said("systemctl", "show", f"--property={','.join(PROPERTIES)}", "--", *names).split("\n\n")
    # systemctl answers in the order of the question.
    return {name: unit(block, now) for name, block in zip(names, blocks + [""] * len(names), strict=False)}


def unit(block: str, now: float) -> dict[str, object]:
    says = dict(line.partition("=")[::2] for line in block.strip().splitlines())
    active = says.get("ActiveState") in ("active", "reloading")
    since_boot = int(says.get("ActiveEnterTimestampMonotonic") or 0) / 1e6
    started = now - time.clock_gettime(time.CLOCK_MONOTONIC) + since_boot if active and since_boot else 0.0
    own = [says.get("FragmentPath", ""), *says.get("DropInPaths", "").split()]
    own = [path for path in own if not path.startswith(GENERATED)]
    changed = [os.stat(path).st_mtime for path in own if path and os.path.exists(path)]
    return {
        "exists": says.get("LoadState", "not-found") not in ("not-found", ""),
        "active": active,
        "enabled": says.get("UnitFileState") == "enabled",
        "enabled_state": says.get("UnitFileState", ""),
        "reload": says.get("NeedDaemonReload") == "yes",
        "started": started,
        # A time to come says nothing (the clock was set since).
        "stale": bool(started) and any(started < moment <= now for moment in changed),
    }


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


def network(wanted: bool) -> dict[str, object]:
    if not wanted:
        return {"cards": []}
    nm_devices = (
        said("nmcli", "--terse", "--fields", "DEVICE,STATE", "device") if shutil.which("nmcli") else ""
    )
    addresses = said("ip", "-json", "-details", "address")
    routes = said("ip", "-json", "-4", "route", "show", "default")
    return {"cards": cards(addresses, routes, nm_devices)}


def main() -> None:
    lists = {
        name: {"type": "list", "elements": "str", "default": []}
        for name in "packages files texts units users groups mounts modules".split()
    }
    numbers = {"uids": {"type": "list", "elements": "int", "default": []}}
    names = ("network", "gpu", "upgrades")
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
        modules={name: has_module(name) for name in asked["modules"]},
        session=session(),
        upgrades=waiting() if asked["upgrades"] else [],
        reboot_required=os.path.exists("/run/reboot-required"),
        start=read_start(),
        wsl=in_wsl(),
        hostname=socket.gethostname(),
        machine=platform.machine(),
        now=now,
        **network(asked["network"]),
        gpu=read_gpus() if asked["gpu"] else NO_GPU,
        **system,
        ansible_facts=system,
    )


if __name__ == "__main__":
    main()
