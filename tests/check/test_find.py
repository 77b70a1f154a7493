"""playbooks/find.yml: the network, who answers in it, what a person chooses, and which files are written."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from ansible.errors import AnsibleActionFail

LAN = tree.plugin("action/lan_ssh")
FOUND = tree.plugin("action/found_inventory")
KEYS = {"127.0.0.3": ("ed25519", "SHA256:three"), "127.0.0.5": ("rsa", "SHA256:five")}
Cards = list[dict[str, Any]]


def card(name: str, *addresses: str, state: str = "UP") -> dict[str, Any]:
    told = [address.partition("/") for address in addresses]
    info = [{"local": own, "prefixlen": int(bits), "scope": "global"} for own, _, bits in told]
    return {"ifname": name, "operstate": state, "addr_info": info}


def way(card: str, gateway: str, metric: int = 0) -> dict[str, Any]:
    return {"dst": "default", "dev": card, "gateway": gateway, "metric": metric}


HOME = [card("enp3s0", "192.168.50.7/24"), card("docker0", "172.17.0.1/16")]


# ── the network ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cards", "routes", "network", "addresses", "expected"),
    [
        (HOME, [way("enp3s0", "192.168.50.1")], "", [], "192.168.50.7/24"),
        # The cable's route wins over Wi-Fi's by its metric.
        (
            [card("wlp2s0", "192.168.50.9/24"), *HOME],
            [way("wlp2s0", "192.168.50.1", 600), way("enp3s0", "192.168.50.1", 100)],
            "", [], "192.168.50.7/24",
        ),
        ([card("eno1", "10.0.0.7/24", "192.168.50.7/24")], [way("eno1", "192.168.50.1")], "", [], "192.168.50.7/24"),
        # A switch without a router.
        (HOME[:1], [], "", [], "192.168.50.7/24"),
        (HOME, [way("enp3s0", "192.168.50.1")], "172.17.0.0/24", [], "172.17.0.1/16"),
        (HOME, [way("enp3s0", "192.168.50.1")], "", ["172.17.0.5", "172.17.3.9"], "172.17.0.1/16"),
    ],
)  # fmt: skip
def test_the_network(cards: Cards, routes: Cards, network: str, addresses: list[str], expected: str) -> None:
    assert str(LAN.place(cards, routes, network, addresses)[1]) == expected


@pytest.mark.parametrize(
    ("cards", "routes", "network", "addresses", "says"),
    [
        ([card("enp3s0", "192.168.50.7/24", state="DOWN")], [], "", [], "is in no network: plug in its cable"),
        (HOME, [], "", [], "no way to the internet that says which"),
        ([card("tun0", "10.9.0.2/32"), *HOME], [way("tun0", "10.9.0.1")], "", [], "-e network=192.168.50.0/24"),
        (HOME, [], "192.168.50", [], "network=192.168.50 is no IPv4 network"),
        (HOME, [], "10.0.0.0/8", [], "16,777,216 addresses, too many to ask: name a part"),
        (HOME, [], "192.168.1.0/24", [], "is in no network of this machine, which is in 192.168.50.0/24 (enp3s0)"),
        (HOME, [], "", ["192.168.50.20", "192.168.1.20"], "192.168.50.20, 192.168.1.20 is in no network"),
        (HOME, [], "", ["node3"], "'node3' is no IPv4 address"),
    ],
)  # fmt: skip
def test_no_network(cards: Cards, routes: Cards, network: str, addresses: list[str], says: str) -> None:
    with pytest.raises(AnsibleActionFail, match=re.escape(says)):
        LAN.place(cards, routes, network, addresses)


def test_a_large_network_is_asked_only_where_somebody_says_so() -> None:
    _, own = LAN.place([card("enp3s0", "10.0.5.7/8")], [], "", [])
    with pytest.raises(AnsibleActionFail, match=r"16,777,216 .* -e network=10\.0\.5\.0/24"):
        LAN.to_ask(own, "")
    assert len(LAN.to_ask(own, "10.0.5.0/24")) == 254
    assert len(LAN.to_ask(own, "10.0.0.0/20")) == 4094
    assert len(LAN.to_ask(LAN.places([card("enp3s0", "10.0.5.7/22")])[0][1], "")) == 1022


def test_nameservers_are_those_that_another_machine_can_ask() -> None:
    stub = "nameserver 127.0.0.53\n"
    real = "nameserver 192.168.50.1\nnameserver fe80::1\nnameserver 9.9.9.9\n"
    assert LAN.nameservers([stub, real], "192.168.50.1") == ["192.168.50.1", "9.9.9.9"]
    assert LAN.nameservers([stub], "192.168.50.1") == ["192.168.50.1"]
    assert LAN.nameservers([stub], "") == []


# ── who answers ──────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def listening(words: dict[str, bytes], stay: bool = False) -> Iterator[int]:
    """A server at each of these addresses that says this, and hangs up or (stay) says nothing more; their port."""
    with contextlib.ExitStack() as stack:
        port = 0
        for address, said in words.items():
            server = stack.enter_context(socket.create_server((address, port)))
            port = server.getsockname()[1]
            stack.callback(server.shutdown, socket.SHUT_RDWR)
            threading.Thread(target=serve, args=(server, said, stay), daemon=True).start()
        yield port


def serve(server: socket.socket, said: bytes, stay: bool) -> None:
    open_ones = []
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            connection.sendall(said)
            open_ones.append(connection) if stay else connection.close()


SERVERS = {
    "127.0.0.3": b"SSH-2.0-OpenSSH_8.9p1 Ubuntu-3ubuntu0.10\r\n",
    "127.0.0.4": b"220 mail\r\n",
    "127.0.0.5": b"SSH-2.0-\x1b[2Jdropbear\r\n",
}


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is 127.0.0.3 in 127.0.0.0/28, with a router at 127.0.0.5."""
    told = [card("lo", "127.0.0.3/28")], [way("lo", "127.0.0.5")]
    monkeypatch.setattr(LAN, "addresses_and_routes", lambda: told)
    monkeypatch.setattr(LAN, "host_key", lambda address, port: KEYS[address])
    monkeypatch.setattr(LAN, "name", lambda address: f"pc{address[-1]}.local")


