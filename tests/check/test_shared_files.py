"""What the roles about shared files make of what they see: pure expressions, without a node."""

from typing import Any

import pytest
from expressions import says

ABSENT = {"kind": "absent", "sha256": "", "mode": "", "owner": "", "group": "", "target": "", "mtime": 0.0}
UNIT = {
    "exists": True,
    "active": True,
    "enabled": True,
    "enabled_state": "enabled",
    "reload": False,
    "stale": False,
}
MASKED = {**UNIT, "active": False, "enabled": False, "enabled_state": "masked"}
FREE = {
    "mounted": False,
    "source": "/dev/sda2",
    "type": "ext4",
    "options": ["rw"],
    "empty": True,
    "used": False,
}


# --- the server ------------------------------------------------------------------------------------


def server(kind: str = "absent", etab: str = "", versions: str = "", **variables: Any) -> dict[str, Any]:
    directory = variables.setdefault("nfs_server_directory", "/srv/aura")
    variables.setdefault("nfs_server_clients", ["192.168.50.21", "192.168.50.22"])
    seen = {
        "files": {directory: {**ABSENT, "kind": kind}},
        "texts": {"/var/lib/nfs/etab": etab, "/proc/fs/nfsd/versions": versions},
    }
    return {**variables, "__nfs_server_seen": seen}


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (server(), ""),
        (server(kind="directory"), ""),
        (server(nfs_server_directory="/home/ubuntu/simpletuner/output"), ""),
        (server(nfs_server_clients=[]), "nfs_server_clients is empty"),
        (server(nfs_server_clients=["node1"]), "names node1, which is no IPv4 address"),
        (server(nfs_server_clients=["0.0.0.0/0"]), "names 0.0.0.0/0, which is no IPv4 address"),
        (server(nfs_server_directory="/etc/aura"), "/etc/aura belongs to the system"),
        (server(nfs_server_directory="/lib/systemd"), "/lib/systemd belongs to the system"),
        (server(nfs_server_directory="/var/lib/aura/runs"), "/var/lib/aura/runs belongs to the system"),
        (server(nfs_server_directory="/library/aura"), ""),
        (server(nfs_server_directory="/srv/my files"), "cannot be exported"),
        (server(nfs_server_directory="/srv"), "cannot be exported"),
        (server(nfs_server_directory="/home/ubuntu/../.."), "cannot be exported"),
        (server(kind="link"), "is a link there, and no directory"),
    ],
)
def test_what_would_be_no_good_server_is_refused(seen: dict[str, Any], sentence: str) -> None:
    said = says("nfs_server", "__nfs_server_problem", **seen)
    assert sentence in said if sentence else said == ""


OPTIONS = (
    "rw,sync,wdelay,hide,nocrossmnt,secure,root_squash,no_all_squash,no_subtree_check,secure_locks,sec=sys"
)


@pytest.mark.parametrize(
    ("etab", "exported"),
    [
        (f"/srv/aura\t192.168.50.21({OPTIONS})\n/srv/aura\t192.168.50.22({OPTIONS})\n", True),
        (f"/home\t*(ro)\n/srv/aura\t192.168.50.22({OPTIONS})\n/srv/aura\t192.168.50.21({OPTIONS})\n", True),
        ("", False),
        (f"/srv/aura\t192.168.50.21({OPTIONS})\n", False),
        (
            f"/srv/aura\t*({OPTIONS})\n/srv/aura\t192.168.50.21({OPTIONS})\n/srv/aura\t192.168.50.22({OPTIONS})\n",
            False,
        ),
        (
            f"/srv/aura\t192.168.50.21({OPTIONS})\n"
            f"/srv/aura\t192.168.50.22({OPTIONS.replace('root_squash', 'no_root_squash')})\n",
            False,
        ),
        (f"/srv/aura2\t192.168.50.21({OPTIONS})\n/srv/aura2\t192.168.50.22({OPTIONS})\n", False),
    ],
)
def test_what_the_kernel_exports_is_compared(etab: str, exported: bool) -> None:
    assert says("nfs_server", "__nfs_server_exported", **server(etab=etab)) is exported


