"""The lab as a whole: up, down, and what is known about it."""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aura_lab import host, image, network
from aura_lab.container import Container
from aura_lab.interrupts import interruptible, uninterruptible
from aura_lab.node import Node, names
from aura_lab.vm import VM

_MEMORY = host.OWN / "lab.json"
_PASSWORD = host.OWN / "password"


def planned(index: int) -> dict[str, str]:
    """The index-th PC. As in real life, not all of them have the same card and installer."""
    return {
        "name": f"node{index}",
        "address": str(network.NETWORK.network_address + 120 + index),
        "nic": "eno1" if index == 3 else "enp3s0",
        "netplan": "50-cloud-init.yaml" if index == 2 else "00-installer-config.yaml",
    }


def load(name: str) -> Node | None:
    record = host.read_json(host.BASE / name / "node.json")
    if not record:
        return None
    return VM.of(record) if record.get("kind") == VM.kind else Container.of(record)


def existing(name: str) -> Node:
    node = load(name)
    if node is None:
        raise host.LabError(f"There is no node {name} in the lab ({', '.join(names()) or 'it is down'}).")
    return node


def setup(kind: str, suite: str) -> Path:
    """Everything that `up` needs and that may be cached: packages of this machine, the node image."""
    host.require_root()
    with host.locked():
        require_own_lab()
        if not network.exists():
            host.require_namespaces()
        return _image(kind, suite)


def base() -> Path:
    """What the images of containers begin with. Beside the lab: it may run, and be another checkout's."""
    host.require_root()
    with host.locked():
        return image.build(image.recipe(image.BASE))


def _image(kind: str, suite: str) -> Path:
    host.setup(vms=kind == VM.kind)
    return image.build(image.recipe(kind, suite), in_use={node.image for node in _existing()})


def up(wanted: Iterable[Node], internet: bool = True) -> None:
    """Start the wanted nodes that do not run yet, and everything that they need."""
    host.require_root()
    with interruptible(), host.locked():
        require_own_lab()
        was_up = _MEMORY.exists()
        host.OWN.mkdir(parents=True, exist_ok=True)
        started: list[Node] = []
        try:
            _up(list(wanted), started, internet)
        except (KeyboardInterrupt, host.Unavailable) as problem:
            if isinstance(problem, KeyboardInterrupt):
                host.say(f"undoing what this `up` began: {problem}")
            if was_up:
                _each(lambda node: node.power_off() if node.created else node.remove(), started)
                _lease()
            else:
                _down()
            raise


def _up(wanted: list[Node], started: list[Node], internet: bool) -> None:
    begun = time.monotonic()
    if not network.exists():
        host.require_namespaces()
    known = _existing()
    kinds = sorted({(node.kind, node.suite) for node in wanted})
    images = {kind: str(_image(*kind)) for kind in kinds}
    memory = host.read_json(_MEMORY)
    if memory.get("boot_id") != host.boot_id() or memory.get("checkout") != str(host.REPOSITORY):
        if known:
            host.say("nodes were left behind by a restart or by another checkout: making new ones")
            _down()
        memory = {"checkout": str(host.REPOSITORY), "boot_id": host.boot_id()}
    network.remember(memory)
    memory["internet"] = memory.get("internet", True) and internet
    host.write(_MEMORY, json.dumps(memory) + "\n")
    network.up(memory["internet"])
    _write_inventory_state()

    nodes = [_prepare(node, images[node.kind, node.suite]) for node in wanted]
    to_start = [node for node in nodes if node.leader() is None]
    fresh = [node for node in to_start if not node.created]
    started.extend(replace(node) for node in to_start)  # as they were: `created` says what to undo
    _lease(nodes)
    password_hash = host.run("openssl", "passwd", "-6", "-stdin", stdin=_PASSWORD.read_text()).strip()
    _each(lambda node: node.create(password_hash), fresh)
    _each(lambda node: node.power_on(), to_start)
    _wait(nodes)
    host.say(
        f"{len(to_start)} started, {len(nodes) - len(to_start)} already running, {time.monotonic() - begun:.1f} s"
    )