def test_who_answers_on_ssh(loopback: None) -> None:
    with listening(SERVERS) as port:
        seen = LAN.look("", [], port)
    assert [(one["address"], one["server"], one["kind"], one["own"], one["router"]) for one in seen["machines"]] == [
        ("127.0.0.3", "OpenSSH_8.9p1 Ubuntu-3ubuntu0.10", "ed25519", True, False),
        ("127.0.0.5", "?[2Jdropbear", "rsa", False, True),  # no control characters reach a terminal
    ]  # fmt: skip
    assert seen["without"] == [f"127.0.0.{last}" for last in (1, 2, *range(6, 15))]
    assert (seen["here"]["gateway"], seen["here"]["asked"]) == ("127.0.0.5", 14)
    table = FOUND.found_table(seen)
    assert table.startswith("This machine is 127.0.0.3 (lo) in 127.0.0.0/28, router 127.0.0.5.\n")
    assert "pc3.local  OpenSSH_8.9p1 Ubuntu-3ubuntu0.10  ed25519   this machine\n" in table


def test_who_is_named_is_in_the_result_whatever_it_answers(loopback: None) -> None:
    with listening(SERVERS) as port:
        seen = LAN.look("", ["127.0.0.4", "127.0.0.9"], port)
    assert [one["answer"] for one in seen["machines"]] == ["other", "refused"]
    with pytest.raises(AnsibleActionFail, match=r"What answers at 127\.0\.0\.4 is no SSH server") as refused:
        FOUND.chosen(seen["machines"], "127.0.0.4,127.0.0.9")
    assert "127.0.0.9 has no SSH server on this port. On that PC: sudo apt install openssh" in str(
        refused.value
    )


def test_nobody_answers(loopback: None) -> None:
    with listening({"127.0.0.4": b"220 mail\r\n"}) as port:
        sentence = FOUND.nobody(LAN.look("", [], port))
    assert "Nothing answers on SSH at the 14 addresses" in sentence
    assert "sudo apt install openssh-server" in sentence


