"""What the roles about shared files make of what they see: expressions, and tasks on this machine, without a node."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tree
from expressions import filled_in, loaded, problems, says, variables_of
from plays import played, role_with

ABSENT = {"kind": "absent", "sha256": "", "mode": "", "owner": "", "group": "", "target": "", "mtime": 0.0}
UNIT = {
    "exists": True, "active": True, "enabled": True, "enabled_state": "enabled", "reload": False, "stale": False,
}  # fmt: skip
MASKED = {**UNIT, "active": False, "enabled": False, "enabled_state": "masked"}
FREE = {
    "mounted": False, "source": "/dev/sda2", "type": "ext4", "options": ["rw"], "where": "/", "owner": "",
    "empty": True, "used": False,
}  # fmt: skip
HOME = "lies in somebody's home. Homes are closed to others"
SYSTEM = "which belongs to the system"
THEIRS = {"owner": "ubuntu", "empty": False}
OURS_THERE = {"owner": "aura", "empty": False}
MOUNT_FILE = {"/etc/systemd/system/srv-aura.mount": {**ABSENT, "kind": "file"}}


# --- the server ------------------------------------------------------------------------------------

CLIENTS = ["192.168.50.21", "192.168.50.22"]
SERVER: dict[str, Any] = {"server_enabled": True, "directory": "/srv/aura", "clients": CLIENTS}


def test_who_mounted_it_yesterday_may_serve_it_today() -> None:
    """Another PC's line has become the first one of hosts.yml."""
    mounted = {**FREE, "mounted": True, "owner": "", "empty": False}
    files = {"/srv/aura": {**ABSENT, "kind": "directory"}}
    node: dict[str, Any] = {"files": files, "mounts": {"/srv/aura": mounted}}
    assert "somebody else's there" in problems("nfs", node, **SERVER)
    assert problems("nfs", {**node, "files": files | MOUNT_FILE}, **SERVER) == ""


@pytest.mark.parametrize(
    ("kind", "there", "settings", "sentence"),
    [
        ("absent", {}, {}, ""),
        ("directory", OURS_THERE, {}, ""),
        ("directory", {"owner": "ubuntu"}, {}, ""),  # empty
        ("directory", THEIRS, {}, "is /srv/aura, which is ubuntu's there and not empty"),
        ("directory", THEIRS | {"mounted": True, "owner": "root"}, {}, "which is root's"),
        ("link", {}, {}, "is a link there, and no directory"),
        ("absent", {}, {"directory": "/home/ubuntu"}, HOME),
        ("absent", {}, {"directory": "/home/ubuntu/simpletuner/output"}, HOME),
        ("absent", {}, {"clients": []}, "nfs_clients is empty"),
        ("absent", {}, {"clients": ["node1"]}, "names node1, which is no IPv4 address"),
        ("absent", {}, {"clients": ["0.0.0.0/0"]}, "names 0.0.0.0/0, which is no IPv4 address"),
        ("absent", {}, {"directory": "/etc/aura"}, SYSTEM),
        ("absent", {}, {"directory": "/lib/systemd"}, SYSTEM),
        ("absent", {}, {"directory": "/var/lib/aura/runs"}, SYSTEM),
        ("absent", {}, {"directory": "/var/lib/nfs"}, SYSTEM),
        ("absent", {}, {"directory": "/library/aura"}, ""),
        ("absent", {}, {"directory": "/homes/aura"}, ""),
        ("absent", {}, {"directory": "/srv/my files"}, "no absolute path of at least two names"),
        ("absent", {}, {"directory": "/srv"}, "no absolute path of at least two names"),
        ("absent", {}, {"directory": "/srv/aura/../.."}, "no absolute path of at least two names"),
    ],
)
def test_what_would_be_no_good_server_is_refused(
    kind: str, there: dict[str, Any], settings: dict[str, Any], sentence: str
) -> None:
    told = {**SERVER, **settings}
    place = told["directory"]
    node = {"files": {place: {**ABSENT, "kind": kind}}, "mounts": {place: {**FREE, **there}}}
    said = problems("nfs", node, **told)
    assert sentence in said if sentence else said == ""


FILTERS = tree.module("roles/nfs/filter_plugins/nfs.py")
OPTIONS = "rw,sync,wdelay,hide,nocrossmnt,secure,root_squash,no_all_squash,subtree_check,secure_locks,sec=sys"
ONE, TWO = (f"/srv/aura\t192.168.50.{last}({OPTIONS})\n" for last in (21, 22))
ONLY_4 = "-3 +4 +4.1 +4.2\n"


