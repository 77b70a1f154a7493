"""The store where the ranks of an attempt meet, and what is written there: opened by rank 0, reached by the others."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import psutil
from torch.distributed import PrefixStore, Store, TCPStore

from aura.errors import EXIT_TEMPORARY, ConfigError
from aura.texts.console import text

CONNECT_TIMEOUT = 10.0  # seconds for one try to reach the store
KNOCK_TIMEOUT = 2.0  # seconds for one try to reach its port
PATIENCE = 8.0  # seconds without an answer after which a connection to the store is given up

T = TypeVar("T")


class NoProcessGroup(Exception):
    """The text is a sentence for a person."""

    exit_code = EXIT_TEMPORARY


class ProcessGroupBroken(NoProcessGroup):
    """The process group cannot go on; a new attempt may."""


class PortTaken(ProcessGroupBroken):
    """Somebody else on this PC listens there."""


class ProcessGroupMismatch(NoProcessGroup):
    """This rank and rank 0 do not mean the same run: trying again does not help."""

    exit_code = ConfigError.exit_code


class ProcessGroupRefused(NoProcessGroup):
    """A rank cannot take part, and starting again does not help: nobody trains."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Member:
    rank: int
    node: str
    address: str
    token: str
    backend: str = ""  # its wish: gloo, nccl, or auto where it has a GPU
    torch: str = ""  # its version, whatever it was built for
    nccl: str = ""  # its version, where this rank can use it
    settings: str = ""  # what it is asked to train,
    corpus: str = ""  # and on what: fingerprints
    refusal: str = ""  # the sentence why it cannot take part, for good
    exit_code: int = 0  # that it ends with then

    def __str__(self) -> str:
        return text("member", rank=self.rank, node=self.node, address=self.address)


