"""Which card is the LAN's, and what netplan's files become: with the cards and files of ordinary PCs."""

from typing import Any

import pytest
import tree
import yaml

CARDS, NETPLAN = tree.plugin("filter/lan_card"), tree.plugin("filter/netplan")
WANTED, ROUTER = "192.168.50.20", "192.168.50.1"


def card(name: str, *addresses: str, **more: Any) -> dict[str, Any]:
    """A wired card with a cable, as node_state describes it; `gateway` and the like in `more`."""
    number = sum(map(ord, name)) % 256
    mac = f"3c:7c:3f:00:00:{number:02x}"
    return {
        "name": name, "mac": mac, "permanent_mac": mac, "up": True, "carrier": True,
        "kind": "ethernet", "addresses": [*addresses, "fe80::3e7c:3fff:fe00:1/64"], "dynamic": [], "gateway": "",
        "manager": "networkd", **more,
    }  # fmt: skip


def home(name: str = "enp3s0", **more: Any) -> dict[str, Any]:
    return card(name, "192.168.1.57/24", **{"gateway": "192.168.1.1", "dynamic": ["192.168.1.57/24"], **more})


NO_CABLE = {"carrier": False}
OFF = {"up": False, "carrier": False, "manager": "none"}
DOCKER = card("docker0", "172.17.0.1/16", kind="virtual", carrier=False, permanent_mac="")


def wifi(*addresses: str, **more: Any) -> dict[str, Any]:
    return card("wlp2s0", *addresses, kind="wifi", manager="NetworkManager", **more)


@pytest.mark.parametrize(
    ("cards", "chosen"),
    [
        pytest.param([card("enp3s0", "192.168.50.20/24")], "enp3s0", id="it has the address"),
        pytest.param([home()], "enp3s0", id="one card, another subnet: this is the move"),
        pytest.param([home(), DOCKER], "enp3s0", id="Docker's bridge is no card"),
        pytest.param([home(), card("eno1", "192.168.50.20/24")], "eno1", id="a home card beside the LAN's"),
        pytest.param([home(), card("eno1", "192.168.50.131/24")], "eno1", id="a home card beside one in the LAN"),
        pytest.param([home(), card("eno1", "192.168.50.20/24", **NO_CABLE)], "eno1", id="no cable"),
        pytest.param([home(), card("eno1", **NO_CABLE)], "enp3s0", id="a second port that nobody uses"),
        pytest.param([card("enp3s0"), wifi("192.168.1.9/24", gateway="192.168.1.1")], "enp3s0", id="Wi-Fi has that"),
        pytest.param(
            [card("enp3s0"), wifi("192.168.50.9/24", gateway="192.168.50.1")], "enp3s0", id="Wi-Fi in the same network"
        ),
        pytest.param([card("enp3s0"), card("eno1", **OFF)], "enp3s0", id="no way out over the card with a link"),
        pytest.param(
            [card("enp3s0", "192.168.50.20/24"), card("eno1", "192.168.50.132/24")], "enp3s0",
            id="the address itself goes before its network",
        ),
        pytest.param(
            [card("enp3s0", "192.168.50.131/24"), card("eno1", "192.168.50.132/24", **NO_CABLE)], "enp3s0",
            id="two in the network, one has a cable",
        ),
        pytest.param([card("enp3s0", "192.168.50.2/28", "10.0.0.1/8"), home("eno1")], "enp3s0", id="several addresses"),
    ],
)  # fmt: skip
def test_the_card_is_found(cards: list[dict[str, Any]], chosen: str) -> None:
    (known,) = (shown for shown in cards if shown["name"] == chosen)
    assert CARDS.lan_card(cards, WANTED, 24) == known | {"problem": ""}