def _prepare(wanted: Node, rootfs: str) -> Node:
    """The node of that name as it is, or else the wanted one, to be created."""
    name, address = wanted.name, wanted.address
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", name):
        raise host.LabError(f"'{name}' cannot be a node's name: lower-case letters, digits and hyphens only.")
    try:
        fits = ipaddress.ip_address(address) in list(network.NETWORK.hosts())[1:]
    except ValueError:
        fits = False
    if not fits:
        raise host.LabError(f"{address} is not an address for a node: it must be in {network.NETWORK}.")
    for other in _existing():
        if other.name != name and other.address == address:
            raise host.LabError(f"{address} already belongs to {other.name}.")
    known = load(name)
    if known and known.created:
        if known.address != address:
            raise host.LabError(
                f"{name} exists with the address {known.address}; first: lab down --only {name}"
            )
        return known
    return replace(wanted, image=rootfs)


def down() -> None:
    host.require_root()
    with host.locked(), uninterruptible():
        require_own_lab()
        _down()


def _down() -> None:
    nodes = [node for node in map(load, _directories()) if node]
    _each(lambda node: node.remove(), nodes)
    network.down(host.read_json(_MEMORY))
    shutil.rmtree(host.INVENTORY_STATE, ignore_errors=True)
    host.remove_tree(host.BASE)


def down_only(name: str) -> None:
    """Remove one node and leave the others; with the last one goes the lab."""
    host.require_root()
    with host.locked(), uninterruptible():
        require_own_lab()
        node = load(name)
        if node:
            node.remove()
            if names():
                _lease()
            else:
                _down()


def power(name: str, on: bool, wait: bool = True) -> None:
    with _changing(name) as node:
        if not on:
            node.power_off()
            return
        node.power_on()
        if wait:
            _wait([node])


def reboot(name: str, wait: bool = True) -> None:
    with _changing(name) as node:
        node.reboot(time.monotonic() + node.boot_limit)
        if wait:
            _wait([node])


def add_card(name: str) -> None:
    with _changing_vm(name) as node:
        node.add_card(time.monotonic() + node.boot_limit)


