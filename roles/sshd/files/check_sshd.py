#!/usr/bin/python3
"""Prints what stands in the way of SSH on this host: lines that begin with "problem: ".

    check_sshd.py '{"user": …, "home": …, "networks": […], "file": …, "passwords": …, "address": …}'

user, home: the controller's account and, where there is none yet, its home; networks: from where administrators come.
file: the text of 10-aura.conf that is going to be there, "" to ask only whether the key opens (bootstrap).
passwords: whether passwords stay; address: the only one that the host keeps. (Without a file, neither is needed.)

sshd itself is asked, for those who can come: its Match blocks count more than any file that it reads first.
"""

from __future__ import annotations

import fnmatch
import grp
import ipaddress
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SSH = Path("/etc/ssh")
TOP = SSH / "sshd_config"
DROP_INS = SSH / "sshd_config.d"
OURS = "10-aura.conf"
PASSWORDS = ("PasswordAuthentication", "KbdInteractiveAuthentication", "ChallengeResponseAuthentication")
Effective = dict[str, list[str]]


@dataclass
class Line:
    """One setting of sshd's files. condition: its Match line, "" outside of one."""

    where: str
    keyword: str
    value: str
    condition: str


@dataclass
class Asked:
    """Who comes from where, and what sshd answers."""

    user: str
    address: str
    host: str
    settings: Effective = field(default_factory=dict)


def lines_of(path: Path, condition: str = "") -> Iterator[Line]:
    """All settings in the order in which sshd reads them."""
    for number, text in enumerate(path.read_text(errors="replace").splitlines(), 1):
        words = re.match(r"\s*([A-Za-z]\w*)[\s=]+(.*?)\s*$", text)
        if not words:
            continue
        keyword, value = words[1].lower(), words[2].replace('"', "")
        if keyword == "include":
            for pattern in value.split():
                for name in sorted(SSH.glob(pattern.removeprefix(f"{SSH}/"))):
                    yield from lines_of(name, condition)
        elif keyword == "match":
            condition = value
        yield Line(f"{path}:{number}", keyword, value, condition)


def staged(folder: Path, text: str) -> Path:
    """sshd's configuration as it is going to be: the path of its copy."""
    drop_ins = folder / DROP_INS.name
    if DROP_INS.is_dir():
        shutil.copytree(DROP_INS, drop_ins)
    if text:
        drop_ins.mkdir(exist_ok=True)
        (drop_ins / OURS).write_text(text)
    path = folder / TOP.name
    include = re.compile(rf"(?im)^(\s*include\b.*?[\s\"])({SSH}/)?{DROP_INS.name}/")
    path.write_text(include.sub(rf"\g<1>{drop_ins}/", TOP.read_text(errors="replace")))
    return path


def ask(path: Path, asked: Asked | None = None) -> Effective:
    """What sshd makes of its configuration, for everybody or for one. Raises ValueError with its complaint."""
    command = ["/usr/sbin/sshd", "-T", "-f", str(path)]
    if asked:
        who = {
            "user": asked.user,
            "host": asked.host,
            "addr": asked.address,
            "laddr": "127.0.0.1",
            "lport": "22",
        }
        command += ["-C", ",".join(f"{key}={value}" for key, value in who.items())]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise ValueError(" ".join(done.stderr.split()))
    settings: Effective = {}
    for line in done.stdout.splitlines():
        keyword, _, value = line.partition(" ")
        settings.setdefault(keyword.lower(), []).append(value)
    return settings


def first_host(pattern: str) -> str:
    """An address that the pattern of a Match line, or a network, covers; "" where it is none."""
    try:
        network = ipaddress.ip_network(pattern.lstrip("!").replace("*", "1").replace("?", "1"), strict=False)
    except ValueError:
        return ""
    return str(network[1] if network.num_addresses > 2 else network[0])


def connections(user: str, networks: list[str], lines: list[Line]) -> list[Asked]:
    """Everybody who can log in, from each admin network, from elsewhere, and from where a Match line says."""
    conditions = [line.value.split() for line in lines if line.keyword == "match"]
    patterns = [
        (criterion.lower(), pattern)
        for words in conditions
        for criterion, value in zip(words[::2], words[1::2])  # noqa: B905 - the Python 3.9 of Debian 11 knows no strict
        for pattern in value.split(",")
    ]
    addresses = [first_host(network) for network in [*networks, "203.0.113.0/24", "2001:db8::/32"]]
    addresses += [first_host(pattern) for criterion, pattern in patterns if criterion == "address"]
    hosts = [pattern.lstrip("!").replace("*", "x") for criterion, pattern in patterns if criterion == "host"]
    places = [(address, address) for address in dict.fromkeys(addresses) if address]
    places += [(places[0][0], host) for host in hosts]
    shells = [
        entry for entry in pwd.getpwall() if not entry.pw_shell.endswith(("/nologin", "/false", "/sync"))
    ]
    users = dict.fromkeys([user, "root", *(entry.pw_name for entry in shells)])
    return [Asked(name, address, host) for name in users for address, host in places]


def place(lines: list[Line], keyword: str, matched: bool = False) -> str:
    """Where files other than ours say that, in brackets; matched: in Match blocks alone, and what opens."""
    found = [
        line.where + (f", below Match {line.condition}" if line.condition else "")
        for line in lines
        if line.keyword == keyword.lower() and f"/{OURS}:" not in line.where
        if not matched or (line.condition and line.value.lower() != "no")
    ]
    return f" ({'; '.join(found)})" if found else ""


