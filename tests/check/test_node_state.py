"""What a node says of itself, and which answer serves which question."""

import time
from pathlib import Path
from typing import Any

import pytest
import tree


def test_an_answer_serves_who_asks_for_no_more() -> None:
    action = tree.plugin("action/node_state")
    base = {"packages": ["acl"], "files": ["/etc/aura"]}
    firewall = {"packages": ["nftables", "acl"], "firewall": True}
    together = action.merged([base, firewall])
    assert together == {"packages": ["acl", "nftables"], "files": ["/etc/aura"], "firewall": True}
    assert action.within(base, together) and action.within(firewall, together)
    for more in ({"packages": ["chrony"]}, {"network": True}):
        assert not action.within(more, together)
    assert not action.within(firewall, base)
    assert action.answer_for(firewall, {"missing": ["g++", "acl"]})["missing"] == ["acl"]
    assert action.answer_for({"network": True}, {"missing": ["g++"]})["missing"] == []


@pytest.fixture
def node_state() -> Any:
    return tree.plugin("modules/node_state")


def test_what_a_unit_says_of_itself(node_state: Any) -> None:
    unit = node_state.unit
    says = "LoadState=loaded\nActiveState=inactive\nUnitFileState=disabled\nNeedDaemonReload=no\n"
    off = unit(says, now=100.0)
    wanted = {"exists": True, "active": False, "enabled": False, "started": 0.0, "stale": False}
    assert off | wanted == off
    missing = unit("LoadState=not-found\nActiveState=inactive\nUnitFileState=\n", now=100.0)
    assert (missing["exists"], missing["active"]) == (False, False)
    masked = unit("LoadState=masked\nActiveState=inactive\nUnitFileState=masked\n", now=100.0)
    assert (masked["exists"], masked["enabled_state"]) == (True, "masked")


@pytest.mark.parametrize(("folder", "stale"), [("generator.late", False), ("etc", True)])
def test_what_a_generator_writes_again_makes_no_unit_stale(
    node_state: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, stale: bool
) -> None:
    """nfs-server has such a file: each site.yml after a reload of systemd would start the server again."""
    monkeypatch.setattr(node_state, "GENERATED", str(tmp_path / "generator"))
    file = tmp_path / folder / "order-with-mounts.conf"
    file.parent.mkdir()
    file.touch()
    since = int((time.clock_gettime(time.CLOCK_MONOTONIC) - 5) * 1e6)
    says = f"LoadState=loaded\nActiveState=active\nActiveEnterTimestampMonotonic={since}\nDropInPaths={file}"
    assert node_state.unit(says, time.time() + 1)["stale"] == stale


MOUNTS = r"""
22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw,errors=remount-ro
25 22 0:22 / /proc rw,nosuid shared:5 - proc proc rw
40 22 0:41 / /srv/aura rw,nosuid,nodev,relatime shared:90 - nfs4 192.168.50.20:/srv/aura rw,vers=4.2,softerr
41 22 8:17 / /mnt/with\040space rw - vfat /dev/sdb1 rw
42 41 8:33 / /mnt/with\040space rw - exfat /dev/sdc1 rw
""".strip()


def test_what_is_mounted_is_known_without_touching_it(
    node_state: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mounts = node_state.mounts
    monkeypatch.setattr("os.walk", lambda path: pytest.fail(f"{path} was touched"))
    share = mounts(["/srv/aura"], MOUNTS)["/srv/aura"]
    seen = {"mounted": True, "source": "192.168.50.20:/srv/aura", "type": "nfs4"}
    assert share | seen | {"empty": False, "used": True, "owner": "", "free": 0} == share
    assert {"nosuid", "nodev", "softerr", "vers=4.2"} <= set(share["options"])
    monkeypatch.undo()
    covered = mounts(["/mnt/with space"], MOUNTS)["/mnt/with space"]
    assert (covered["mounted"], covered["type"], covered["where"]) == (True, "exfat", "/mnt/with space")

    (tmp_path / "empty/inner").mkdir(parents=True)
    (tmp_path / "link").mkdir()
    (tmp_path / "link/to").symlink_to("/tmp")
    (tmp_path / "file/deep").mkdir(parents=True)
    (tmp_path / "file/deep/one").touch()
    paths = {name: str(tmp_path / name) for name in ("empty", "link", "file", "absent")}
    found = mounts(list(paths.values()), MOUNTS)
    empty, link, file, absent = found.values()
    assert [there["used"] for there in (empty, link, file, absent)] == [False, True, True, False]
    assert [there["empty"] for there in (empty, link, file, absent)] == [False, False, False, True]
    # A disk of its own is looked into.
    own = [paths["file"], paths["empty"]]
    disks = "\n".join([MOUNTS, *(f"43 22 8:49 / {path} rw - ext4 /dev/sdd1 rw" for path in own)])
    used = [(there["mounted"], there["used"]) for there in mounts(own, disks).values()]
    assert used == [(True, True), (True, False)]
    wanted = {"mounted": False, "type": "ext4", "where": "/", "owner": tmp_path.owner()}
    assert file | wanted == file and file["free"] > 0
    assert absent["owner"] == ""
    assert not mounts(["/srv/aura2"], MOUNTS)["/srv/aura2"]["mounted"]
    assert not mounts(["ssd"], MOUNTS)["ssd"]["mounted"]
