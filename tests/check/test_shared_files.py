"""What the roles about shared files make of what they see: expressions, and the node's program on this machine."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tree
from expressions import filled_in, loaded, preflight_sentences, variables_of
from plays import played, role_with

PLACE = "it has to be an absolute path of at least two names"
SOURCE = "192.168.50.20:/srv/aura"
MOUNTED = [f"source={SOURCE}"]
BEFORE = ["before_unit=srv-aura.mount", "before=/srv/aura", f"before_source={SOURCE}"]
THEIRS = ["kind=directory", "owner=ubuntu", "filled=yes"]
SERVER: dict[str, Any] = {"nfs_server_enabled": True, "nfs_clients": ["192.168.50.21", "192.168.50.22"]}
CLIENT: dict[str, Any] = {"nfs_client_enabled": True, "nfs_source": SOURCE}
SMB: dict[str, Any] = CLIENT | {
    "nfs_source": "//nas/aura", "nfs_smb_user": "aura", "nfs_smb_password": "secret",
}  # fmt: skip


def read(lines: list[str]) -> dict[str, Any]:
    """What tasks/read.yml registers."""
    return {"__nfs_read": {"stdout": "\n".join(lines), "stdout_lines": lines}}


@pytest.mark.parametrize(
    ("there", "settings", "sentence"),
    [
        ([], SERVER, ""),
        (["kind=directory", "owner=aura", "filled=yes"], SERVER, ""),
        (["kind=directory", "owner=ubuntu"], SERVER, ""),  # empty
        (THEIRS, SERVER, "is /srv/aura, which is ubuntu's there and not empty"),
        (["source=/dev/sdb1", *THEIRS], SERVER, "which is ubuntu's"),
        (["kind=symbolic link", "owner=root"], SERVER, "is a symbolic link there, and no directory"),
        (["source=nas:/aura"], SERVER, "nas:/aura is mounted at /srv/aura there"),
        # Another PC's line has become the first one of hosts.yml.
        ([*MOUNTED, *BEFORE], SERVER, ""),
        ([], SERVER | {"nfs_clients": []}, "nfs_clients is empty"),
        ([], SERVER | {"nfs_clients": ["0.0.0.0/0"]}, "nfs_clients is 0.0.0.0/0"),
        ([], SERVER | {"nfs_directory": "/home/ubuntu"}, PLACE),
        ([], SERVER | {"nfs_directory": "/etc/aura"}, PLACE),
        ([], SERVER | {"nfs_directory": "/var/lib/nfs"}, PLACE),
        ([], SERVER | {"nfs_directory": "/library/aura"}, ""),
        ([], SERVER | {"nfs_directory": "/srv/my files"}, PLACE),
        ([], SERVER | {"nfs_directory": "/srv/aura/../.."}, PLACE),
        ([], CLIENT, ""),
        (MOUNTED, CLIENT, ""),
        (["source=nas:/old", *BEFORE], CLIENT, ""),
        (["source=nas:/old"], CLIENT, "nas:/old is mounted at /srv/aura there"),
        (THEIRS, CLIENT, "there is something in /srv/aura, which would be hidden"),
        ([*THEIRS, *BEFORE], CLIENT, "there is something in /srv/aura, which would be hidden"),
        ([], CLIENT | {"nfs_directory": "/usr/share"}, PLACE),
        ([], CLIENT | {"nfs_source": "nas.home:/volume1/aura"}, ""),
        # All that is wrong is said.
        (THEIRS, CLIENT | {"nfs_source": "nowhere"}, "which is neither NFS"),
        (THEIRS, CLIENT | {"nfs_source": "nowhere"}, "which would be hidden"),
        ([], CLIENT | {"nfs_source": "192.168.50.20:/srv/my files"}, "which is neither NFS"),
        ([], CLIENT | {"nfs_source": "//nas/aura/"}, "which is neither NFS"),
        ([], SMB, ""),
        ([], SMB | {"nfs_smb_password": ""}, "wants to know who we are"),
        # It does not go under a script that runs.
        ([*BEFORE, "script=yes"], {}, "a script runs there"),
        ([*BEFORE, "script=yes"], CLIENT | {"nfs_directory": "/srv/files"}, "a script runs there"),
        ([*BEFORE, "script=yes"], SMB, "a script runs there"),
        ([*MOUNTED, *BEFORE, "script=yes"], CLIENT, ""),
        (["script=yes"], {}, ""),
        (BEFORE, {}, ""),
    ],
)
def test_what_would_be_no_good_server_and_no_good_mount_is_refused(
    there: list[str], settings: dict[str, Any], sentence: str
) -> None:
    said = preflight_sentences("nfs", {"ansible_play_hosts": [], "hostvars": {}, **read(there)}, **settings)
    assert sentence in said if sentence else said == ""
    assert "secret" not in said


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, ""),
        ({"run_copies_keep": 3}, "run_copies_days, which is 7."),
        ({"run_copies_bucket": "bucket/runs"}, "it has to be like s3://bucket/directory."),
    ],
)
def test_settings_of_copies_that_mean_nothing_are_refused(settings: dict[str, Any], sentence: str) -> None:
    said = preflight_sentences("run_copies", {}, **settings)
    assert sentence in said if sentence else said == ""


@pytest.mark.parametrize(
    ("there", "settings", "goes"),
    [
        (["serves=yes"], SERVER, False),
        (["serves=yes"], CLIENT, True),
        (["serves=yes"], {}, True),
        (BEFORE, CLIENT, False),
        (BEFORE, SERVER, True),
        (BEFORE, CLIENT | {"nfs_directory": "/srv/files"}, True),
        (BEFORE, CLIENT | {"nfs_source": "192.168.50.21:/srv/aura"}, True),
        (BEFORE, SMB, True),
        ([], {}, False),
    ],
)
def test_what_is_not_shared_any_more_goes(there: list[str], settings: dict[str, Any], goes: bool) -> None:
    (task,) = (task for task in loaded("roles/nfs/tasks/main.yml") if task["name"].startswith("Remove"))
    known = variables_of("nfs") | read(there) | settings
    assert filled_in(f"{{{{ {task['when']} }}}}", known) is goes


REFUSED = "mount.nfs4: access denied by server while mounting 127.0.0.1:/srv/aura"
PROGRAM = tree.ROOT / "roles/nfs/files/shared-directory"


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
        [PROGRAM, "/srv/nothing", "127.0.0.1", "9"], capture_output=True, text=True, check=True
    )
    for name, text in {"systemctl": "", "journalctl": "\n".join([off.stdout.strip(), *said])}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (tmp_path / name).chmod(0o755)
    roles = role_with(tmp_path, "nfs", {})
    told: dict[str, Any] = {
        "ansible_connection": "local", "ansible_become": False,
        "nfs_source": "127.0.0.1:/srv/aura", "nfs_server_node": server,
    }  # fmt: skip
    verify: dict[str, Any] = {"ansible.builtin.import_role": {"name": "nfs", "tasks_from": "verify"}}
    after = {"ansible.builtin.debug": {"msg": "the roles that come after it"}}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    play = {"hosts": "all", "gather_facts": False, "tasks": [verify, after], "environment": path}
    done = played(tmp_path, [play], {"all": {"hosts": {"node1": told}}}, ANSIBLE_ROLES_PATH=str(roles))
    words = " ".join(done.stdout.split())
    assert (done.returncode != 0) is fails, words
    assert ("the roles that come after it" in words) is not fails, words
    sentence = "is not mounted at /srv/aura." if fails else "127.0.0.1 does not answer, so /srv/aura is not"
    assert f"node1: {'127.0.0.1:/srv/aura ' if fails else ''}{sentence}" in words
    assert (REFUSED in words) is (said != [])


def mounts_are_ours() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
        ).returncode
    )


@pytest.mark.skipif(not mounts_are_ours(), reason="no right to mount here")
@pytest.mark.parametrize("silent", [0, 5, 60], ids=["never", "for five seconds", "for good"])
def test_a_mount_goes_when_its_server_is_silent_for_good(tmp_path: Path, silent: int) -> None:
    """A file system in memory stands for NFS, in a namespace of its own; the port and umount are real."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))  # refuses until it listens
        port = server.getsockname()[1]
        if not silent:
            server.listen()
        script = 'mount -t tmpfs none "$1"; "$@"; mountpoint --quiet "$2" && echo still mounted'
        began = time.monotonic()
        looking = subprocess.Popen(
            ["unshare", "--mount", "bash", "-c", script.replace('"$1"', '"$2"'), "-", PROGRAM, tmp_path,
             "127.0.0.1", str(port)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if 0 < silent < 60:
            time.sleep(silent)
            server.listen()
        said, _ = looking.communicate(timeout=90)
    assert ("still mounted" in said) is (silent < 60), said
    assert ("is unmounted" in said) is (silent == 60), said
    assert time.monotonic() - began < 30