@pytest.mark.parametrize(
    ("etab", "versions", "difference"),
    [
        (ONE + TWO, ONLY_4, ""),
        (f"/home\t*(ro)\n{TWO}{ONE}", "-2 -3 +4 +4.1 +4.2\n", ""),
        ("", ONLY_4, "it is exported to nobody"),
        (ONE, ONLY_4, "it is exported to 192.168.50.21("),
        (f"/srv/aura\t*({OPTIONS})\n{ONE}{TWO}", ONLY_4, "it is exported to *("),
        (ONE + TWO.replace("root_squash", "no_root_squash"), ONLY_4, "it is exported to"),
        ((ONE + TWO).replace("aura", "aura2"), ONLY_4, "it is exported to nobody"),
        (ONE + TWO, "+3 +4 +4.1 +4.2\n", "serves the versions +3"),
        (ONE + TWO, "", "serves nothing"),
    ],
)
def test_what_the_kernel_exports_is_compared(etab: str, versions: str, difference: str) -> None:
    seen = {"texts": {"/var/lib/nfs/etab": etab, "/proc/fs/nfsd/versions": versions}}
    wanted = says("nfs", "__nfs_options")
    said = FILTERS.nfs_exported_otherwise(seen, "/srv/aura", CLIENTS, wanted)
    assert said.startswith(difference) or difference in said if difference else said == ""


# --- what is taken back ----------------------------------------------------------------------------

EXPORTS, LOOKS_AFTER = "/etc/exports.d/aura.exports", "/etc/systemd/system/aura-shared-directory.service"
OWN_EXPORTS = "/etc/exports"
SERVED = {EXPORTS: "# Written by Ansible\n/srv/aura 192.168.50.21(rw)\n"}
MOUNTED = {LOOKS_AFTER: "ExecStart=/usr/local/lib/aura/shared-directory /srv/old-files 192.168.50.20 2049\n"}


def taken_back(texts: dict[str, str], etab: str = "", masked: bool = False) -> list[str]:
    """What remove.yml does on a node with these files of ours; masked: whether rpcbind and the like are."""
    known = variables_of("nfs")
    kept = [EXPORTS, LOOKS_AFTER, known["__nfs_credentials"]]
    seen: dict[str, Any] = {
        "files": {path: {**ABSENT, "kind": "file"} if path in texts else ABSENT for path in kept},
        "texts": {**dict.fromkeys([*kept, OWN_EXPORTS], ""), **texts, "/var/lib/nfs/etab": etab},
        "units": {name: MASKED if masked else UNIT for name in known["__nfs_old_versions"]},
    }
    known |= {
        "__nfs_seen": seen,
        "__nfs_others": FILTERS.nfs_others(etab, *(seen["texts"][path] for path in (OWN_EXPORTS, EXPORTS))),
    }
    done = []
    for task in loaded("roles/nfs/tasks/remove.yml"):
        # In place of a loop its first one.
        variables = known | task.get("vars", {}) | {"item": known["__nfs_old_versions"][0]}
        unit, unmounts = task.get("unit"), "unmount.yml" in task.values()
        if not (unit or unmounts) or not filled_in(f"{{{{ {task['when']} }}}}", variables):
            continue
        if unit:
            done.append(f"{unit.get('state', 'started')} {filled_in(unit['name'], variables)}")
        else:
            done.append(filled_in("{{ __nfs_mount_unit }}", variables))
    return done


@pytest.mark.parametrize("etab", ["", ONE, "/home\t*(ro)\n"])
@pytest.mark.parametrize("masked", [False, True])
def test_an_nfs_server_that_we_have_not_started_goes_on(etab: str, masked: bool) -> None:
    assert taken_back({}, etab, masked=masked) == []


def test_what_was_shared_is_not_any_more() -> None:
    free, stopped = "stopped rpcbind.service", "stopped nfs-server.service"
    assert taken_back(SERVED, ONE + TWO, masked=True) == [free, stopped]
    assert taken_back(SERVED, ONE + TWO) == [stopped], "somebody has them in use again"
    assert taken_back(SERVED, f"{ONE}/home\t*(ro)\n") == ["started nfs-server.service"]
    # A server that is down at the moment
    assert taken_back(SERVED | {OWN_EXPORTS: "# mine\n/home *(ro)\n"}) == ["started nfs-server.service"]
    assert taken_back(SERVED | {OWN_EXPORTS: "# /home *(ro)\n"}) == [stopped]
    # Where it was mounted, not where it would be now; for SMB nothing was masked.
    mount = r"srv-old\x2dfiles.mount"
    assert taken_back(MOUNTED, masked=True) == [free, mount]
    assert taken_back(MOUNTED | {"/etc/aura-shared-directory.credentials": ""}, masked=True) == [mount]


