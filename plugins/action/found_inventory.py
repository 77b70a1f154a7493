"""From the machines that lan_ssh has found to an inventory: a table, a choice, hosts.yml and settings.yml."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

Machine = dict[str, Any]
Found = dict[str, Any]  # what lan_ssh returns

EXAMPLE = Path(__file__).parents[2] / "inventory/lan"
USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
MARK = re.compile(r"# Written by playbooks/find\.yml\b.* \(([0-9a-f]{12})\)\.\n")
INSTALL = "sudo apt install openssh-server"
SILENT = {
    "refused": "{0} has no SSH server on this port. On that PC: " + INSTALL,
    "silence": "{0} does not answer. Is it switched on, is its cable plugged in at both ends? Does a firewall of its "
    "own keep SSH out (there: sudo ufw allow OpenSSH)? "
    "Which address it has says, there: hostname -I",
    "other": "What answers at {0} is no SSH server: is that the right address?",
    "slow": "{0} takes the connection, but its SSH server says nothing: has it enough memory left? Try again.",
}
TWIN = "the same host key as {}: one PC with two addresses (cable and Wi-Fi, say), or a copied disk"


# ── what a person sees ───────────────────────────────────────────────────────────────────────────


def notes(machine: Machine) -> str:
    said = ["this machine"] if machine["own"] else []
    said += ["the router"] if machine["router"] else []
    said += [TWIN.format(machine["twin"])] if machine["twin"] else []
    if machine["answer"] != "ssh":
        said.append("no SSH server yet: " + INSTALL)
    return "; ".join(said)


def found_table(found: Found) -> str:
    here, machines = found["here"], found["machines"]
    rows = [("", "address", "name", "SSH server", "host key", "")]
    for number, machine in enumerate(machines, 1):
        words = [machine["address"], machine["name"], machine["server"], machine["kind"], notes(machine)]
        rows.append((str(number), *words))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    way_out = f"router {here['gateway']}" if here["gateway"] else "no router"
    lines.insert(0, f"This machine is {here['address']} ({here['card']}) in {here['network']}, {way_out}.")
    if found["without"]:
        lines.append(
            f"There too, without an SSH server: {', '.join(found['without'])}. "
            f"If one is a PC of yours, there: {INSTALL}"
        )
    return "\n".join(lines)


def nobody(found: Found) -> str:
    """A sentence where nothing answers."""
    here = found["here"]
    if any(machine["answer"] == "ssh" for machine in found["machines"]):
        return ""
    return (
        f"Nothing answers on SSH at the {here['asked']} addresses that were asked, from {here['address']} "
        f"({here['card']}). On each PC: {INSTALL}. Is it switched on, and at the same switch as this machine? Another "
        "network of this machine: -e network=192.168.50.0/24, say"
    )


# ── what a person says ───────────────────────────────────────────────────────────────────────────


def chosen(machines: list[Machine], answer: str) -> list[Machine]:
    """`all`, or numbers of the table and addresses, the first one for rank 0."""
    by_word = {str(number): machine for number, machine in enumerate(machines, 1)}
    by_word |= {machine["address"]: machine for machine in machines}
    if answer.strip().lower() == "all":
        words = [
            one["address"]
            for one in machines
            if one["answer"] == "ssh" and not one["router"] and not one["twin"]
        ]
    else:
        words = [word for word in re.split(r"[,\s]+", answer) if word]
    unknown = [word for word in words if word not in by_word]
    if unknown or not words:
        raise AnsibleActionFail(
            f"{', '.join(unknown) or 'Nothing'} is not in the table: `all`, or some of 1 to {len(machines)}, or "
            "addresses."
        )
    nodes = list({by_word[word]["address"]: by_word[word] for word in words}.values())
    sentences = [SILENT[one["answer"]].format(one["address"]) for one in nodes if one["answer"] != "ssh"]
    sentences += [f"{one['address']} is the router, and no node." for one in nodes if one["router"]]
    keys = [one["key"] for one in nodes if one["key"]]
    sentences += [
        f"{one['address']} has {TWIN.format(one['twin'])}. Choose one of the two, that of the cable; a copied disk "
        "gets keys of its own by: sudo rm /etc/ssh/ssh_host_*; sudo ssh-keygen -A; sudo systemctl restart ssh"
        for one in nodes
        if one["twin"] and keys.count(one["key"]) > 1
    ]
    if sentences:
        raise AnsibleActionFail("\n".join(sentences))
    return nodes


def addresses(found: Found, nodes: list[Machine], start: str) -> list[str]:
    """The lan_address of each node: today's, or those from `start` on ("today": the same)."""
    today = [node["address"] for node in nodes]
    if start == "today":
        return today
    here = found["here"]
    network = ipaddress.IPv4Network(here["network"])
    try:
        first = ipaddress.IPv4Address(start)
    except ValueError:
        raise AnsibleActionFail(
            f"{start!r} is no IPv4 address: the first of those that the nodes shall have."
        ) from None
    wanted = [first + number for number in range(len(nodes))]
    if any(one not in network or one in (network[0], network[-1]) for one in wanted):
        raise AnsibleActionFail(
            f"{first} to {wanted[-1]} are not addresses in {network}: choose a lower first one."
        )
    others = {
        here["gateway"],
        here["address"],
        *found["without"],
        *(one["address"] for one in found["machines"]),
    }
    for node, address in zip(nodes, map(str, wanted), strict=True):
        if address in others - {node["address"]}:
            raise AnsibleActionFail(
                f"{address} is somebody else's today, and {node['address']} cannot have it: choose another first one."
            )
    return list(map(str, wanted))


