"""What has to be done for a node to have its final address, from what it is now (role static_network)."""

from __future__ import annotations

import ipaddress
import json
import re
import time
from typing import Any

import yaml
from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]
Plan = dict[str, Any]
Plans = dict[str, Plan]
File = dict[str, Any]

OURS = "/etc/netplan/90-aura.yaml"
CLOUD = "/etc/cloud/cloud.cfg.d"
CLOUD_FILE = f"{CLOUD}/99-disable-network-config.cfg"
CLOUD_TEXT = "# Written by Ansible (role static_network).\nnetwork: {config: disabled}\n"
BACKUPS = "/var/backups/aura"
EDITED = f"{BACKUPS}/edited"
TEXT = """\
# Written by Ansible (role static_network). Addresses, routes and name servers are overwritten; what else stands here
# about the card (mtu, wakeonlan and the like) is kept.
# Of several definitions that fit a card, systemd-networkd takes the first by name, and this one's name sorts first.
"""
# netplan has networkd configure the card twice in a row. When the second comes while the first is still taking
# addresses away, an address may fail, and networkd then gives the card up until it is told to begin again.
SETTLE = """
link=/run/systemd/netif/links/$(cat /sys/class/net/{card}/ifindex)
for second in 1 2 3 4 5 6 7 8 9 10; do
    sleep 1
    if grep -q ADMIN_STATE=configured $link; then exit 0; fi
    if grep -q ADMIN_STATE=failed $link; then networkctl reconfigure {card}; fi
done
exit 0"""


def other_filter(name: str) -> Any:
    return filter_loader.get(name).j2_function


def network_plan(seen: Seen, settings: dict[str, Any], found_at: str = "") -> Plan:
    """seen: of node_state. settings: the role's variables without its name. found_at: where the node answers now.

    The answer: `problems` (sentences), `card` (where it is clear), `why` (what the files do not show), `differs`
    (whether there is anything to do), `missing` (packages), `lacks` (whether the card needs the address), `files`,
    `apply`, `undo` (as safe_change takes them), `own` (whether the node is the controller itself), `to` (its address),
    `network`, `before` (where it is when this is undone; '' where it is reached now).
    """
    address, prefix = settings["address"], settings["prefix"]
    card = other_filter("lan_card")(seen["cards"], address, prefix, settings["interface"])
    takeover = other_filter("netplan_takeover")(seen["netplan"], card, settings)
    way_out = other_filter("lan_gateway_problem")(seen["cards"], card, settings["gateway"], address, prefix)
    problems = [said for said in (card["problem"], takeover["problem"], way_out) if said]
    if problems:
        return {"problems": problems, "differs": False}
    if problem := address_problem(address, card, seen):
        return {"problems": [problem], "differs": False, "card": card}
    wanted = f"{address}/{prefix}"
    has = [one for one in card["addresses"] if ":" not in one and not one.startswith("169.254.")]
    lacks = wanted not in has or wanted in card["dynamic"]
    why = what_differs(card, has, wanted, lacks, settings["gateway"])
    files = [{"path": OURS, "content": text(takeover["definition"]), "mode": "0600"}]
    if seen["files"][CLOUD]["kind"] == "directory":
        files.append({"path": CLOUD_FILE, "content": CLOUD_TEXT, "mode": "0644"})
    # On Ubuntu, netplan and systemd-resolved are part of every installation, and 22.04 has no package for the latter.
    missing = seen["missing"] if seen["distribution"] == "Debian" else []
    as_it_shall_be = other_filter("as_it_shall_be")
    written = all(as_it_shall_be(file, seen["files"][file["path"]]) for file in files)
    differs = bool(missing or why or takeover["others"] or not written)
    # An address that was only lent is gone then. (An interrupted run may have left one, at which the node was found.)
    before = settings["first_address"] if found_at == address else ""
    return {
        "problems": [], "card": card, "why": why, "differs": differs, "missing": missing, "lacks": lacks,
        "files": files + theirs(takeover["others"], seen["now"]),
        **commands(card["name"], takeover["definition"]["renderer"], wanted if lacks else ""),
        "own": seen["session"]["client"] == seen["session"]["here"], "to": address,
        "network": str(ipaddress.ip_interface(wanted).network),
        "before": before if before in [one.partition("/")[0] for one in has] else "",
    }  # fmt: skip


