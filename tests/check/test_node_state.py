"""How what a node is gets compared with what is wanted, and which answer serves which question."""

import importlib.util
import sys
from types import ModuleType

import pytest
import tree


def plugin(path: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(
        path.replace("/", "_"), tree.ROOT / f"plugins/{path}.py"
    )
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("seen", "wanted", "differ"),
    [
        ({"/a": {"kind": "file", "mode": "0644"}}, {"/a": {"kind": "file"}}, []),
        ({"/a": {"kind": "file", "mode": "0600"}}, {"/a": {"kind": "file", "mode": "0644"}}, ["/a"]),
        ({"/a": {"kind": "link", "mode": "0777"}}, {"/a": {"kind": "directory"}}, ["/a"]),
        ({"/a": {"kind": "absent", "mode": ""}}, {"/a": {"kind": "absent"}}, []),
        ({}, {"/a": {"kind": "absent"}}, ["/a"]),  # not looked at is not known
        ({"/a": {"kind": "file"}, "/b": {"kind": "file"}}, {"/a": {"kind": "file"}}, []),
    ],
)
def test_only_what_is_wanted_is_compared(
    seen: dict[str, dict[str, str]], wanted: dict[str, dict[str, str]], differ: list[str]
) -> None:
    assert plugin("filter/differing").differing(seen, wanted) == differ


def test_an_answer_serves_who_asks_for_no_more() -> None:
    action = plugin("action/node_state")
    base = {"packages": ["acl"], "files": ["/etc/aura"]}
    firewall = {"packages": ["nftables", "acl"], "firewall": True}
    together = action.merged([base, firewall])
    assert together == {"packages": ["acl", "nftables"], "files": ["/etc/aura"], "firewall": True}
    assert action.within(base, together)
    assert action.within(firewall, together)
    assert not action.within({"packages": ["chrony"]}, together)
    assert not action.within({"network": True}, together)
    assert not action.within(firewall, base)


def test_what_a_unit_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ansible puts it there on the node.
    for name in ("node_network", "node_packages"):
        monkeypatch.setitem(sys.modules, f"ansible.module_utils.{name}", plugin(f"module_utils/{name}"))
    unit = plugin("modules/node_state").unit
    off = unit(
        "LoadState=loaded\nActiveState=inactive\nUnitFileState=disabled\nNeedDaemonReload=no\n", now=100.0
    )
    assert (off["exists"], off["active"], off["enabled"], off["started"], off["stale"]) == (
        True,
        False,
        False,
        0.0,
        False,
    )
    missing = unit("LoadState=not-found\nActiveState=inactive\nUnitFileState=\n", now=100.0)
    assert (missing["exists"], missing["active"]) == (False, False)
    masked = unit("LoadState=masked\nActiveState=inactive\nUnitFileState=masked\n", now=100.0)
    assert (masked["exists"], masked["enabled_state"]) == (True, "masked")