@pytest.mark.parametrize(
    ("cards", "said"),
    [
        pytest.param([home(), card("eno1")], "not clear which", id="a home card beside a switch card"),
        pytest.param([home(), card("eno1", **OFF)], "eno1 (3c:7c", id="a home card beside one that is switched off"),
        pytest.param([card("enp3s0"), card("eno1")], "Say which one it is: lan_interface", id="two cards with links"),
        pytest.param([card("enp3s0", **NO_CABLE)], "plug its cable in", id="no cable"),
        pytest.param([wifi("192.168.1.9/24")], "static_network_enabled: false", id="Wi-Fi only"),
        pytest.param([wifi("192.168.50.20/24")], "Where it has Wi-Fi only", id="the Wi-Fi card has the address"),
        pytest.param([], "It has no network card.", id="no card"),
        pytest.param(
            [card("br0", "192.168.50.20/24", kind="virtual"), card("enp3s0", kind="virtual")], "br0, which is virtual",
            id="a bridge has the address",
        ),
        pytest.param(
            [card("br0", "192.168.50.9/24", kind="virtual"), card("eno1")], "br0, which is virtual",
            id="a bridge is in the network",
        ),
        pytest.param(
            [card("enp3s0", "192.168.50.131/24"), card("eno1", "192.168.50.132/24")],
            "several network cards have an address in", id="two in the network",
        ),
        pytest.param(
            [card("enp3s0", "192.168.50.20/24"), card("eno1", "192.168.50.20/24")],
            "several network cards have 192.168.50.20", id="two with the same address",
        ),
    ],
)  # fmt: skip
def test_a_doubt_is_a_sentence_and_no_card(cards: list[dict[str, Any]], said: str) -> None:
    answer = CARDS.lan_card(cards, WANTED, 24)
    assert said in answer["problem"]
    assert answer["name"] == ""
    for shown in cards:
        assert shown["kind"] == "virtual" or shown["name"] in answer["problem"]


def test_the_list_says_what_tells_cards_apart() -> None:
    cards = [home(), card("eno1"), card("enp9s0", **NO_CABLE), card("eno2", **OFF)]
    problem = CARDS.lan_card(cards, WANTED, 24)["problem"]
    assert "enp3s0 (3c:7c:3f:00:00:" in problem
    assert ", 192.168.1.57/24, link, default route); eno1 (" in problem
    assert ", no address, link); enp9s0 (" in problem
    assert ", no link); eno2 (" in problem
    assert ", switched off)." in problem


ENO1 = card("eno1")["mac"]


@pytest.mark.parametrize(
    "named", [card("eno1", **OFF), card("eno1", mac="02:00:00:00:00:01")], ids=["off", "disguised"]
)
@pytest.mark.parametrize("word", ["eno1", ENO1, ENO1.upper()])
def test_lan_interface_has_the_last_word(named: dict[str, Any], word: str) -> None:
    """It may be the address that the card was made with; it means the card and not what is built on it."""
    vlan = card("eno1.7", kind="virtual", mac=ENO1, permanent_mac="")
    cards = [vlan, home(), card("enp3s1", "192.168.50.131/24"), named]
    assert CARDS.lan_card(cards, WANTED, 24, word)["name"] == "eno1"


@pytest.mark.parametrize(
    ("word", "said"), [("enp7s0", "no such network card"), ("wlp2s0", "Wi-Fi"), ("docker0", "virtual")]
)
def test_lan_interface_may_be_wrong(word: str, said: str) -> None:
    answer = CARDS.lan_card([card("enp3s0", "192.168.50.20/24"), wifi(), DOCKER], WANTED, 24, word)
    assert said in answer["problem"]
    assert answer["name"] == ""


@pytest.mark.parametrize(
    ("cards", "gateway", "said"),
    [
        pytest.param([card("enp3s0")], ROUTER, "", id="the usual router"),
        pytest.param([card("enp3s0"), home("eno1")], "", "", id="a home card is the way out"),
        pytest.param([card("enp3s0")], "192.168.51.1", "is not in 192.168.50.0/24", id="elsewhere"),
        pytest.param([card("enp3s0"), home("eno1")], ROUTER, "eno1 (over 192.168.1.1) already has", id="a second one"),
        pytest.param([card("enp3s0"), wifi(gateway=ROUTER)], ROUTER, "", id="Wi-Fi at the same router"),
        pytest.param([card("enp3s0", gateway=ROUTER), home("eno1")], ROUTER, "", id="it is so already"),
    ],
)  # fmt: skip
def test_only_one_card_has_the_way_out(cards: list[dict[str, Any]], gateway: str, said: str) -> None:
    answer = CARDS.gateway_problem(cards, cards[0], gateway, WANTED, 24)
    assert said in answer if said else answer == ""


# ── netplan's files ──────────────────────────────────────────────────────────────────────────────

OURS: dict[str, Any] = {"address": WANTED, "prefix": 24, "gateway": ROUTER, "nameservers": [ROUTER]}
MAC = card("enp3s0")["mac"]