# --- the clients -----------------------------------------------------------------------------------

SOURCE = "192.168.50.20:/srv/aura"
CLIENT: dict[str, Any] = {"client_enabled": True, "directory": "/srv/aura", "source": SOURCE}
OTHER = {"mounted": True, "source": "192.168.50.9:/old", "type": "nfs4", "empty": False}
SMB: dict[str, Any] = {"source": "//nas/aura", "smb_user": "aura", "smb_password": "secret"}


@pytest.mark.parametrize(
    ("mount", "settings", "sentence"),
    [
        ({}, {}, ""),
        ({}, {"source": "nas.home:/volume1/aura"}, ""),
        ({}, SMB, ""),
        ({**OTHER, "source": SOURCE}, {}, ""),
        ({**OTHER, "ours": True}, {}, ""),
        (OTHER, {}, "192.168.50.9:/old is mounted at /srv/aura there"),
        ({"empty": False}, {}, "there is something in /srv/aura, which would be hidden"),
        ({}, {"source": "192.168.50.20"}, "which is neither NFS"),
        # All that is wrong is said.
        ({"empty": False}, {"source": "nowhere"}, "which is neither NFS"),
        ({"empty": False}, {"source": "nowhere"}, "which would be hidden"),
        ({}, {"source": "192.168.50.20:/srv/my files"}, "which is neither NFS"),
        ({}, {"source": "//nas/aura/"}, "which is neither NFS"),
        ({}, {"source": "//nas/%h"}, "which is neither NFS"),
        ({}, {"directory": "/usr/share"}, SYSTEM),
        ({}, {**SMB, "smb_password": ""}, "wants to know who we are"),
        ({}, {**SMB, "smb_user": "a\nb"}, "has a line break in it"),
    ],
)
def test_what_would_be_no_good_mount_is_refused(
    mount: dict[str, Any], settings: dict[str, Any], sentence: str
) -> None:
    told = {**CLIENT, **settings}
    files = MOUNT_FILE if mount.get("ours") else {}
    said = problems("nfs", {"mounts": {told["directory"]: {**FREE, **mount}}, "files": files}, **told)
    assert sentence in said if sentence else said == ""
    assert "secret" not in said


def test_it_does_not_go_under_a_script_that_runs() -> None:
    off: dict[str, Any] = {"source": "nowhere", "clients": []}
    files = {LOOKS_AFTER: {**ABSENT, "kind": "file"}}
    running, ended = ({"aura-script.service": {**UNIT, "active": active}} for active in (True, False))
    assert "script runs there" in problems("nfs", {"files": files, "units": running}, **off)
    assert problems("nfs", {"files": files, "units": ended}, **off) == ""
    text = "ExecStart=shared-directory /srv/aura 192.168.50.20 2049\n"
    seen = {"files": files, "units": running, "texts": {LOOKS_AFTER: text}}
    for place, source, refused in (
        ("/srv/files", "192.168.50.20:/srv/files", True),
        ("/srv/aura", "//nas/aura", True),
        ("/srv/aura", "192.168.50.21:/srv/aura", False),
    ):
        told = CLIENT | {"directory": place, "source": source}
        assert ("script runs there" in problems("nfs", seen | {"mounts": {place: FREE}}, **told)) is refused
    nothing = {"files": {LOOKS_AFTER: ABSENT}, "units": running}
    assert problems("nfs", nothing, **off) == "", "a node that shares nothing"


def test_names_follow_from_what_is_mounted() -> None:
    smb = {"nfs_source": "//nas/aura", "nfs_directory": "/srv/nas-files", "nfs_smb_password": "secret"}
    assert says("nfs", "__nfs_mount_file", **smb) == r"/etc/systemd/system/srv-nas\x2dfiles.mount"
    assert [FILTERS.nfs_host(source) for source in ("//nas/aura", SOURCE)] == ["nas", "192.168.50.20"]
    mount = says("nfs", "lookup('ansible.builtin.template', 'shared-directory.mount.j2')", **smb)
    assert "soft,credentials=/etc/aura-shared-directory.credentials,uid=aura" in mount
    assert "secret" not in mount


