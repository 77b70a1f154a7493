"""The checks that look at one node at a time."""

from __future__ import annotations

from aura.check.connectivity.checks import SITE, STOP, WINDOWS, Check, Status, count, fine, join, unknown
from aura.check.connectivity.evidence import Evidence, Json, Node, last_line


def check_answers(evidence: Evidence) -> list[Check]:
    found = []
    for node in evidence.nodes:
        if node.complaint:
            # Ansible's sentence ends with ssh's own, which is the one that says something.
            said = last_line(node.complaint).rsplit("ssh: ", 1)[-1].removeprefix("Task failed: ")
            message = f"{node.name} ({node.address}): {said}"
            found.append(Check("answers", "failed", node.name, message, explain_ssh(node)))
    return found or fine("answers", count(len(evidence.nodes), "node"))


def explain_ssh(node: Node) -> str:
    """The remedy for what ssh said."""
    name, said = node.name, node.complaint.lower()
    bootstrap = f"ansible-playbook playbooks/bootstrap.yml -k -K --limit {name}"
    if "host key verification failed" in said or "identification has changed" in said:
        return (
            f"The machine at {node.address} is not the {name} of before. If you have installed {name} anew, {bootstrap}"
            " (it says how to forget the old host key); else another machine has this address"
        )
    if "permission denied" in said:
        lost = "where it takes no password any more: docs/operations.md, The key is lost"
        return f"{name} does not know this project's key: {bootstrap}; {lost}"
    if "refused" in said:
        return f"{name} is on, but its SSH server is not: at its keyboard, sudo systemctl enable --now ssh"
    if "timed out" in said or "no route" in said or "unreachable" in said:
        return f"Is {name} on? Are its cable's lights on at both ends? Is {node.address} still its address?"
    return f"Try it by hand: ansible {name} -m ansible.builtin.ping -vvv"


def check_trainer(evidence: Evidence) -> list[Check]:
    answering = [node for node in evidence.nodes if not node.complaint]
    missing = [node.name for node in answering if not node.trainer]
    if not answering:
        return unknown("trainer", "no node answers")
    if missing:
        remedy = SITE if len(missing) == len(evidence.nodes) else f"{SITE} --limit {','.join(missing)}"
        return [Check("trainer", "failed", ", ".join(missing), f"not installed on {join(missing)}", remedy)]
    return fine("trainer", count(len(answering), "node"))


def check_probe(evidence: Evidence) -> list[Check]:
    asked = [node for node in evidence.nodes if node.trainer]
    found = []
    for node in asked:
        if node.document is None:
            remedy = f"Its release may be damaged or older than these playbooks: {SITE}"
            found.append(Check("probe", "failed", node.name, f"{node.name}: {node.probe_error}", remedy))
        elif not node.document.get("complete"):
            message = f"{node.name}: did not finish in time; what it had found is below"
            remedy = f"Check again. If it stays: is {node.name} overloaded (top), or its network (ping)?"
            found.append(Check("probe", "failed", node.name, message, remedy))
    if not asked:
        return unknown("probe", "no node has the trainer")
    return found or fine("probe", count(len(asked), "node"))


def check_address(evidence: Evidence) -> list[Check]:
    found = []
    for node in evidence.probed:
        if any(busy.get("reason") == "no address" for busy in node.busy_ports.values()):
            has = (node.about.get("addresses") or {}).values()
            mine = [one for addresses in has for one in addresses if not one.startswith("127.")]
            message = f"{node.name} does not have its address {node.address} (it has {join(mine)})"
            remedy = f"{SITE} gives it; or correct lan_address of {node.name} in the inventory"
            if node.name in evidence.wsl:
                remedy = f"Windows has to be told: {WINDOWS} --limit {node.name}"
            found.append(Check("address", "failed", node.name, message, remedy))
    return found or fine("address", ", ".join(f"{node.name} {node.address}" for node in evidence.probed))


def check_hostname(evidence: Evidence) -> list[Check]:
    found = []
    for node in evidence.probed:
        hostname = node.about.get("hostname")
        if hostname and hostname != node.name:
            message = f"{node.name} calls itself {hostname}"
            remedy = f"{SITE} --limit {node.name}"
            found.append(Check("hostname", "failed", node.name, message, remedy))
    return found or fine("hostname", "each node has its name of the inventory")


def check_names(evidence: Evidence) -> list[Check]:
    """A rank tells its peers the address that its own name resolves to: 127.x makes them call themselves."""
    found = []
    for node in evidence.probed:
        resolves: dict[str, list[str] | None] = node.about.get("resolves") or {}
        hostname = node.about.get("hostname") or node.name
        loopback = [one for one in resolves.get(hostname) or [] if one.startswith("127.")]
        if loopback and loopback != [node.address]:
            message = (
                f"on {node.name}, its own name {hostname} is {loopback[0]}: other ranks would call themselves"
            )
            remedy = f"{SITE} corrects /etc/hosts there (the line {loopback[0]} {hostname} must go)"
            found.append(Check("names", "failed", node.name, message, remedy))
            continue
        expected = {other.name: [other.address] for other in evidence.probed}
        wrong = [name for name in expected if name in resolves and resolves[name] != expected[name]]
        if wrong:
            said = "; ".join(f"{name} is {join(resolves[name] or ['unknown'])}" for name in wrong)
            remedy = f"{SITE} writes the names of all nodes into /etc/hosts"
            status: Status = "failed" if node.name in wrong else "warning"
            found.append(Check("names", status, node.name, f"on {node.name}, {said}", remedy))
    return found or fine("names", "every node's name is its LAN address, on every node")


