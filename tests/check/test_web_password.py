"""The password for a node's figures (role node_exporter), as its configuration has it."""

from __future__ import annotations

import tree

FILTER = tree.module("roles/node_exporter/filter_plugins/web_password.py")


def test_a_hash_is_the_same_next_time_and_its_salt_says_nothing_of_the_password() -> None:
    nodes = [f"node{number}" for number in range(4)]
    hashes = [FILTER.web_password("one", node) for node in nodes]
    assert hashes == [FILTER.web_password("one", node) for node in nodes]
    salts = [text[: len("$2b$10$") + 22] for text in hashes]
    assert len({*salts}) == len(nodes)
    for node, salt, text in zip(nodes, salts, hashes, strict=True):
        assert (len(text), salt[:7]) == (60, "$2b$10$")
        other = FILTER.web_password("another", node)
        assert other.startswith(salt) and other != text
        assert FILTER.crypt.crypt("one", text) == text  # as node_exporter asks