# ── what is written ──────────────────────────────────────────────────────────────────────────────


def marked(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"# Written by playbooks/find.yml, which leaves this file alone once you have edited it ({digest}).\n{text}"


def unmarked(text: str) -> str:
    return MARK.sub("", text, count=1) if MARK.match(text) else text


def unedited(text: str, committed: str) -> bool:
    """Whether this is what find.yml has written, or the example as it is in git, or nothing."""
    return not text or marked(unmarked(text)) == text or text.rstrip() == committed.rstrip()


def hosts_text(example: str, nodes: list[Machine], finals: list[str], users: list[str]) -> str:
    """With the example's comments. users: of each node; the first one's stands in settings.yml."""
    lines = []
    for number, (node, final, user) in enumerate(zip(nodes, finals, users, strict=True)):
        first = f", first_address: {node['address']}" if node["address"] != final else ""
        first += f", first_user: {user}" if user != users[0] else ""
        said = ", ".join(word for word in (node["name"], "the controller" if node["own"] else "") if word)
        lines.append(f"    node{number}: {{lan_address: {final}{first}}}{f'  # {said}' if said else ''}\n")
    comments = [line for line in unmarked(example).splitlines(keepends=True) if line.startswith("#")]
    return marked("".join([*comments, "cluster:\n", "  hosts:\n", *lines]))


def settings_text(example: str, here: dict[str, Any], user: str, admins: str) -> str:
    """The example's settings with what was found in their place."""
    values = {
        "first_user": user, "lan_prefix": here["prefix"], "lan_gateway": here["gateway"] or '""',
        "lan_nameservers": f"[{', '.join(here['nameservers'])}]", "admin_networks": f"[{admins}]",
    }  # fmt: skip
    text = unmarked(example)
    for name, value in values.items():
        line = re.compile(rf"^{name}:[^#\n]*(#.*)?$", re.MULTILINE)
        told = line.search(text)
        comment = told[1] if told and told[1] else ""
        new = f"{name}: {value}".ljust(40) + "  " + comment
        text = line.sub(lambda _, new=new: new.rstrip(), text, count=1) if told else f"{text}{new.rstrip()}\n"
    return marked(text)


def users(nodes: list[Machine], answer: str) -> list[str]:
    """The first user of each node: one name for all, or one for each."""
    names = [word for word in re.split(r"[,\s]+", answer) if word]
    if wrong := [name for name in names if not USER.fullmatch(name)]:
        raise AnsibleActionFail(
            f"{', '.join(wrong)} is no user's name in Linux: the one that you made when you installed the PCs."
        )
    if len(names) not in (1, len(nodes)):
        raise AnsibleActionFail(
            f"{len(names)} users for {len(nodes)} nodes: say one for all of them, or one for each, in their order."
        )
    return names * len(nodes) if len(names) == 1 else names


def texts(
    found: Found, answer: str, user: str, start: str, folder: Path, person: str = ""
) -> dict[Path, str]:
    """The two files, as they shall be. `person`: from where somebody has come to this machine over SSH."""
    nodes = chosen(found["machines"], answer)
    names = users(nodes, user)
    finals = addresses(found, nodes, start)
    own = [final for node, final in zip(nodes, finals, strict=True) if node["own"]]
    hosts, settings = (Path(name) for name in ("hosts.yml", "group_vars/all/settings.yml"))
    old = {name: read(folder / name) or read(EXAMPLE / name) for name in (hosts, settings)}
    return {
        hosts: hosts_text(old[hosts], nodes, finals, names),
        settings: settings_text(
            old[settings], found["here"], names[0], ", ".join(admins(found, own, person))
        ),
    }


def admins(found: Found, own: list[str], person: str) -> list[str]:
    """From where SSH shall be let in: this machine; where its address may be another one tomorrow, its network.

    own: the address that it gets for good, where it is a node. Then a person who has come to it over the network has
    to get in, too (over an address of one cable, or from itself, nobody is kept out).
    """
    here = found["here"]
    if here["lent"] and not own:
        return [here["network"]]
    try:
        came_from = ipaddress.ip_address(person)
        far = own and not came_from.is_loopback and not came_from.is_link_local
    except ValueError:  # nobody, or what is no network
        far = False
    return list(dict.fromkeys([here["address"], *own, *([person] if far else [])]))


def next_step(found: Found, new: dict[Path, str], folder: Path) -> str:
    """What a person has to know and to type after this."""
    lines = []
    if "first_address" not in new[Path("hosts.yml")].partition("cluster:")[2]:
        lines.append(
            "The nodes keep their addresses of today: reserve them in the router, or end its DHCP range below them, or "
            "one day it gives them to others."
        )
    here = found["here"]
    (open_to,) = re.findall(
        r"^admin_networks: \[(.*?)\]", new[Path("group_vars/all/settings.yml")], re.MULTILINE
    )
    if open_to == here["network"]:
        lines.append(
            f"SSH will be allowed from {here['network']} (admin_networks), by key only: this machine's address "
            "comes from the router and may change. Once it is reserved there, name it alone."
        )
    else:
        lines.append(f"SSH will be allowed from {open_to} only: admin_networks.")
    if "first_user" in new[Path("hosts.yml")].partition("cluster:")[2]:
        lines.append(
            "-k and -K ask for one password. Where the PCs have several, one after the other: … --limit node1, then "
            "the next."
        )
    other = "" if folder == EXAMPLE else f"-i {os.path.relpath(folder, os.environ.get('PWD') or '.')} "
    lines.append(f"Look at both files, then: ansible-playbook {other}playbooks/bootstrap.yml -k -K")
    return "\n".join(lines)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def committed(path: Path) -> str:
    """The file as it is in git; nothing where git does not know it."""
    if not path.is_file():
        return ""
    show = ["git", "show", f"HEAD:./{path.name}"]
    try:
        return subprocess.run(show, cwd=path.parent, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""


def why_kept(folder: Path, path: Path) -> str:
    """Why the file is not written anew; empty where it is."""
    if not unedited(read(path), committed(path)):
        return "somebody has edited it"
    if (folder / "state/known_hosts").exists() and path.exists():
        return "its nodes have been through bootstrap"
    return ""


def write(folder: Path, new: dict[Path, str], check: bool) -> tuple[list[str], list[str]]:
    """What was written, and what was not, with its text."""
    written, kept = [], []
    for name, text in new.items():
        path = folder / name
        if read(path) == text:
            continue
        if why := why_kept(folder, path):
            kept.append(f"{path} stays as it is: {why}. By what was found it would be:\n\n{text}")
            continue
        written.append(str(path))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return written, kept


class ActionModule(ActionBase):
    """`found` is what lan_ssh has returned: `table` shows it. With `nodes` hosts.yml and settings.yml are written in
    `into`; `written` names them, `kept` says what would be in those that somebody has edited, `next` what to do."""

    _VALID_ARGS = frozenset(("found", "nodes", "first_user", "addresses_from", "into"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        told = self._task.args
        found = told["found"]
        if "nodes" not in told:
            return {"changed": False, "table": found_table(found), "nobody": nobody(found)}
        try:
            folder = Path(told["into"])
            person = next(iter(os.environ.get("SSH_CONNECTION", "").split()), "")
            new = texts(found, told["nodes"], told["first_user"], told["addresses_from"], folder, person)
            written, kept = write(folder, new, self._task.check_mode)
        except AnsibleActionFail as refused:
            raise AnsibleActionFail(f"{refused}\nNothing was written.") from None
        except OSError as problem:
            raise AnsibleActionFail(f"{problem.filename} cannot be written: {problem.strerror}") from None
        following = "" if kept else next_step(found, new, folder)
        return {"changed": bool(written), "written": written, "kept": kept, "next": following}