def test_the_best_key_is_shown_by_its_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    def keyscan(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        said = "# 10.0.0.3:2222 SSH-2.0-x\n" + ("[10.0.0.3]:2222 ssh-rsa AAAA\n" if "rsa" in command else "")
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(LAN.subprocess, "run", keyscan)
    assert LAN.host_key("10.0.0.3", 2222) == ("rsa", "SHA256:cJ6AyISHokEeHuTfufIqhhSS0gxHZRUMDHlKvXD4FHw")


# ── what a person chooses ────────────────────────────────────────────────────────────────────────


def machine(address: str, key: str = "", **more: Any) -> dict[str, Any]:
    none = {"name": "", "server": "OpenSSH", "kind": "ed25519", "own": False, "router": False, "twin": ""}
    return none | {"address": address, "answer": "ssh", "key": key or address} | more


def found() -> dict[str, Any]:
    machines = [
        machine("192.168.50.1", router=True),
        machine("192.168.50.7", own=True, name="desk.local"),
        machine("192.168.50.31", "same"),
        machine("192.168.50.32", "same"),
        machine("192.168.50.33"),
    ]
    LAN.mark_twins(machines)
    here = {
        "card": "enp3s0", "address": "192.168.50.7", "prefix": 24, "network": "192.168.50.0/24",
        "gateway": "192.168.50.1", "nameservers": ["192.168.50.1", "9.9.9.9"], "asked": 254, "lent": False,
    }  # fmt: skip
    return {"here": here, "machines": machines, "without": ["192.168.50.40"]}


def test_who_is_chosen() -> None:
    def said(answer: str) -> list[int]:
        return [int(one["address"].rpartition(".")[2]) for one in FOUND.chosen(found()["machines"], answer)]

    assert said("all") == [7, 31, 33]  # neither the router, nor one PC twice
    assert said("5 2, 3") == [33, 7, 31]
    assert said("192.168.50.33,5,2") == [33, 7]


def test_this_machine_stands_for_its_other_address() -> None:
    wireless, cable = machine("192.168.50.5", "same"), machine("192.168.50.7", "same", own=True)
    LAN.mark_twins([wireless, cable])
    assert (wireless["twin"], cable["twin"]) == ("192.168.50.7", "")
    assert FOUND.chosen([wireless, cable], "all") == [cable]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("9", "9 is not in the table: `all`, or some of 1 to 5, or addresses."),
        (" ", "Nothing is not in the table"),
        ("1,2", "192.168.50.1 is the router, and no node."),
        ("3,4", "192.168.50.32 has the same host key as 192.168.50.31: one PC with two addresses"),
    ],
)
def test_who_cannot_be_chosen(answer: str, says: str) -> None:
    with pytest.raises(AnsibleActionFail, match=re.escape(says)):
        FOUND.chosen(found()["machines"], answer)


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ("192.168.50", "is no IPv4 address"),
        ("192.168.50.254", "are not addresses in 192.168.50.0/24"),
        ("192.168.50.39", "192.168.50.40 is somebody else's today, and 192.168.50.31 cannot have it"),
    ],
)
def test_addresses_that_cannot_be(start: str, says: str) -> None:
    seen = found()
    with pytest.raises(AnsibleActionFail, match=re.escape(says)):
        FOUND.addresses(seen, FOUND.chosen(seen["machines"], "all"), start)


# ── what is written ──────────────────────────────────────────────────────────────────────────────


def texts(folder: Path, answer: str = "2,3,5", start: str = "today", user: str = "ada") -> dict[Path, str]:
    made: dict[Path, str] = FOUND.texts(found(), answer, user, start, folder)
    return made


def test_the_two_files(tmp_path: Path) -> None:
    written, kept = FOUND.write(tmp_path, texts(tmp_path, start="192.168.50.20"), check=False)
    assert (len(written), kept) == (2, [])
    assert yaml.safe_load((tmp_path / "hosts.yml").read_text())["cluster"]["hosts"] == {
        "node0": {"lan_address": "192.168.50.20", "first_address": "192.168.50.7"},
        "node1": {"lan_address": "192.168.50.21", "first_address": "192.168.50.31"},
        "node2": {"lan_address": "192.168.50.22", "first_address": "192.168.50.33"},
    }
    example = yaml.safe_load((tree.ROOT / "inventory/lan/group_vars/all/settings.yml").read_text())
    told = {
        "first_user": "ada", "lan_prefix": 24, "lan_gateway": "192.168.50.1",
        "lan_nameservers": ["192.168.50.1", "9.9.9.9"], "admin_networks": ["192.168.50.7", "192.168.50.20"],
    }  # fmt: skip
    assert yaml.safe_load((tmp_path / "group_vars/all/settings.yml").read_text()) == example | told
    today = texts(tmp_path)[Path("hosts.yml")]
    assert "node0: {lan_address: 192.168.50.7}  # desk.local, the controller\n" in today