@pytest.mark.parametrize(
    ("versions", "only"),
    [("-2 -3 +4 +4.1 +4.2\n", True), ("-3 +4 +4.1 +4.2\n", True), ("+3 +4 +4.1 +4.2\n", False), ("", False)],
)
def test_version_3_is_off(versions: str, only: bool) -> None:
    assert says("nfs_server", "__nfs_server_version_4_only", **server(versions=versions)) is only


# --- the clients -----------------------------------------------------------------------------------


def client(mount: dict[str, Any] | None = None, ours: bool = False, **variables: Any) -> dict[str, Any]:
    variables = {
        "nfs_client_source": "192.168.50.20:/srv/aura",
        "nfs_client_directory": "/srv/aura",
    } | variables
    unit = says("nfs_client", "__nfs_client_unit", **variables)
    seen = {
        "mounts": {variables["nfs_client_directory"]: {**FREE, **(mount or {})}},
        "units": {unit: {**UNIT, "exists": ours}},
        "files": {f"/etc/systemd/system/{unit}": {**ABSENT, "kind": "file" if ours else "absent"}},
    }
    return {**variables, "__nfs_client_seen": seen}


OTHER = {"mounted": True, "source": "192.168.50.9:/old", "type": "nfs4", "empty": False}
SMB: dict[str, Any] = {
    "nfs_client_source": "//nas/aura",
    "nfs_client_smb_user": "aura",
    "nfs_client_smb_password": "secret",
}


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (client(), ""),
        (client(nfs_client_source="nas.home:/volume1/aura"), ""),
        (client(**SMB), ""),
        (client(mount={**OTHER, "source": "192.168.50.20:/srv/aura"}), ""),
        (client(mount=OTHER, ours=True), ""),
        (client(mount=OTHER), "192.168.50.9:/old is mounted at /srv/aura there"),
        (client(mount={"empty": False}), "there is something in /srv/aura, which would be hidden"),
        (client(nfs_client_source="192.168.50.20"), "which is neither NFS"),
        (client(nfs_client_source="192.168.50.20:/srv/my files"), "which is neither NFS"),
        (client(nfs_client_source="//nas/aura/"), "which is neither NFS"),
        (client(nfs_client_source="//nas/%h"), "which is neither NFS"),
        (client(nfs_client_directory="/usr/share"), "would cover a directory of the system"),
        (client(nfs_client_directory="/srv"), "is no path to mount something at"),
        (client(**{**SMB, "nfs_client_smb_password": ""}), "wants to know who we are"),
        (client(**{**SMB, "nfs_client_smb_user": "a\nb"}), "has a line break in it"),
    ],
)
def test_what_would_be_no_good_mount_is_refused(seen: dict[str, Any], sentence: str) -> None:
    said = says("nfs_client", "__nfs_client_problem", **seen)
    assert sentence in said if sentence else said == ""
    assert "secret" not in said


def test_names_follow_from_what_is_mounted() -> None:
    smb = {**SMB, "nfs_client_directory": "/srv/nas-files"}
    assert says("nfs_client", "__nfs_client_unit", **smb) == r"srv-nas\x2dfiles.mount"
    assert says("nfs_client", "[__nfs_client_host, __nfs_client_port]", **smb) == ["nas", 445]
    nfs = {"nfs_client_source": "192.168.50.20:/srv/aura"}
    assert says("nfs_client", "[__nfs_client_host, __nfs_client_port]", **nfs) == ["192.168.50.20", 2049]
    assert "secret" not in says("nfs_client", "__nfs_client_options | join(',')", **smb)


