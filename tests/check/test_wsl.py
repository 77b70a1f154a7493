"""Linux under Windows: which roles run there, what stops the role, what WSL and Windows are told.

The facts about nodes are synthetic.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
import yaml
from expressions import preflight_sentences
from plays import playbook, told

NODES = {f"node{number}": {"lan_address": f"192.168.50.2{number}"} for number in range(4)}
BESIDE = {"cluster": {"hosts": NODES}, "wsl": {"hosts": {"node0": {}, "node3": {}}}}
INSIDE = {
    "cluster": {
        "hosts": {name: NODES[name] for name in ("node1", "node2")},
        "children": {"wsl": {"hosts": {name: NODES[name] for name in ("node0", "node3")}}},
    }
}


def inventory(folder: Path, hosts: dict[str, Any], **settings: Any) -> Path:
    (folder / "group_vars/all").mkdir(parents=True)
    (folder / "hosts.yml").write_text(yaml.safe_dump(hosts))
    text = (tree.ROOT / "inventory/lan/group_vars/all/settings.yml").read_text()
    more = yaml.safe_dump(settings) if settings else ""
    (folder / "group_vars/all/settings.yml").write_text(text + more)
    return folder


ROLES_OF_SITE = re.findall(r"import_role: \{name: (\w+)", (tree.ROOT / "playbooks/site.yml").read_text())


def switches(folder: Path, host: str) -> dict[str, bool]:
    paths = [tree.ROOT / f"roles/{role}/defaults/main.yml" for role in ROLES_OF_SITE]
    defaults = {name: value for path in paths for name, value in yaml.safe_load(path.read_text()).items()}
    names = [name for role in ROLES_OF_SITE if (name := f"{role}_enabled") in defaults]
    command = ["ansible-inventory", "-i", str(folder), "--host", host]
    known = json.loads(subprocess.check_output(command, cwd=tree.ROOT))
    said = [name for name in names if name in known and name != "gpu_watch_enabled"]
    values = told(folder, host, *said)
    return {name: bool(values[name]) if name in values else defaults[name] for name in names}


@pytest.mark.parametrize("hosts", [BESIDE, INSIDE], ids=["beside", "inside"])
def test_what_windows_does_no_role_of_ours_does(hosts: dict[str, Any], tmp_path: Path) -> None:
    folder = inventory(tmp_path, hosts)
    native, under_windows = switches(folder, "node2"), switches(folder, "node3")
    unlike = {name: value for name, value in under_windows.items() if value != native[name]}
    assert unlike == {
        "wsl_enabled": True, "network_enabled": False, "firewall_enabled": False, "timesync_enabled": False,
        "nvidia_driver_enabled": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("read", "enabled", "sentence"),
    [
        ("systemd 192.168.50.23", False, ""),
        ("wsl systemd 192.168.50.23 fe80::1", True, ""),
        ("wsl systemd 192.168.50.23", False, "Name it in the group `wsl` of hosts.yml too (wsl: {hosts: {node3: {}}})"),
        ("systemd 192.168.50.23", True, "but it is no Linux under Windows. Remove it there."),
        ("wsl 192.168.50.23", True, "systemd does not run in its WSL"),
        ("wsl systemd 172.22.1.5", True, "What to type there: ansible-playbook playbooks/windows.yml --limit node3."),
    ],
)  # fmt: skip
def test_what_stops_the_role(read: str, enabled: bool, sentence: str) -> None:
    node = {"__wsl_read": {"stdout": read}, "inventory_hostname": "node3"}
    found = preflight_sentences("wsl", node, wsl_enabled=enabled, wsl_address="192.168.50.23")
    assert sentence in found if sentence else found == ""


def test_what_windows_is_told(tmp_path: Path) -> None:
    """The playbook itself, on nodes that nobody can reach."""
    nodes = {
        "node0": {"wsl_networking": "switch"},
        "node3": {"wsl_adapter": "Conexión d'Ana", "wsl_memory": "24GB"},
    }
    folder = inventory(tmp_path / "lan", {**BESIDE, "wsl": {"hosts": nodes}})
    done = playbook("-i", folder, "playbooks/windows.yml", "-e", f"windows_directory={tmp_path}")
    assert done.returncode == 0, done.stdout
    text = (tmp_path / "node3.ps1").read_text(encoding="utf-8-sig")
    mirrored = text.splitlines()
    printed = {line.strip() for line in done.stdout.splitlines()}
    assert {line.strip() for line in mirrored} <= printed
    assert "-InterfaceAlias 'Conexión d''Ana' -IPAddress '192.168.50.23' -PrefixLength 24" in text
    assert "'networkingMode=mirrored','firewall=true','vmIdleTimeout=-1','memory=24GB'" in text
    rules = [line for line in mirrored if line.startswith("New-NetFirewallHyperVRule")]
    creator = "-Direction Inbound -Action Allow -VMCreatorId '{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}'"
    peers = "'192.168.50.20','192.168.50.21','192.168.50.22'"
    assert len(rules) == 4
    assert all(creator in rule and "-RemoteAddresses '" in rule for rule in rules)
    assert rules[0].endswith("-Protocol TCP -LocalPorts '22','6006' -RemoteAddresses '192.168.50.0/24'")
    ports = "'1-21','23-6005','6007-65535'"
    assert rules[2].endswith(f"-Protocol TCP -LocalPorts {ports} -RemoteAddresses {peers}")
    (closed,) = (line for line in mirrored if line.startswith("Set-NetFirewallHyperVVMSetting"))
    assert closed.endswith("-Enabled True -DefaultInboundAction Block")
    assert "w32tm /config '/manualpeerlist:192.168.50.21,0x8' /syncfromflags:manual /update" in mirrored
    # Pasted from what Ansible prints, all is indented: a here-string would not end.
    assert not [line for line in mirrored if "@'" in line or "'@" in line]
    over_switch = (tmp_path / "node0.ps1").read_text(encoding="utf-8-sig")
    assert "New-VMSwitch -Name 'LanDDP' -NetAdapterName 'Ethernet' -AllowManagementOS $true" in over_switch
    assert "'networkingMode=bridged','vmSwitch=LanDDP','dhcp=false'" in over_switch
    assert "sudo sh -c 'ip address replace 192.168.50.20/24 dev eth0 &&" in over_switch
    assert "HyperVRule" not in over_switch
