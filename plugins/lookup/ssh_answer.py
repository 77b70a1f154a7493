"""Which of some addresses and ports leads to a node's SSH server."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.loader import filter_loader
from ansible.plugins.lookup import LookupBase

ssh_greeting, ssh_host_key = (
    filter_loader.get(name).j2_function for name in ("ssh_greeting", "ssh_host_key")
)


def recorded_keys(name: str, known_hosts: Path) -> dict[str, str]:
    """The node's keys in known_hosts, by type."""
    lines = known_hosts.read_text().splitlines() if known_hosts.exists() else []
    fields = [line.split() for line in lines if not line.startswith("#")]
    return {words[1]: words[2] for words in fields if len(words) >= 3 and name in words[0].split(",")}


def is_node(address: str, port: int, patience: int, known: dict[str, str]) -> bool:
    """Raises TimeoutError where the server does not say in time whose key it has."""
    for kind, key in known.items():
        began = time.monotonic()
        shown = ssh_host_key(address, port, [kind], patience)[1]
        if shown == key:
            return True
        if not shown and time.monotonic() - began >= patience:
            raise TimeoutError
    return False


def answer(address: str, port: int, timeout: int, patience: int, known: dict[str, str]) -> str:
    try:
        said, _ = ssh_greeting(address, port, timeout, patience)
    except OSError as error:
        raise AnsibleLookupError(f"The controller cannot connect to {address}: {error}") from error
    if said != "ssh":
        return said
    try:
        return "node" if not known or is_node(address, port, patience, known) else "stranger"
    except TimeoutError:
        # To call it a stranger would have somebody forget the node's key.
        return "slow"


class LookupModule(LookupBase):
    """Asks some addresses for nothing but the greeting and the host key, and stops where the node answers.

    terms: addresses, the final one first; empty ones are passed over. They are tried in this order when the node's host
    key is known. A new node is looked for in the reverse order, since whoever has its final address may be somebody
    else. name: under which the node's key stands in known_hosts; when it is not in there, any SSH server is taken for
    the node. ports: to try at each address, the final one first. timeout: how long to wait for a connection, which a
    kernel makes; patience: then for the greeting, and for the host key, of a server that may be slow [s].

    One dictionary for each address and port tried: address, port, answer: `node`, `stranger` (SSH with another host
    key), or what the filter ssh_greeting says.
    """

    def run(
        self,
        terms: list[str],
        variables: dict[str, Any] | None = None,
        *,
        name: str,
        known_hosts: str,
        ports: Sequence[int | str] = (22,),
        timeout: int = 5,
        patience: int = 20,
    ) -> list[dict[str, str | int]]:
        known = recorded_keys(name, Path(known_hosts))
        places = [(address, port) for address in terms if address for port in map(int, ports)]
        tried: list[dict[str, str | int]] = []
        for address, port in dict.fromkeys(places if known else reversed(places)):
            said = answer(address, port, timeout, patience, known)
            tried.append({"address": address, "port": port, "answer": said})
            if said == "node":
                break
        return tried
