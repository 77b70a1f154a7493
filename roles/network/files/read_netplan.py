"""Print what others have written about one network interface, as JSON. Read-only; run as root on the node.

Arguments: the interface's name, its MAC address, the path of our own netplan file.

id        the netplan ID under which other files configure the interface; its own name if none does
renderer  who has the interface: networkd or NetworkManager
moved     files with a static address, which ours replaces
cloud     whether cloud-init writes netplan files here
problems  why a netplan file of ours cannot configure the interface: sentences
"""

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path

NETPLAN = "/etc/netplan"
# What a file that moves away may say of the interface: ours says it too, or it is about DHCP and names.
REPLACED = {
    *("addresses", "critical", "dhcp-identifier", "dhcp4", "dhcp6", "gateway4", "match", "nameservers"),
    *("optional", "routes", "set-name"),
}
STATIC = {"addresses", "gateway4", "routes"}


def text_of(path):
    return Path(path).read_text(encoding="utf-8", errors="replace")


def matches(netplan_id, definition, name, mac):
    """Whether a definition is about the interface."""
    match = definition.get("match")
    if match is None:
        return netplan_id == name
    return match.get("macaddress", mac).lower() == mac and fnmatch.fnmatch(name, match.get("name", "*"))


def is_wide(definition):
    """Whether a definition can be about several interfaces."""
    match = definition.get("match")
    return (
        match is not None
        and "macaddress" not in match
        and not re.fullmatch(r"[^*?[]+", match.get("name", "*"))
    )


def load(path):
    """What is below `network` in a netplan file."""
    import yaml  # netplan needs it, so it is there where there are netplan files

    return (yaml.safe_load(text_of(path)) or {}).get("network") or {}


def read_file(path, name, mac):
    """One netplan file: the IDs under which it configures the interface, whether it moves away, and problems."""
    network = load(path)
    ethernets = network.get("ethernets") or {}
    found = {key: value or {} for key, value in ethernets.items() if matches(key, value or {}, name, mac)}
    moves, problems = False, []
    for netplan_id, definition in found.items():
        if is_wide(definition):
            problems.append(
                f"{path} configures {name} and others together ({netplan_id}: match). Give {name} an entry of its "
                "own there, or remove that one; then: sudo netplan apply"
            )
        elif STATIC & set(definition):
            others = set(network) - {"version", "ethernets"} | set(ethernets) - {netplan_id}
            if network.get("renderer") == "networkd":
                others.discard("renderer")
            others |= set(definition) - REPLACED
            moves = not others
            if others:
                problems.append(
                    f"{path} gives {name} a static address, and says more ({', '.join(sorted(others))}). "
                    f"Remove addresses, routes and gateway4 of {name} there; then: sudo netplan apply"
                )
    for kind in ("bonds", "bridges", "vlans"):
        for key, value in (network.get(kind) or {}).items():
            used = [*((value or {}).get("interfaces") or []), (value or {}).get("link")]
            if set(used) & {name, *found}:
                problems.append(
                    f"{path} uses {name} in {key} ({kind}). Only an interface by itself can have the address: "
                    f"remove {key} there, or name another interface (lan_interface)."
                )
    return list(found), moves, problems


def read_own(path, mac):
    """The ID of our own file, which stays when a new card has renamed the interface: {ID: path}."""
    ethernets = load(path).get("ethernets") or {} if Path(path).exists() else {}
    macs = {
        netplan_id: definition.get("match", {}).get("macaddress", "")
        for netplan_id, definition in ethernets.items()
    }
    return {netplan_id: path for netplan_id, known in macs.items() if known.lower() == mac}


def read_files(name, mac, own):
    """The netplan ID, the files that move away, and problems."""
    ids, moved, problems = read_own(own, mac), [], []
    for path in sorted(str(path) for path in Path(NETPLAN).glob("*.yaml")):
        if path == own:
            continue
        try:
            found, moves, wrong = read_file(path, name, mac)
        except Exception as error:  # what is no YAML, and what netplan would not know either
            found, moves, wrong = [], False, [f"{path} cannot be read: {' '.join(str(error).split())[:200]}"]
        problems += wrong
        if moves:
            moved.append(path)
        else:
            ids |= {netplan_id: path for netplan_id in found if netplan_id not in ids}
    if len(ids) > 1:
        where = " and ".join(f"{path} (as {netplan_id})" for netplan_id, path in ids.items())
        problems.append(f"{where} both configure {name}. Leave one of them; then: sudo netplan apply")
    return next(iter(ids), name), moved, problems


def read_ifupdown(name):
    """Problems: /etc/network/interfaces configures the interface."""
    for path in [Path("/etc/network/interfaces"), *Path("/etc/network/interfaces.d").glob("*")]:
        if path.is_file() and re.search(rf"^\s*iface\s+{re.escape(name)}\s", text_of(path), re.MULTILINE):
            return [
                f"{path} configures {name}, and netplan would configure it too. Remove {name} there, write "
                f"/etc/netplan/01-lan.yaml with network: {{version: 2, ethernets: {{{name}: {{dhcp4: true}}}}}}, "
                "and restart the PC."
            ]
    return []


def read_networkd(name, netplan_id):
    """Problems: a file of systemd-networkd that sorts before netplan's configures the interface."""
    try:
        index = text_of(f"/sys/class/net/{name}/ifindex").strip()
        state = text_of(f"/run/systemd/netif/links/{index}")
    except OSError:
        return []
    found = re.search(r"^NETWORK_FILE=(.+)$", state, re.MULTILINE)
    path = found.group(1) if found else ""
    if not path or "netplan" in path or Path(path).name > f"10-netplan-{netplan_id}.network":
        return []
    return [
        f"systemd-networkd configures {name} by {path}, which goes before netplan's files. Remove it; then: "
        "sudo networkctl reload"
    ]


def read_renderer(name):
    """Who has the interface now."""
    try:
        done = subprocess.run(
            ["nmcli", "--terse", "--fields", "DEVICE,STATE", "device"], stdout=subprocess.PIPE, check=False
        )
    except OSError:
        return "networkd"
    lines = done.stdout.decode(errors="replace").splitlines()
    held = [line for line in lines if line.startswith(f"{name}:") and not line.endswith(":unmanaged")]
    return "NetworkManager" if held else "networkd"


def main(name, mac, own):
    netplan_id, moved, problems = read_files(name, mac.lower(), own)
    problems += read_ifupdown(name) + read_networkd(name, netplan_id)
    answer = {
        "id": netplan_id,
        "renderer": read_renderer(name),
        "moved": moved,
        "cloud": Path("/etc/cloud/cloud.cfg.d").is_dir(),
        "problems": problems,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