def what_differs(card: Seen, has: list[str], wanted: str, lacks: bool, gateway: str) -> str:
    if lacks or has != [wanted]:
        return (
            f"{card['name']} has {', '.join(has) or 'no IPv4 address'}, and shall have {wanted} for good and "
            "nothing else."
        )
    if card["gateway"] != gateway:
        return (
            f"{card['name']} has {card['gateway'] or 'nothing'} as its default route, and shall have "
            f"{gateway or 'none'}."
        )
    return ""


def text(definition: dict[str, Any]) -> str:
    # What Ansible hands over are strings and numbers of its own kind.
    plain = json.loads(json.dumps({"network": {"version": 2, "ethernets": {"0-aura": definition}}}))
    return TEXT + yaml.safe_dump(plain, indent=2, sort_keys=False, allow_unicode=True)


def theirs(others: list[dict[str, str]], now: float) -> list[File]:
    """What others said about this card is taken out of their files, each with its original."""
    stamp = time.strftime("%Y-%m-%dT%H%M%S", time.localtime(now))
    files: list[File] = []
    for other in others:
        path, content = other["path"], other["content"]
        files.append({"path": f"{BACKUPS}{path}.{stamp}", "content": other["original"], "mode": "0600"})
        files.append(
            {"path": path, "content": content, "mode": "0600"} if content else {"path": path, "absent": True}
        )
    return files


def commands(card: str, renderer: str, give_back: str) -> dict[str, list[list[str]]]:
    """give_back: an address that was lent. networkd does not take one over that somebody else has put on the card."""
    first = f"ip address delete {give_back} dev {card} 2>/dev/null; sleep 1\n" if give_back else ""
    if renderer == "NetworkManager":
        # `netplan apply` would start it again as a whole, and cut whatever else it holds (a home network, Wi-Fi).
        load = "netplan generate && nmcli connection reload && exec nmcli --wait 30"
        new, old = f"{load} connection up netplan-0-aura", f"{load} device connect {card}"
    else:
        new = old = "netplan apply || exit 1" + SETTLE.format(card=card)
    return {"apply": [["sh", "-c", first + new]], "undo": [["sh", "-c", first + old]]}


def network_before(seen: Seen) -> list[File]:
    """The files as they were before this role, as safe_change takes them; of several originals the oldest one. What
    somebody may have written into them since is kept."""
    files: dict[str, File] = {
        path: {"path": path, "absent": True}
        for path in (OURS, CLOUD_FILE)
        if seen["files"][path]["kind"] != "absent"
    }
    for kept in sorted(seen["netplan_before"], reverse=True):
        path = kept.removeprefix(BACKUPS).rpartition(".")[0]
        files[path] = {"path": path, "content": seen["netplan_before"][kept], "mode": "0600"}
        files[kept] = {"path": kept, "absent": True}
        if path in seen["netplan"]:
            edited = EDITED + path
            files[edited] = {"path": edited, "content": seen["netplan"][path], "mode": "0600"}
    return list(files.values())


def network_turn(plans: Plans, name: str) -> dict[str, str]:
    """Whose turn this node is: `first`, `rest`, `last` (the controller itself), or none. `peer`: the other node that
    connects to it, the first if possible, which is well before the others follow. `controller`: the node that is the
    controller and moves too; '' where it is none of these.

    plans: of all nodes of the play.
    """
    moving = {node: plan for node, plan in plans.items() if plan.get("differs")}
    first = next((node for node, plan in moving.items() if not plan["own"]), "")
    others = [node for node in plans if node != name]
    turn = "last" if name in moving and moving[name]["own"] else "first" if name == first else "rest"
    return {
        "turn": turn if name in moving else "",
        "peer": first if first in others else next(iter(others), ""),
        "controller": next((node for node, plan in moving.items() if plan["own"]), ""),
    }


def comes_from(plan: Plan, client: str, sources: list[str], controller: str) -> str:
    """From which address the controller would come to the new address; '' where there is no way, and for itself.

    client: who is connected now, as the node sees it. sources: `ip route get` (JSON) on the controller, to the new
    and to the present address. controller: the new address of a controller that is one of the nodes, and moves too.
    """
    if plan["own"] or controller:
        return "" if plan["own"] else controller
    there, now = map(route_source, sources)
    # By the same way it is seen as it is now, which its own address does not say (NAT).
    return client if there == now else there