@pytest.mark.parametrize(
    ("place", "source", "moves"),
    [
        ("/srv/aura", "192.168.50.21:/srv/aura", False),  # another server
        ("/srv/files", "192.168.50.20:/srv/files", True),
        ("/srv/aura", "//nas/aura", True),
        ("/srv", "192.168.50.20:/srv", True),
    ],
)
def test_what_is_mounted_elsewhere_from_now_on_is_let_go_first(place: str, source: str, moves: bool) -> None:
    text = "ExecStart=/usr/local/lib/aura/shared-directory /srv/aura 192.168.50.20 2049\nTimeoutStartSec=90\n"
    service = says("nfs", "__nfs_service")
    for kind, content, goes in (("file", text, moves), ("absent", "", False)):
        seen = {"files": {service: {"kind": kind}}, "texts": {service: content}}
        assert says("nfs", "__nfs_moves", __nfs_seen=seen, nfs_directory=place, nfs_source=source) is goes


@pytest.mark.parametrize(
    ("change", "right"),
    [({}, True), ({"source": "nas:/a"}, False), ({"options": ["rw", "nodev"]}, False), ({"mounted": False}, False)],
)  # fmt: skip
def test_a_mount_is_right_as_its_unit_says(change: dict[str, Any], right: bool) -> None:
    mount = FREE | {"mounted": True, "source": SOURCE, "options": ["rw", "nosuid", "nodev"]} | change
    for stale in (False, True):
        seen = {"mounts": {"/srv/aura": mount}, "units": {"srv-aura.mount": {**UNIT, "stale": stale}}}
        assert FILTERS.nfs_mounted(seen, "/srv/aura", SOURCE, "srv-aura.mount") is (right and not stale)


def test_numbers_that_differ_are_named() -> None:
    def node(shares: bool = True, **numbers: int) -> dict[str, Any]:
        users = {user: {"uid": uid, "gid": uid} for user, uid in numbers.items()}
        return {"users": users, "mounts": {"/srv/aura": FREE} if shares else {}, "files": {}}

    mine = node(ubuntu=1001)
    nodes = {
        "node0": node(aura=2500, ubuntu=1000), "node1": mine, "node2": node(shares=False, ubuntu=1002),
        "node3": node(aura=2500),
    }  # fmt: skip
    said = problems("nfs", mine, nodes, **{**CLIENT, "users": ["aura", "ubuntu"]})
    assert said.startswith("the user ubuntu has the numbers 1000:1000 on node0 and 1001:1001 on node1: ")
    assert problems("nfs", mine, nodes, **CLIENT) == ""


REFUSED = "mount.nfs4: access denied by server while mounting 127.0.0.1:/srv/aura"


@pytest.mark.parametrize(
    ("server", "said", "fails"),
    [
        pytest.param("", [], False, id="a NAS is off"),
        pytest.param("node0", [], False, id="the first node is off, and left out"),
        pytest.param("node1", [], True, id="a node of this play is silent"),
        pytest.param("", [REFUSED], True, id="it refuses, and was off a minute ago"),
    ],
)
def test_a_server_that_is_off_is_said_and_a_refusal_ends_the_run(
    tmp_path: Path, server: str, said: list[str], fails: bool
) -> None:
    """The node's program says the first, on a port where nobody listens."""
    off = subprocess.run(
        [tree.ROOT / "roles/nfs/files/shared-directory", "/srv/nothing", "127.0.0.1", "9"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name, text in {"systemctl": "", "journalctl": "\n".join([off.strip(), *said])}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (tmp_path / name).chmod(0o755)
    noop = "ansible.builtin.meta: noop"
    looks = {"node_state: {forget: true}": noop, "node_state: {role: nfs}": noop}
    roles = role_with(tmp_path, "nfs", looks | {"  register: __nfs_seen\n": ""})
    (roles / "nfs/filter_plugins").symlink_to(tree.ROOT / "roles/nfs/filter_plugins")
    told: dict[str, Any] = {
        "ansible_connection": "local", "ansible_become": False,
        "nfs_source": "127.0.0.1:/srv/aura", "nfs_server_node": server,
        "__nfs_seen": {"mounts": {"/srv/aura": FREE}},
    }  # fmt: skip
    prove: dict[str, Any] = {"ansible.builtin.import_role": {"name": "nfs", "tasks_from": "prove"}}
    after = {"ansible.builtin.debug": {"msg": "the roles that come after it"}}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    play = {"hosts": "all", "gather_facts": False, "tasks": [prove, after], "environment": path}
    done = played(tmp_path, [play], {"all": {"hosts": {"node1": told}}}, ANSIBLE_ROLES_PATH=str(roles))
    words = " ".join(done.stdout.split())
    assert (done.returncode != 0) is fails, words
    assert ("the roles that come after it" in words) is not fails, words
    sentence = "is not mounted at /srv/aura." if fails else "127.0.0.1 does not answer, so /srv/aura is not"
    assert f"node1: {'127.0.0.1:/srv/aura ' if fails else ''}{sentence}" in words
    assert (REFUSED in words) is (said != [])
