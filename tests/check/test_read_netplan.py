"""What the role network makes of other people's netplan files: with the files of ordinary PCs."""

import json
from pathlib import Path
from typing import Any

import pytest
import tree

MAC = "3c:7c:3f:00:00:01"
SUBIQUITY = "network: {version: 2, ethernets: {enp3s0: {dhcp4: true}}}"
TYPED = (
    "network: {version: 2, ethernets: {enp3s0: {addresses: [192.168.1.4/24], nameservers: {addresses: [9.9.9.9]}, "
    "routes: [{to: default, via: 192.168.1.1}]}}}"
)
CLOUD_INIT = (
    "network: {ethernets: {nic0: {match: {macaddress: '3C:7C:3F:00:00:01'}, set-name: enp3s0, dhcp4: true}}}"
)
DESKTOP = "network: {renderer: NetworkManager}"
OTHER = "network: {ethernets: {eno1: {addresses: [10.0.0.1/8]}}}"


def read(
    folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """The answer about enp3s0."""
    for name, text in files.items():
        (folder / name).write_text(text)
    script = tree.module("roles/network/files/read_netplan.py")
    monkeypatch.setattr(script, "NETPLAN", str(folder))
    script.main("enp3s0", MAC, str(folder / "90-aura.yaml"))
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize(
    ("files", "netplan_id", "moved"),
    [
        pytest.param({}, "enp3s0", [], id="no file"),
        pytest.param({"00-installer-config.yaml": SUBIQUITY}, "enp3s0", [], id="the installer's, with DHCP"),
        pytest.param({"00-typed.yaml": TYPED}, "enp3s0", ["00-typed.yaml"], id="a static address"),
        pytest.param({"50-cloud-init.yaml": CLOUD_INIT}, "nic0", [], id="cloud-init's, by the MAC address"),
        pytest.param({"01-network-manager-all.yaml": DESKTOP}, "enp3s0", [], id="desktop"),
        pytest.param({"10-other.yaml": OTHER}, "enp3s0", [], id="other"),
        pytest.param({"10-wifi.yaml": "network: {wifis: {wlp2s0: {dhcp4: true}}}"}, "enp3s0", [], id="Wi-Fi"),
        pytest.param(
            {"90-aura.yaml": CLOUD_INIT.replace("nic0", "enp2s0"), "00-installer-config.yaml": ""}, "enp2s0", [],
            id="a new card has renamed it",
        ),
    ],
)  # fmt: skip
def test_ours_goes_under_the_id_that_is_there_and_a_static_address_moves(
    files: dict[str, str],
    netplan_id: str,
    moved: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = read(tmp_path, files, monkeypatch, capsys)
    assert answer["problems"] == []
    assert answer["id"] == netplan_id
    assert answer["moved"] == [str(tmp_path / name) for name in moved]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "network: {ethernets: {all: {match: {name: 'en*'}, dhcp4: true}}}",
            "and others together (all: match)",
        ),
        ("network: {ethernets: {any: {match: {}, dhcp4: true}}}", "and others together (any: match)"),
        ("network: {ethernets: {enp3s0: {}}, bridges: {br0: {interfaces: [enp3s0]}}}", "in br0 (bridges)"),
        ("network: {ethernets: {enp3s0: {}}, bonds: {bond0: {interfaces: [enp3s0]}}}", "in bond0 (bonds)"),
        ("network: {ethernets: {enp3s0: {}}, vlans: {v7: {id: 7, link: enp3s0}}}", "in v7 (vlans)"),
        (TYPED.replace("enp3s0: {", "eno1: {dhcp4: true}, enp3s0: {"), "says more (eno1)"),
        (TYPED.replace("enp3s0: {", "enp3s0: {mtu: 9000, "), "says more (mtu)"),
        (CLOUD_INIT.replace("nic0:", "enp3s0: {dhcp4: true}, nic0:"), "both configure enp3s0"),
        ("network: {ethernets: [", "cannot be read"),
        ("network: {ethernets: [1, 2]}", "cannot be read"),
    ],
)
def test_what_a_file_of_ours_cannot_go_with_is_refused(
    text: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (problem,) = read(tmp_path, {"50-x.yaml": text}, monkeypatch, capsys)["problems"]
    assert sentence in problem