def test_numbers_that_differ_are_named() -> None:
    def node(**numbers: int) -> dict[str, Any]:
        return {
            "__nfs_client_seen": {"users": {user: {"uid": uid, "gid": uid} for user, uid in numbers.items()}}
        }

    hosts = {
        "node0": node(aura=2500, ubuntu=1000),
        "node1": node(ubuntu=1001),
        "node2": {},
        "node3": node(aura=2500),
    }
    asked = {"nfs_client_users": ["aura", "ubuntu"], "hostvars": hosts, "ansible_play_hosts": list(hosts)}
    assert says("nfs_client", "__nfs_client_unequal", **asked) == [
        "the user ubuntu has the numbers 1000:1000 on node0 and 1001:1001 on node1"
    ]
    assert says("nfs_client", "__nfs_client_unequal", **{**asked, "nfs_client_users": ["aura"]}) == []


def test_who_reads_what_a_node_writes() -> None:
    hosts = {
        name: {"inventory_hostname": name, "nfs_client_enabled": name != "node2"}
        for name in ("node0", "node1", "node2", "node3")
    }
    asked = {"hostvars": hosts, "ansible_play_hosts": list(hosts), "nfs_client_source": "//nas/aura"}
    assert says("nfs_client", "__nfs_client_reader", **asked) == "node0"
    assert says("nfs_client", "__nfs_client_reader", **{**asked, "inventory_hostname": "node0"}) == "node1"
    alone = {**asked, "ansible_play_hosts": ["node1"]}
    assert says("nfs_client", "__nfs_client_reader", **alone) == "node1"
    assert says("nfs_client", "__nfs_client_reader", **asked, nfs_client_server_node="node2") == "node2"


# --- copies, and where data lie --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, ""),
        ({"run_copies_mount": "/srv/aura"}, ""),
        ({"run_copies_directory": "runs"}, "and no path of letters"),
        ({"run_copies_mount": "/mnt/nas"}, "which is not below /mnt/nas"),
        ({"run_copies_rate": -1}, "cannot be negative"),
    ],
)
def test_copies_have_a_place(variables: dict[str, Any], sentence: str) -> None:
    said = says("run_copies", "__run_copies_problem", **variables)
    assert sentence in said if sentence else said == ""


def data(directory: str, here: dict[str, Any], there: dict[str, Any], unit: str = "absent") -> dict[str, Any]:
    file = "/etc/systemd/system/var-lib-aura.mount"
    return {
        "base_data_directory": directory,
        "__base_data_text": "text",
        "__base_seen": {
            "mounts": {
                "/var/lib/aura": {**FREE, **here},
                **({directory: {**FREE, **there}} if directory != "/var/lib/aura" else {}),
            },
            "files": {file: {**ABSENT, "kind": "absent" if unit == "absent" else "file", "sha256": unit}},
        },
    }


OURS = "982d9e3eb996f559e633f4d194def3761d909f5a3b647d1a851fead67c32c9d1"  # SHA-256 of "text"


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (data("/var/lib/aura", {"used": True}, {}), ""),
        (data("/var/lib/aura", {"mounted": True}, {}), ""),  # a partition of its own
        (data("/mnt/ssd/aura", {}, {}), ""),
        (data("/mnt/ssd/aura", {"mounted": True}, {}, unit=OURS), ""),
        (data("ssd", {}, {}), "and no path of letters"),
        (
            data("/mnt/ssd/aura", {"used": True}, {}),
            "there are files in /var/lib/aura, which would be hidden",
        ),
        (
            data("/mnt/ssd/aura", {}, {"type": "exfat", "source": "/dev/sdb1"}),
            "lies on /dev/sdb1 (exfat), where files have no owners",
        ),
        (
            data("/mnt/nas/aura", {}, {"type": "nfs4", "source": "nas:/a"}),
            "training would wait for the network",
        ),
        (
            data("/mnt/ssd/aura", {"mounted": True}, {}, unit="other"),
            "/var/lib/aura is another directory there already",
        ),
        (data("/var/lib/aura", {"mounted": True}, {}, unit=OURS), "and data_directory does not say so"),
    ],
)
def test_data_have_a_place_and_nothing_is_hidden(seen: dict[str, Any], sentence: str) -> None:
    said = says("base", "__base_data_problem", **seen)
    assert sentence in said if sentence else said == ""