def takeover(texts: dict[str, str], the_card: dict[str, Any] | None = None) -> dict[str, Any]:
    paths = {path if "/" in path else f"/etc/netplan/{path}": text for path, text in texts.items()}
    return NETPLAN.netplan_takeover(paths, the_card or card("enp3s0"), OURS)


SUBIQUITY = """# This is the network config written by 'subiquity'
network:
  ethernets:
    enp3s0:
      dhcp4: true
  version: 2
"""
CLOUD_INIT = f"""network:
    version: 2
    ethernets:
        nic0:
            match: {{macaddress: '{MAC}'}}
            set-name: enp3s0
            dhcp4: true
            mtu: 9000
"""


def test_a_new_card_is_found_by_the_address_that_it_was_made_with_or_by_name() -> None:
    assert takeover({}, card("enp3s0", permanent_mac=""))["definition"]["match"] == {"name": "enp3s0"}
    assert takeover({})["definition"] == {
        "renderer": "networkd", "match": {"macaddress": MAC}, "dhcp4": False, "dhcp6": False,
        "addresses": ["192.168.50.20/24"], "routes": [{"to": "default", "via": "192.168.50.1"}],
        "nameservers": {"addresses": ["192.168.50.1"]},
    }  # fmt: skip


@pytest.mark.parametrize("text", [SUBIQUITY, CLOUD_INIT])
def test_the_installers_file_goes_with_its_original(text: str) -> None:
    gone = {"path": "/etc/netplan/50-x.yaml", "original": text, "content": ""}
    assert takeover({"50-x.yaml": text})["others"] == [gone]


def test_what_else_was_said_about_the_card_stays() -> None:
    text = CLOUD_INIT + (
        "            wakeonlan: on\n            dhcp6: true\n            accept-ra: 'no'\n            optional: true\n"
        "            addresses: [192.168.1.4/24, 'fd00::4/64', {'fd00::5/64': {lifetime: 0}}]\n"
        "            routes: [{to: default, via: 192.168.1.1}, {to: '::/0', via: 'fd00::1'},"
        " {to: 10.8.0.0/24, via: 192.168.50.254}, {to: default, via: 192.168.50.9, table: 7}]\n"
        "            routing-policy: [{from: 10.8.0.0/24, table: 7}]\n"
        "            nameservers: {addresses: [9.9.9.9], search: [home.arpa]}\n"
    )
    found = takeover({"50-x.yaml": text, "60-more.yaml": "network: {ethernets: {nic0: {mtu: 1400}}}"})
    assert found["definition"] == {
        "renderer": "networkd", "match": {"macaddress": MAC}, "dhcp4": False, "dhcp6": True,
        "addresses": ["192.168.50.20/24", "fd00::4/64", {"fd00::5/64": {"lifetime": "0"}}],
        "routes": [
            {"to": "default", "via": "192.168.50.1"}, {"to": "::/0", "via": "fd00::1"},
            {"to": "10.8.0.0/24", "via": "192.168.50.254"}, {"to": "default", "via": "192.168.50.9", "table": "7"},
        ],
        "routing-policy": [{"from": "10.8.0.0/24", "table": "7"}],
        "nameservers": {"addresses": ["192.168.50.1"], "search": ["home.arpa"]},
        "wakeonlan": True, "optional": True, "accept-ra": False, "mtu": 1400, "set-name": "enp3s0",
    }  # fmt: skip
    paths = ["/etc/netplan/50-x.yaml", "/etc/netplan/60-more.yaml"]
    assert [other["path"] for other in found["others"]] == paths


def test_networkmanager_goes_on_asking_for_ipv6_where_nobody_said_anything() -> None:
    desktop = card("enp3s0") | {"manager": "NetworkManager"}
    assert takeover({}, desktop)["definition"]["dhcp6"] is True
    assert takeover({"50-cloud-init.yaml": CLOUD_INIT}, desktop)["definition"]["dhcp6"] is False


def test_our_own_file_is_read_again_as_it_was_written() -> None:
    first = takeover({"50-cloud-init.yaml": CLOUD_INIT + "            wakeonlan: yes\n"})["definition"]
    text = yaml.safe_dump({"network": {"version": 2, "ethernets": {"0-aura": first}}})
    assert takeover({"90-aura.yaml": text}) == {"problem": "", "definition": first, "others": []}