def route_source(said: str) -> str:
    """The address from which packets would leave, from the JSON of `ip route get`; empty where there is no way."""
    try:
        routes = json.loads(said)
    except ValueError:
        return ""
    return str(routes[0].get("prefsrc", "")) if routes else ""


def loaded_admin_networks(table: str) -> list[str]:
    """The networks that may use SSH for good, from our table as nft lists it. Visitors are not among them."""
    chain = re.search(r"^\tchain admin \{\n(.*?)^\t\}", table, re.MULTILINE | re.DOTALL)
    return re.findall(r"\bsaddr (\S+) accept", chain[1]) if chain else []


def shut_out(address: str, table: str) -> bool:
    """Whether the firewall that is loaded would not let this address in (a scope such as %eth0 does not count)."""
    where = ipaddress.ip_address(address.partition("%")[0]) if address else None
    networks = [ipaddress.ip_network(known, strict=False) for known in loaded_admin_networks(table)]
    return where is not None and not any(where in known for known in networks)


def address_problem(address: str, card: Seen, seen: Seen) -> str:
    """Why the card cannot have the address; ''. seen: of node_state."""
    name = card["name"]
    if name in seen["ifupdown"]:
        return (
            f"has {name} in /etc/network/interfaces too, and two masters would fight over it. Give it to netplan: sudo "
            "apt install netplan.io; in /etc/netplan/01-lan.yaml: network: {version: 2, ethernets: {"
            f"{name}: {{dhcp4: true}}}}}}; take it out of /etc/network/interfaces (and interfaces.d); and restart the "
            "PC."
        )
    # A card that is switched off says nothing about its cable; it is asked again when it gets the address.
    return lend_problem(
        address, name, seen["owners"].get(address, {}).get(name, ""), card["carrier"] or not card["up"]
    )


def lend_problem(address: str, card: str, owner: str, linked: bool) -> str:
    """Why the card cannot have the address now; ''. owner: who else has it (module lan_address)."""
    if owner:
        return (
            f"shall have {address}, but another machine in the LAN answers there (hardware address {owner}). "
            f"Give that one another address (reserve {address} in the router), or choose another lan_address."
        )
    return "" if linked else f"has no link at its LAN card {card}. Plug its cable in at both ends."


def way_out_problem(card: str, gateway: str, answers: bool, silent: list[str]) -> str:
    """Why the node would not find its way out of the LAN; ''. answers: whether the router does. silent: name servers
    that do not."""
    if gateway and not answers:
        return (
            f'finds no router at {gateway} on {card}. Set lan_gateway to the router\'s address, or to "" where '
            "there is no way out of the LAN."
        )
    if silent:
        return (
            f"finds no name server at {', '.join(silent)}, so it would find nothing in the internet. Set "
            "lan_nameservers to what the router says, or to [] when there is none."
        )
    return ""


def login_problem(plan: Plan, direct: Seen, through: Seen, peer: str) -> str:
    """Why the node is not well at its new address; ''. direct, through: how a login there ended, by this machine and by
    another node (`peer`); without `rc` where there was none.
    """
    ends = {"this machine": direct, peer: through}
    failed = {who: end for who, end in ends.items() if end.get("rc", 0) != 0}
    if not failed:
        return ""
    said = (next(iter(failed.values())).get("stderr_lines") or [""])[-1]
    advice = (
        f"Does the cable of {plan['card']['name']} lead to the same switch as theirs?"
        if peer in failed
        else f"This machine needs a way into {plan['network']}: give it an address there (sudo ip address add ADDRESS "
        "dev CARD), and run this again."
    )
    return f"does not answer at {plan['to']} for {' nor for '.join(failed)} ({said}). {advice}"


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "comes_from": comes_from,
            "lend_problem": lend_problem,
            "loaded_admin_networks": loaded_admin_networks,
            "login_problem": login_problem,
            "network_before": network_before,
            "network_plan": network_plan,
            "network_turn": network_turn,
            "shut_out": shut_out,
            "way_out_problem": way_out_problem,
        }