def opened(passwords: bool, asked: list[Asked], lines: list[Line]) -> Iterator[str]:
    """What a Match block opens although our file closes it for all."""
    closed = ["PermitRootLogin", "PermitEmptyPasswords", *(() if passwords else PASSWORDS)]
    for keyword in closed:
        wrong = [one for one in asked if one.settings.get(keyword.lower(), ["no"]) != ["no"]]
        if wrong:
            one, value = wrong[0], wrong[0].settings[keyword.lower()][0]
            stay = ", or leave passwords on for all (ssh_passwords: true)" if keyword in PASSWORDS else ""
            yield (
                f"sshd has {keyword} {value} for {one.user} from {one.address}{place(lines, keyword, matched=True)}, "
                f"and shall have no: a Match block counts more than our settings. Remove that line there{stay}."
            )


def unheeded(text: str, settings: Effective, lines: list[Line]) -> Iterator[str]:
    """What another file says first."""
    for line in text.splitlines():
        keyword, _, value = line.partition(" ")
        if not line.startswith(("#", "Port ")) and settings.get(keyword.lower()) != [value]:
            has = " ".join(settings.get(keyword.lower(), ["nothing"]))
            yield (
                f"sshd would not heed {line}: it has {has}{place(lines, keyword)}. Is there a file in "
                f"{DROP_INS} that comes before {OURS}, or does {TOP} not begin with Include {DROP_INS}/*.conf?"
            )


def ports_taken(settings: Effective) -> Iterator[str]:
    for port in settings.get("port", []):
        command = ["ss", "-Hltnp", f"sport = :{port}"]
        for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines():
            if "users:((" in line and '"sshd"' not in line and '"systemd"' not in line:
                listener = " ".join(line.split())
                yield f"port {port} is taken there, and sshd would end ({listener}). Name another one (ssh_port)."
                break


def elsewhere(address: str, settings: Effective, lines: list[Line]) -> Iterator[str]:
    listens = [re.sub(r":\d+$", "", value) for value in settings.get("listenaddress", [])]
    if address and listens and not {"0.0.0.0", "[::]", address} & set(listens):  # noqa: S104 (nothing is bound)
        yield (
            f"sshd listens at {', '.join(listens)} alone{place(lines, 'ListenAddress')}, and the host is going to "
            f"have {address}: nobody could log in. Remove that line, since the firewall decides who comes in, and "
            "restart ssh there."
        )


def key_shut_out(user: str, home: str, asked: list[Asked], lines: list[Line]) -> Iterator[str]:
    """What keeps the controller's key from being enough."""
    try:
        entry = pwd.getpwnam(user)
        home = entry.pw_dir
        groups = [grp.getgrgid(number).gr_name for number in os.getgrouplist(user, entry.pw_gid)]
    except KeyError:
        groups = [user]
    tokens = {"%h": home, "%u": user, "%%": "%"}
    for one in asked:
        has = {keyword: " ".join(values).split() for keyword, values in one.settings.items()}
        files = [re.sub("%[hu%]", lambda token: tokens[token[0]], name) for name in has["authorizedkeysfile"]]
        methods = {"any", "publickey"} & set(has.get("authenticationmethods", ["any"]))
        wrong = {
            "PubkeyAuthentication": has["pubkeyauthentication"] == ["no"],
            "AuthenticationMethods": not methods,
            "AuthorizedKeysFile": Path(home, ".ssh/authorized_keys")
            not in [Path(home, name) for name in files],
            "AllowUsers": "allowusers" in has and not named([user], has["allowusers"]),
            "AllowGroups": "allowgroups" in has and not named(groups, has["allowgroups"]),
            "DenyUsers": named([user], has.get("denyusers", [])),
            "DenyGroups": named(groups, has.get("denygroups", [])),
        }
        for keyword in filter(wrong.__getitem__, wrong):
            value = " ".join(has[keyword.lower()])
            yield (
                f"the controller's key does not open {user}: sshd there has {keyword} {value}{place(lines, keyword)}. "
                f"Correct that for {user} at least (below Match User {user}, say), and reload ssh there."
            )


def named(names: list[str], patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern.partition("@")[0]) for name in names for pattern in patterns)


def problems(settings: dict[str, str], networks: list[str], passwords: bool) -> Iterator[str]:
    user, text = settings["user"], settings["file"]
    lines = list(lines_of(TOP))
    with tempfile.TemporaryDirectory(prefix="aura-sshd-") as folder:
        path = staged(Path(folder), text)
        try:
            everybody = ask(path)
            asked = connections(user, networks, lines)
            if not any(line.keyword == "match" for line in lines):
                asked = asked[:1]
            for one in asked:
                one.settings = ask(path, one)
        except ValueError as error:
            yield f"sshd does not take its configuration: {error.args[0].replace(folder, '/etc/ssh')}"
            return
    ours = [one for one in asked if one.user == user and one.address in map(first_host, networks)]
    yield from key_shut_out(user, settings["home"], ours, lines)
    if text:
        yield from unheeded(text, everybody, lines)
        yield from opened(passwords, asked, lines)
        yield from ports_taken(everybody)
        yield from elsewhere(settings["address"], everybody, lines)


def main() -> None:
    told = json.loads(sys.argv[1])
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it even for a test
    for sentence in dict.fromkeys(problems(told, told["networks"], bool(told.get("passwords")))):
        print(f"problem: {sentence}")


main()