def check_interface(evidence: Evidence) -> list[Check]:
    """Gloo and NCCL use one interface: the one that has the LAN address must be the way to every peer."""
    found = []
    for node in evidence.probed:
        own = node.about.get("interface")
        routes: dict[str, Json] = node.about.get("routes") or {}
        astray: dict[str, list[str]] = {}
        for peer, route in routes.items():
            if own and route.get("interface") and route["interface"] != own:
                astray.setdefault(route["interface"], []).append(peer)
        for interface, peers in astray.items():
            message = f"{node.name}'s address is on {own}, but it reaches {join(peers)} through {interface}"
            remedy = (
                f"Two ways to the same network (wireless as well as the cable?): on {node.name}, turn {interface} off"
                f" or give it another network; `ip route get {evidence.address(peers[0])}` must say {own}"
            )
            found.append(Check("interface", "failed", node.name, message, remedy))
    known = [
        f"{node.name} {node.about['interface']}" for node in evidence.probed if node.about.get("interface")
    ]
    return found or fine("interface", ", ".join(known) or "not told")


def check_link(evidence: Evidence) -> list[Check]:
    found = []
    known = []
    for node in evidence.probed:
        if node.name in evidence.wsl:
            found.append(unseen_from_wsl(node.name))
            continue
        link = node.about.get("link") or {}
        speed, duplex, interface = link.get("speed_mbit"), link.get("duplex"), node.about.get("interface")
        if not speed or not link.get("physical"):
            continue  # a virtual interface tells a number that means nothing
        known.append(f"{node.name} {speed}")
        message = ""
        if speed < evidence.link_speed:
            message = (
                f"{node.name}: {interface} negotiated {speed} Mbit/s, {evidence.link_speed:.0f} expected"
            )
        elif duplex == "half":
            message = f"{node.name}: {interface} works in half duplex"
        if message:
            remedy = cable(node.name, interface, evidence.link_speed)
            found.append(Check("link", "failed", node.name, message, remedy))
    return found or fine(
        "link", ", ".join(known) + " Mbit/s" if known else "the interfaces do not tell (virtual)"
    )


def unseen_from_wsl(name: str) -> Check:
    """What only Windows knows: Linux has a virtual card there, which tells a speed that is not the cable's."""
    message = (
        f"{name} is Linux under Windows: how fast its link is, and whether Windows falls asleep, is not seen"
        " from here"
    )
    remedy = (
        f"In PowerShell on {name}: Get-NetAdapter (LinkSpeed), powercfg /query; the bandwidths below are measured. What"
        f" Windows has to be told: {WINDOWS} --limit {name}"
    )
    return Check("link", "warning", name, message, remedy)


def cable(name: str, interface: str | None, speed: float) -> str:
    """What to do about a link that is slower than it should be."""
    return (
        f"Replug {name}'s cable at both ends, then try another cable (all eight wires, Cat 5e or better) and another"
        f" port of the switch. On {name}, `cat /sys/class/net/{interface or 'INTERFACE'}/speed` must say {speed:.0f}"
    )


def check_rendezvous_port(evidence: Evidence) -> list[Check]:
    found = []
    for node in evidence.probed:
        for name, busy in node.busy_ports.items():
            if busy.get("reason") == "no address":
                continue  # check_address says it
            port = evidence.rendezvous_port if name == "rendezvous" else evidence.ephemeral_port
            holder = busy.get("holder") or {}
            message = f"port {port} on {node.name} {describe_holder(busy, holder)}"
            status: Status = "failed"
            remedy = f"A run is active? {STOP}. Another program? Stop it, or choose another rendezvous_port"
            if name == "ephemeral":
                status, remedy = "warning", "Check again: another port will be drawn"
            elif (holder.get("unit") or "").startswith(("aura-train@", "aura-script.")):
                message += ": a run is active, which also slows down what is measured here"
                remedy = f"Stop it, then check again: {STOP}"
            found.append(Check("rendezvous_port", status, node.name, message, remedy))
    nodes = count(len(evidence.probed), "node")
    return found or fine("rendezvous_port", f"{evidence.rendezvous_port} on {nodes}")


def describe_holder(busy: Json, holder: Json) -> str:
    if busy.get("reason") != "in use":
        return f"cannot be listened on ({busy.get('reason')})"
    who = holder.get("command") or "a process"
    details = [f"pid {holder['pid']}"] if holder.get("pid") else []
    details += [str(holder["unit"])] if holder.get("unit") else []
    details += [f"user {holder['user']}"] if holder.get("user") else []
    return f"is in use by {who}" + (f" ({', '.join(details)})" if details else "")