def snapshot(name: str, label: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", label):
        raise host.LabError(
            f"'{label}' cannot be a snapshot's name: lower-case letters, digits, hyphens only."
        )
    with _changing_vm(name) as node:
        node.snapshot(label)


def restore(name: str, label: str) -> None:
    with _changing_vm(name) as node:
        node.restore(label)


@contextmanager
def _changing(name: str) -> Iterator[Node]:
    """A node of a lab that is up, for a command that may not be left half done."""
    host.require_root()
    with host.locked(), uninterruptible():
        require_own_lab()
        node = existing(name)
        if not network.exists():
            raise host.LabError("The lab is not up: tests/lab/lab up")
        yield node


@contextmanager
def _changing_vm(name: str) -> Iterator[VM]:
    with _changing(name) as node:
        if not isinstance(node, VM):
            raise host.LabError(f"{name} is a container: only VMs (lab up --kind vm) can do that.")
        yield node


def cable(name: str, connected: bool) -> None:
    host.require_root()
    require_own_lab()
    existing(name).set_cable(connected)


def internet(reachable: bool) -> None:
    """Open or cut the way out for all nodes."""
    host.require_root()
    with host.locked():
        require_own_lab()
        if not network.exists():
            raise host.LabError("The lab is not up: tests/lab/lab up")
        host.write(_MEMORY, json.dumps(host.read_json(_MEMORY) | {"internet": reachable}) + "\n")
        network.set_internet(reachable)


def rate(name: str, rate: str) -> None:
    host.require_root()
    require_own_lab()
    existing(name).set_rate(rate)


def execute(name: str, words: list[str]) -> int:
    """As root inside the node, past the network: also works when its cable is cut."""
    host.require_root()
    require_own_lab()
    if len(words) == 1 and any(character.isspace() for character in words[0]):
        words = ["bash", "-c", words[0]]  # one string, as ssh takes it too
    return existing(name).execute(words)


def status() -> list[dict[str, Any]]:
    host.require_root()
    require_own_lab()
    found = []
    for node in _existing():
        leader = node.leader()
        found.append({
            "name": node.name,
            "kind": node.kind,
            "state": "running" if leader else "off",
            "first_address": node.address,
            "addresses": node.addresses(),
            "nic": node.nic,
            "cable": "cut" if node.cut else "connected",
            "rate": node.rate,
            "pid": leader.pid if leader else None,
            "console": str(node.console),
        })  # fmt: skip
    return found


def require_own_lab() -> None:
    """There is one lab per machine: refuse to touch one that was started from another checkout."""
    checkout = host.read_json(_MEMORY).get("checkout", str(host.REPOSITORY))
    command = Path(checkout) / "tests/lab/lab"
    # What a machine that was switched off has left behind belongs to nobody any more.
    in_use = any(node.leader() for node in _existing())
    if checkout != str(host.REPOSITORY) and command.exists() and in_use:
        raise host.LabError(f"A lab that was started from {checkout} is up; to end it: sudo {command} down")


# --- pieces ----------------------------------------------------------------------------------------


def _existing() -> list[Node]:
    return [node for node in map(load, names()) if node]


def _directories() -> list[str]:
    return [path.name for path in host.BASE.glob("*") if path.name != host.OWN.name]


def _write_inventory_state() -> None:
    if not _PASSWORD.exists():
        host.write(_PASSWORD, secrets.token_urlsafe(18) + "\n", 0o600)
    host.write(host.INVENTORY_STATE / "password", _PASSWORD.read_text(), 0o600)
    host.write(host.INVENTORY_STATE / "nameservers", " ".join(network.nameservers()) + "\n")


def _lease(more: Iterable[Node] = ()) -> None:
    known = _existing()
    network.lease(sorted({node.address for node in [*known, *more]}))


def _wait(nodes: list[Node]) -> None:
    begun = time.monotonic()
    _each(lambda node: None if node.cut else node.wait_until_ready(begun + node.boot_limit), nodes)


def _each(action: Callable[[Node], None], nodes: list[Node]) -> None:
    """Do something with all nodes at once; the first error is raised when all are done."""
    if not nodes:
        return
    pool = ThreadPoolExecutor(len(nodes))
    futures = [pool.submit(action, node) for node in nodes]
    try:
        for future in futures:
            future.result()
    except KeyboardInterrupt:
        host.interrupt()
        raise
    finally:
        pool.shutdown()


def ssh_command(name: str, words: list[str]) -> list[str]:
    """ssh as the controller's account with the cluster's key where that opens, else as the node's user by password."""
    node = existing(name)
    node.inside()
    addresses = node.addresses()
    if not addresses:
        raise host.LabError(f"{name} has no address now (cable cut?); `lab exec {name}` works without one.")
    # We can see into the node, so its host keys are known, not believed.
    keys = [line.split()[:2] for line in node.host_keys()]
    known = node.home / "known_hosts"
    host.write(known, "".join(f"{name} {' '.join(key)}\n" for key in keys))
    ask = node.home / "ask-password"
    host.write(ask, f"#!/bin/sh\ncat {_PASSWORD}\n", 0o700)
    ssh = [
        "env", f"SSH_ASKPASS={ask}", "SSH_ASKPASS_REQUIRE=force",
        "ssh", "-o", f"HostKeyAlias={name}", "-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=yes",
        "-o", f"IdentityFile={host.INVENTORY_STATE / 'id_ed25519'}", "-o", "IdentitiesOnly=yes",
        "-o", "ControlMaster=no", "-o", "LogLevel=ERROR",
    ]  # fmt: skip
    admin, user = (f"{who}@{addresses[0]}" for who in ("aura-admin", image.USER))
    opens = host.succeeds(*ssh, "-n", "-o", "BatchMode=yes", admin, "true")
    return [*ssh, admin if opens else user, *words]
