"""What the roles about shared files make of what they see: pure expressions, without a node."""

from typing import Any

import pytest
import tree
import yaml
from expressions import filled_in, problems, says

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
    "where": "/",
    "owner": "",
    "empty": True,
    "used": False,
}
HOME = "lies in somebody's home. Homes are closed to others"
SYSTEM = "which belongs to the system"
THEIRS = {"owner": "ubuntu", "empty": False}
OURS_THERE = {"owner": "aura", "empty": False}


# --- the server ------------------------------------------------------------------------------------


def server(
    kind: str = "absent",
    etab: str = "",
    versions: str = "",
    there: dict[str, Any] | None = None,
    **variables: Any,
) -> dict[str, Any]:
    directory = variables.setdefault("nfs_server_directory", "/srv/aura")
    variables.setdefault("nfs_server_clients", ["192.168.50.21", "192.168.50.22"])
    seen = {
        "files": {directory: {**ABSENT, "kind": kind}},
        "mounts": {directory: {**FREE, **(there or {})}},
        "texts": {"/var/lib/nfs/etab": etab, "/proc/fs/nfsd/versions": versions},
    }
    return {**variables, "__nfs_server_seen": seen}


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (server(), ""),
        (server(kind="directory"), ""),
        (server(kind="directory", there=OURS_THERE), ""),
        (server(kind="directory", there={"owner": "ubuntu"}), ""),  # empty
        (server(kind="directory", there=THEIRS), "is /srv/aura, which is ubuntu's there and not empty"),
        (
            server(kind="directory", there={"mounted": True, "owner": "root", "empty": False}),
            "which is root's",
        ),
        (server(nfs_server_directory="/home/ubuntu"), HOME),
        (server(nfs_server_directory="/home/ubuntu/simpletuner/output"), HOME),
        (server(nfs_server_clients=[]), "nfs_server_clients is empty"),
        (server(nfs_server_clients=["node1"]), "names node1, which is no IPv4 address"),
        (server(nfs_server_clients=["0.0.0.0/0"]), "names 0.0.0.0/0, which is no IPv4 address"),
        (server(nfs_server_directory="/etc/aura"), SYSTEM),
        (server(nfs_server_directory="/lib/systemd"), SYSTEM),
        (server(nfs_server_directory="/var/lib/aura/runs"), SYSTEM),
        (server(nfs_server_directory="/var/lib/nfs"), SYSTEM),
        (server(nfs_server_directory="/library/aura"), ""),
        (server(nfs_server_directory="/homes/aura"), ""),
        (server(nfs_server_directory="/srv/my files"), "no absolute path of at least two names"),
        (server(nfs_server_directory="/srv"), "no absolute path of at least two names"),
        (server(nfs_server_directory="/srv/aura/../.."), "no absolute path of at least two names"),
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


@pytest.mark.parametrize(
    ("written", "started", "old"),
    [(100.0, 200.0, False), (200.0, 100.0, True), (900.0, 100.0, False)],  # the last: the clock was set since
)
def test_a_server_that_has_not_read_its_settings_is_seen(written: float, started: float, old: bool) -> None:
    """Who says --tags configure writes them and starts nothing; the next run finishes that."""
    seen = {
        "files": {"/etc/nfs.conf.d/aura.conf": {**ABSENT, "kind": "file", "mtime": written}},
        "units": {"nfs-server.service": {**UNIT, "started": started}},
        "now": 500.0,
    }
    assert says("nfs_server", "__nfs_server_settings_are_old", __nfs_server_seen=seen) is old


@pytest.mark.parametrize("directory", ["", "/srv/aura", "/home/ubuntu/simpletuner/output"])
def test_a_shared_directory_that_cannot_be_is_refused_before_the_first_packet(directory: str) -> None:
    said = says("inventory_check", "__inventory_check_shared", inventory_check_shared_directory=directory)
    assert [HOME in sentence for sentence in said] == ([True] if "home" in directory else [])


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
        (client(nfs_client_directory="/usr/share"), SYSTEM),
        (client(nfs_client_directory="/home/ubuntu/simpletuner/output"), HOME),
        (client(nfs_client_directory="/srv"), "no absolute path of at least two names"),
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
        ({"run_copies_directory": "runs"}, "no absolute path of at least two names"),
        ({"run_copies_directory": "/home/ubuntu/runs"}, HOME),
        ({"run_copies_mount": "/mnt/nas"}, "which is not below /mnt/nas"),
        ({"run_copies_rate": -1}, "cannot be negative"),
    ],
)
def test_copies_have_a_place(variables: dict[str, Any], sentence: str) -> None:
    said = says("run_copies", "__run_copies_problem", **variables)
    assert sentence in said if sentence else said == ""


UNIT_FILE = "/etc/systemd/system/var-lib-aura.mount"


def data(directory: str, here: dict[str, Any], there: dict[str, Any], unit: str = "") -> dict[str, Any]:
    """unit: the text of our mount unit, as far as it matters."""
    return {
        "data_directory": directory,
        "node": {
            "taken": [], "users": {}, "groups": {},
            "mounts": {"/var/lib/aura": {**FREE, **here}}
            | ({directory: {**FREE, **there}} if directory != "/var/lib/aura" else {}),
            "files": {"/var/lib/aura/corpora": ABSENT, "/var/lib/aura/runs": ABSENT}
            | {UNIT_FILE: {**ABSENT, "kind": "file" if unit else "absent"}},
            "texts": {UNIT_FILE: unit},
        },
    }  # fmt: skip