def now() -> float:
    """Seconds since the boot, that go on while the machine sleeps: who has slept through a deadline has missed it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def open_store(address: str, port: int, node: str, deadline: float, report: Callable[[str], None]) -> Store:
    """Rank 0: hold the store (unless torchrun's agent does). Raises GangBroken.

    It listens on `address` only, where that is an IP address; a name may lead to another one here than elsewhere.
    """
    if agent_holds_store():
        try:
            return scoped(connect(address, port))
        except RuntimeError as error:
            reason = first_line(error)
            raise ProcessGroupBroken(
                text("agents_store", address=address, port=port, error=reason)
            ) from error
    listener = _listen(address, port, node, deadline, report)
    try:
        store = TCPStore(
            "127.0.0.1" if address == "localhost" else address,
            port,
            is_master=True,
            timeout=timedelta(seconds=CONNECT_TIMEOUT),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as error:
        raise ProcessGroupBroken(
            text("store_does_not_start", node=node, port=port, error=first_line(error))
        ) from error
    return scoped(store)


def _listen(
    address: str, port: int, node: str, deadline: float, report: Callable[[str], None]
) -> socket.socket:
    """The socket of the store. Without its cable a node may have lost its address: waited for until `deadline`."""
    family, host = _where_to_listen(address)
    said = False
    while True:
        try:
            return socket.create_server(
                (host, port),
                family=family,
                backlog=128,
                dualstack_ipv6=family == socket.AF_INET6 and not host,
            )
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                kind = PortTaken if error.errno == errno.EADDRINUSE else ProcessGroupBroken
                raise kind(text("port_not_opened", port=port, node=node, error=error.strerror)) from error
        if now() > deadline:
            raise ProcessGroupBroken(text("address_never_came", node=node, address=address))
        if not said:
            report(text("waits_for_address", node=node, address=address))
        said = True
        time.sleep(0.5)


def _where_to_listen(address: str) -> tuple[socket.AddressFamily, str]:
    if address == "localhost":
        return socket.AF_INET, "127.0.0.1"
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        # "": all addresses
        return (socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET), ""
    return (socket.AF_INET6 if version == 6 else socket.AF_INET), address


def connect(address: str, port: int) -> TCPStore:
    """Raises RuntimeError.

    Knocks first: after tries in vain, torch (and TCP below it) waits ever longer until the next, and signals wait too.
    """
    try:
        socket.create_connection((address, port), timeout=KNOCK_TIMEOUT).close()
    except OSError as error:
        raise RuntimeError(f"{address}:{port}: {error}") from error
    timeout = timedelta(seconds=CONNECT_TIMEOUT)
    return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


def patiently(operation: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Do it, but not for longer than `seconds`. Raises RuntimeError, and leaves what hangs to a thread of its own.

    torch's store waits for ever for an answer over a connection that was cut, and when the cable is back TCP may stay
    silent for as long again as the cut lasted: only a new connection is quick.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(operation())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="store-ask", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        # Not kept here too: in a circle of error, traceback and frames a store would stay open after its use.
        raise errors.pop()
    if not results:
        raise RuntimeError(text("no_answer", seconds=seconds))
    return results[0]


class Patient:
    """A store whose operations raise RuntimeError when no answer comes, where torch's may wait for ever."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def check(self, key: str) -> bool:
        return patiently(lambda: self.store.check([key]))

    def ask(self, reader: Callable[[Store], Any]) -> Any:
        return patiently(lambda: reader(self.store))

    def read(self, key: str) -> Any:
        return self.ask(lambda store: read(store, key))

    def set(self, key: str, value: str) -> None:
        patiently(lambda: self.store.set(key, value))

    def count(self, key: str) -> None:
        patiently(lambda: self.store.add(key, 1))


def read(store: Store, key: str) -> Any:
    """What rank 0 or a member has written under `key`, as JSON. Raises GangBroken when it is something else."""
    data = store.get(key)
    try:
        return json.loads(data)
    except ValueError:
        raise _foreign(key, data) from None


def read_header(store: Store) -> dict[str, Any]:
    """attempt, run, launch, world_size and is_committed of the attempt that is under way. Raises GangBroken."""
    header = read(store, "attempt")
    if not isinstance(header, dict) or not {"attempt", "run", "launch", "world_size", "is_committed"} <= set(
        header
    ):
        raise _foreign("attempt", header)
    return header


def read_member(store: Store, key: str) -> Member:
    """Raises GangBroken."""
    entry = read(store, key)
    try:
        return Member(**entry)
    except TypeError:
        raise _foreign(key, entry) from None


class Committed(NamedTuple):
    """Who is in an attempt."""

    host: Member
    members: list[Member]  # in the order of their ranks
    record: list[Any] | None  # as register.Record; None where all ranks are needed
    absences: dict[str, Any]  # as register.QuorumState has them


def read_committed(store: Store) -> Committed:
    """Raises GangBroken."""
    said = read(store, "committed")
    try:
        members = [Member(**entry) for entry in said["members"]]
        host = next(member for member in members if member.rank == said["host"])
        return Committed(host, members, said["record"], said.get("absences", {}))
    except (TypeError, KeyError, StopIteration):
        raise _foreign("committed", said) from None


def _foreign(key: str, data: object) -> ProcessGroupBroken:
    return ProcessGroupBroken(text("foreign_key", key=key, data=repr(data)[:60]))


def agent_holds_store() -> bool:
    """torchrun's agent on the first node already listens on MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def scoped(store: TCPStore) -> Store:
    """torchrun's store outlives the processes: its restart count keeps their keys apart."""
    if not agent_holds_store():
        return PrefixStore("aura", store)
    return PrefixStore(f"aura/restart{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def own_address(master_address: str, master_port: int) -> str:
    """The address that this host uses towards rank 0. A UDP connect sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master_address, master_port))
            return str(probe.getsockname()[0])
        except OSError:
            return text("unknown_address")


def card_of(address: str) -> str:
    """The network interface of this host that has the address; empty where none has it."""
    cards = psutil.net_if_addrs()
    return next((card for card, found in cards.items() if address in {one.address for one in found}), "")


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