def test_a_file_about_other_cards_too_keeps_those() -> None:
    text = f"""# two cards
network:
  version: 2
  renderer: networkd
  ethernets:
    enp3s0: {{dhcp4: true}}
    lan:
      match: {{macaddress: 52:54:00:12:34:56}}
      addresses: [10.1.2.3/8]
      mtu: 0x10
    other: {{match: {{macaddress: "{MAC}"}}}}
  wifis:
    wlp2s0: {{access-points: {{home: {{password: "0123"}}}}}}
"""
    (other,) = takeover({"00-installer-config.yaml": text})["others"]
    assert other["content"] == (
        "network:\n  version: 2\n  renderer: networkd\n  ethernets:\n    lan:\n"
        "      match: {macaddress: '52:54:00:12:34:56'}\n      addresses: [10.1.2.3/8]\n      mtu: 0x10\n"
        '  wifis:\n    wlp2s0: {access-points: {home: {password: "0123"}}}\n'
    )


@pytest.mark.parametrize(
    "definition",
    [
        "all: {match: {name: 'en*'}, dhcp4: true}",
        "all: {match: {driver: r8169}, dhcp4: true}",
        "any: {match: {}, dhcp4: true}",
        "eno1: {dhcp4: true}",
        "enp3s0: {match: {macaddress: '00:11:22:33:44:55'}, dhcp4: true}",
    ],
)
def test_what_is_said_about_other_cards_stays_as_it_is(definition: str) -> None:
    """And a file elsewhere is left to the package that owns it."""
    texts = {"01-x.yaml": f"network: {{version: 2, ethernets: {{{definition}}}}}"}
    assert takeover(texts | {"/usr/lib/netplan/00-x.yaml": SUBIQUITY})["others"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("network: {ethernets: [", "/etc/netplan/x.yaml is no YAML"),
        ("network: {ethernets: {enp3s0: {}}, bridges: {br0: {interfaces: [enp3s0]}}}", "/etc/netplan/x.yaml builds"),
        ("network: {ethernets: {enp3s0: {}}, bonds: {bond0: {interfaces: [enp3s0]}}}", "/etc/netplan/x.yaml builds"),
        ("network: {ethernets: {enp3s0: {}}, vlans: {v7: {id: 7, link: enp3s0}}}", "/etc/netplan/x.yaml builds"),
        # A VPN's router, say, in the network that the card gives up.
        (f"{CLOUD_INIT}            routes: [{{to: 10.8.0.0/24, via: 192.168.1.254}}]", "10.8.0.0/24 by 192.168.1.254"),
        (f"{CLOUD_INIT}            routes: [{{to: 10.8.0.0/24, via: 192.168.1.254}}]", "Somebody may come over them"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_beside_the_address_is_refused(text: str, said: str) -> None:
    assert said in takeover({"x.yaml": text})["problem"]


ALL_OF_IT = {"01-network-manager-all.yaml": "network: {renderer: NetworkManager}"}
OUR_FILE = {"90-aura.yaml": "network: {ethernets: {0-aura: {renderer: NetworkManager}}}"}


@pytest.mark.parametrize(
    ("manager", "texts", "who"),
    [
        ("networkd", ALL_OF_IT, "networkd"),
        ("NetworkManager", {}, "NetworkManager"),
        ("none", ALL_OF_IT, "NetworkManager"),
        ("none", OUR_FILE, "NetworkManager"),
        ("none", {}, "networkd"),
    ],
)
def test_who_has_the_card_keeps_it(manager: str, texts: dict[str, str], who: str) -> None:
    definition = takeover(texts, card("enp3s0", manager=manager))["definition"]
    assert definition["renderer"] == who
    assert ("networkmanager" in definition) == (who == "NetworkManager")


def test_network_managers_own_profile_of_the_card_goes_too() -> None:
    profile = "{renderer: NetworkManager, match: {name: enp3s0}, dhcp4: true, networkmanager: {uuid: '4711'}}"
    text = f"network: {{version: 2, ethernets: {{NM-4711: {profile}}}}}"
    found = takeover({"90-NM-4711.yaml": text}, card("enp3s0", manager="NetworkManager"))
    assert found["others"][0]["content"] == ""
    priority = {"connection.autoconnect-priority": "100"}
    assert found["definition"]["networkmanager"] == {"passthrough": priority}