OURS = "What=/mnt/ssd/aura\n"
ON_SSD = f"AssertPathIsMountPoint=/mnt/ssd\n{OURS}"


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (data("/var/lib/aura", {"used": True}, {}), ""),
        (data("/var/lib/aura", {"mounted": True}, {}), ""),  # a partition of its own
        (data("/mnt/ssd/aura", {}, {}), ""),
        (data("/mnt/ssd/aura", {"mounted": True}, {}, unit=OURS), ""),  # as roles before wrote it
        (data("/mnt/ssd/aura", {"mounted": True}, {**OURS_THERE, "where": "/mnt/ssd"}, unit=ON_SSD), ""),
        (data("/mnt/ssd/aura", {}, OURS_THERE), ""),
        (data("/mnt/ssd/aura", {}, {"owner": "2500", "empty": False}), ""),  # its user is not there yet
        (data("/mnt/ssd/aura", {}, THEIRS), "which is ubuntu's there and not empty"),
        (data("ssd", {}, {}), "no absolute path of at least two names"),
        (data("/home/ubuntu", {}, THEIRS), HOME),
        (data("/home/ubuntu/data", {}, {}), HOME),
        (data("/var/lib", {}, {"owner": "root", "empty": False}), SYSTEM),
        (data("/etc/ssh", {}, {"owner": "root", "empty": False}), SYSTEM),
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
            data("/mnt/ssd/aura", {"mounted": True}, {}, unit="What=/mnt/ssd/aura2\n"),
            "/var/lib/aura is another directory there already",
        ),
        (data("/var/lib/aura", {"mounted": True}, {}, unit=OURS), "and data_directory does not say so"),
        (  # booted without its disk: nothing is made in its place
            data("/mnt/ssd/aura", {"used": True}, {"where": "/"}, unit=ON_SSD),
            "lay in the file system at /mnt/ssd, and now lies in the one at /. Is its disk off?",
        ),
    ],
)
def test_data_have_a_place_and_nothing_is_hidden(seen: dict[str, Any], sentence: str) -> None:
    said = problems("base", **seen)
    assert sentence in said if sentence else said == ""


def test_data_are_not_mounted_without_their_disk() -> None:
    """systemd makes the source of a bind mount itself; a condition in place of an assertion would let ranks start."""
    text = (tree.ROOT / "roles/base/templates/var-lib-aura.mount.j2").read_text()
    unit = filled_in(
        text,
        {
            "base_data_directory": "/mnt/ssd/aura",
            "__base_seen": {"mounts": {"/mnt/ssd/aura": {"where": "/mnt/ssd"}}},
        },
    )
    assert "AssertPathIsMountPoint=/mnt/ssd\n" in unit
    assert "AssertPathIsDirectory=/mnt/ssd/aura\n" in unit
    # The role knows its own unit again.
    assert problems("base", **data("/mnt/ssd/aura", {}, {"where": "/"}, unit=unit)) != ""


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        ({"taken": [{"kind": "user", "name": "ubuntu", "number": 2500}]}, "already: user ubuntu 2500 (name"),
        ({"users": {"aura": {"uid": 998}}, "groups": {"aura": 997}}, "user aura 998; group aura 997 (name"),
        ({"users": {"aura": {"uid": 2500}}, "groups": {"aura": 2500}}, ""),
    ],
)
def test_nobody_else_is_the_service_user(seen: dict[str, Any], sentence: str) -> None:
    said = problems("base", data("/var/lib/aura", {}, {})["node"] | seen)
    assert sentence in said if sentence else said == ""


# --- what comes back --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "masked", "variables"),
    [
        ("nfs_server", "__nfs_server_masked", {}),
        ("nfs_client", "__nfs_client_masked", {"nfs_client_source": "192.168.50.20:/srv/aura"}),
    ],
)
def test_a_unit_that_is_masked_comes_back_with_a_reset(
    role: str, masked: str, variables: dict[str, Any]
) -> None:
    """A mask is a link in /etc/systemd/system: reset.yml takes it away if the role says that it makes it."""
    makes = yaml.safe_load((tree.ROOT / f"roles/{role}/meta/look.yml").read_text())["makes"]
    links = {f"/etc/systemd/system/{unit}" for unit in says(role, masked, **variables)}
    assert links
    assert links <= set(says(role, makes.strip().removeprefix("{{").removesuffix("}}"), **variables))


def test_the_drivers_packages_are_kept_as_ours() -> None:
    """For the list of reset.yml; at the first look of all it is not known yet which they are."""
    packages = yaml.safe_load((tree.ROOT / "roles/nvidia_driver/meta/look.yml").read_text())["packages"]
    assert filled_in(packages, {}) == []
    decided = {"nvidia_driver_decision": {"packages": ["nvidia-utils-580"]}}
    assert filled_in(packages, decided) == ["nvidia-utils-580"]