def test_an_address_that_may_change_locks_nobody_out(tmp_path: Path) -> None:
    cards = [card("enp3s0", "192.168.50.7/24")]
    assert not LAN.is_lent(cards, LAN.places(cards)[0][1])
    cards[0]["addr_info"][0]["dynamic"] = True
    assert LAN.is_lent(cards, LAN.places(cards)[0][1])
    settings = Path("group_vars/all/settings.yml")

    def networks(answer: str, lent: bool) -> tuple[list[str], str]:
        seen = found()
        seen["here"]["lent"] = lent
        new = FOUND.texts(seen, answer, "ada", "today", tmp_path)
        return yaml.safe_load(new[settings])["admin_networks"], FOUND.next_step(seen, new, tmp_path)

    assert networks("3,5", lent=False)[0] == ["192.168.50.7"]
    assert networks("2,3,5", lent=True)[0] == ["192.168.50.7"]  # a node keeps its address
    # Whoever has come to it over SSH gets in again, where it becomes a node.
    for answer, open_to in (("2,3,5", ["192.168.50.7", "192.168.50.99"]), ("3,5", ["192.168.50.7"])):
        new = FOUND.texts(found(), answer, "ada", "today", tmp_path, "192.168.50.99")
        assert yaml.safe_load(new[settings])["admin_networks"] == open_to
        assert f"allowed from {', '.join(open_to)} only" in FOUND.next_step(found(), new, tmp_path)
    for person in ("::1", "127.0.0.1", "fe80::1%enp3s0", "UNKNOWN", ""):
        new = FOUND.texts(found(), "2,3,5", "ada", "today", tmp_path, person)
        assert yaml.safe_load(new[settings])["admin_networks"] == ["192.168.50.7"]
    open_to, said = networks("3,5", lent=True)
    assert open_to == ["192.168.50.0/24"]
    assert "from 192.168.50.0/24 (admin_networks), by key only" in said


def test_a_user_that_nobody_can_be(tmp_path: Path) -> None:
    with pytest.raises(AnsibleActionFail, match=r"^Ada, Lovelace is no user's name in Linux"):
        texts(tmp_path, user="Ada Lovelace")


def test_pcs_may_have_different_users(tmp_path: Path) -> None:
    new = texts(tmp_path, user="ada, bob carl")
    hosts = yaml.safe_load(new[Path("hosts.yml")])["cluster"]["hosts"]
    assert [node.get("first_user") for node in hosts.values()] == [None, "bob", "carl"]
    assert yaml.safe_load(new[Path("group_vars/all/settings.yml")])["first_user"] == "ada"
    assert "-k and -K ask for one password" in FOUND.next_step(found(), new, tmp_path)
    assert "-k and -K ask for one password" not in FOUND.next_step(found(), texts(tmp_path), tmp_path)
    says = "2 users for 3 nodes: say one for all of them, or one for each"
    with pytest.raises(AnsibleActionFail, match=says):
        texts(tmp_path, user="ada bob")


def test_what_somebody_has_edited_stays(tmp_path: Path) -> None:
    def write(**options: str) -> tuple[int, list[str]]:
        written, kept = FOUND.write(tmp_path, texts(tmp_path, **options), check=False)
        return len(written), kept

    hosts = tmp_path / "hosts.yml"
    assert write() == (2, [])
    assert write() == (0, [])
    assert write(answer="all", start="192.168.50.20") == (2, [])  # what find wrote itself is written anew
    hosts.write_text(edited := hosts.read_text().replace("node2:", "gpu2:"))
    written, kept = write(answer="2")
    assert written == 1
    assert hosts.read_text() == edited
    assert f"{hosts} stays as it is: somebody has edited it." in kept[0]
    assert "node0: {lan_address: 192.168.50.7}" in kept[0]


def test_the_example_in_git_is_nobodys(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=tmp_path, check=True)

    hosts = tmp_path / "hosts.yml"
    hosts.write_text("cluster: {hosts: {}}\n")
    assert FOUND.why_kept(tmp_path, hosts) == "somebody has edited it"
    git("init", "-q")
    git("add", "hosts.yml")
    git("commit", "-qm", "The example")
    assert FOUND.why_kept(tmp_path, hosts) == ""
    (tmp_path / "state").mkdir()
    (tmp_path / "state/known_hosts").touch()
    assert FOUND.why_kept(tmp_path, hosts) == "its nodes have been through bootstrap"
