"""Where playbooks/tasks/find_nodes.yml finds a node: addresses and ports, in the right order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tree
from ansible.plugins.loader import lookup_loader
from expressions import filled_in, loaded
from test_find import listening

lookup_loader.add_directory(str(tree.ROOT / "plugins/lookup"))
HERE, NOBODY = "127.0.0.1", "127.0.0.2"


def ask(*addresses: str, ports: list[Any], known_hosts: str = "/nonexistent") -> list[tuple[str, int, str]]:
    told = {"name": "node0", "known_hosts": known_hosts, "ports": ports, "timeout": 1, "patience": 1}
    tried = lookup_loader.get("ssh_answer").run(list(addresses), {}, **told)
    return [(each["address"], each["port"], each["answer"]) for each in tried]


@pytest.fixture
def known(tmp_path: Path) -> str:
    """A known_hosts with a key of node0's."""
    (tmp_path / "known_hosts").write_text("node0 ssh-ed25519 AAAA\n")
    return str(tmp_path / "known_hosts")


@pytest.fixture
def ssh() -> Iterator[int]:
    with listening({HERE: b"SSH-2.0-test\r\n"}) as port:
        yield port


@pytest.fixture
def web() -> Iterator[int]:
    with listening({HERE: b"HTTP/1.1 400\r\n"}) as port:
        yield port


def test_a_new_node_is_looked_for_at_its_first_address_and_port(ssh: int) -> None:
    assert ask(NOBODY, HERE, ports=[1, ssh]) == [(HERE, ssh, "node")]


def test_all_other_places_follow(ssh: int, web: int) -> None:
    assert ask(HERE, NOBODY, ports=[ssh, web]) == [
        (NOBODY, web, "refused"),
        (NOBODY, ssh, "refused"),
        (HERE, web, "other"),
        (HERE, ssh, "node"),
    ]


def test_each_place_is_asked_once(web: int) -> None:
    assert ask(HERE, HERE, "", ports=[web, str(web)]) == [(HERE, web, "other")]


def test_a_known_node_is_looked_for_where_it_shall_be(ssh: int, known: str) -> None:
    assert ask(HERE, NOBODY, ports=[ssh, 1], known_hosts=known) == [
        (HERE, ssh, "stranger"),
        (HERE, 1, "refused"),
        (NOBODY, ssh, "refused"),
        (NOBODY, 1, "refused"),
    ]


@pytest.mark.parametrize("words", [b"", b"SSH-2.0-test\r\n"])
def test_who_is_slow_is_called_neither_absent_nor_a_stranger(words: bytes, known: str) -> None:
    with listening({HERE: words}, stay=True) as port:
        assert ask(HERE, ports=[port], known_hosts=known) == [(HERE, port, "slow")]


def test_who_hangs_up_without_a_word_may_have_too_many_callers() -> None:
    with listening({HERE: b""}) as port:
        assert ask(HERE, ports=[port]) == [(HERE, port, "slow")]


OWN, FIRST = "10.0.0.21", "192.168.1.40"


@pytest.mark.parametrize(
    ("tried", "sentence"),
    [
        ([(OWN, "silence"), (FIRST, "stranger")], f"node1 does not answer at {OWN}. Is it switched on"),
        ([(OWN, "silence"), (FIRST, "refused")], f"What answers at {FIRST}, its first_address, is not it"),
        ([(OWN, "silence"), (FIRST, "silence")], f"node1 does not answer at {OWN} nor at {FIRST}"),
        ([(OWN, "stranger"), (FIRST, "silence")], f"The machine at {OWN} does not have the host key"),
        # A new one is looked for at its first address first.
        ([(FIRST, "refused"), (OWN, "silence")], f"node1 is at {FIRST}, but has no SSH server"),
        ([(OWN, "silence"), (FIRST, "node")], ""),
    ],
)
def test_who_has_a_nodes_first_address_now_is_not_taken_for_it(
    tried: list[tuple[str, str]], sentence: str
) -> None:
    task = loaded("playbooks/tasks/find_nodes.yml")[1]
    known = task["vars"] | {
        "inventory_hostname": "node1", "cluster_state": "state",
        "cluster_places": {"addresses": [OWN, FIRST], "ports": [22]},
        "find_nodes_tried": [{"address": address, "port": 22, "answer": said} for address, said in tried],
    }  # fmt: skip
    said = filled_in(task["ansible.builtin.set_fact"]["find_nodes_problem"], known).strip()
    assert sentence in said if sentence else said == ""
