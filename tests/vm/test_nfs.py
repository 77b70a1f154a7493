"""Two PCs share files over NFS, and nothing waits for the server: off, rebooted and on."""

from __future__ import annotations

import re
import shlex
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from clusters import VirtualCluster
from machines import ROOT, Machine, wait_for

pytestmark = [pytest.mark.more, pytest.mark.timeout(7200)]

SHARE = "/srv/aura"
READY = "shared"  # the snapshot after site.yml
# An emulated machine takes seconds for what a PC does at once; a dead mount would hold it up for minutes or for ever.
PATIENCE = 120


@dataclass
class Shared:
    server: Machine
    client: Machine
    cluster: VirtualCluster

    def mounted(self) -> bool:
        return f" {SHARE} " in self.client.exec("cat /proc/self/mountinfo")

    def settings(self, **more: object) -> None:
        """Written into the inventory, for both."""
        own: dict[str, object] = {"shared_directory": SHARE, "run_copies_leave_free": 1, **more}
        self.cluster.write(**{machine.name: own for machine in (self.server, self.client)})

    def look(self) -> str:
        """What the client says when it looks after its mount."""
        self.client.exec("systemctl start aura-shared-directory.service", limit=PATIENCE)
        return self.client.exec("journalctl -u aura-shared-directory.service -n 3 -o cat")


@pytest.fixture(scope="module")
def provisioned(vm: Callable[..., Machine], tmp_path_factory: pytest.TempPathFactory) -> Shared:
    server, client = vm(number=0), vm(number=1)
    shared = Shared(server, client, VirtualCluster([server, client], tmp_path_factory.mktemp("nfs")))
    for machine in (server, client):
        machine.wait_ssh()
    shared.settings()
    shared.cluster.bootstrap()
    shared.cluster.site()
    for machine in (server, client):
        machine.exec("sync")
        machine.snapshot(READY)
    return shared


@pytest.fixture
def shared(provisioned: Shared) -> Shared:
    """Both as they were after site.yml, with the directory mounted."""
    for machine in (provisioned.server, provisioned.client):
        machine.restore(READY)
        machine.wait_ssh(provisioned.cluster.final(machine))
    provisioned.settings()
    wait_for("the directory is mounted", lambda: provisioned.look() and provisioned.mounted(), 300)
    return provisioned


def as_aura(command: str) -> str:
    return f"runuser -u aura -- sh -c {shlex.quote(command)}"


def takes(machine: Machine, command: str) -> float:
    """Seconds until a command has ended, well or not."""
    began = time.monotonic()
    machine.exec(f"{command}; true", limit=3 * PATIENCE)
    return time.monotonic() - began


def test_what_is_shared_how_and_with_whom(shared: Shared) -> None:
    server, client = shared.server, shared.client
    mount = client.exec(f"grep ' {SHARE} ' /proc/self/mountinfo")
    assert f"{shared.cluster.final(server)}:{SHARE}" in mount
    for option in ("nosuid", "nodev", "vers=4.2", "softerr"):
        assert option in mount
    client.exec(as_aura(f"echo from the client >{SHARE}/a"))
    assert server.exec(f"stat --format %U {SHARE}/a; cat {SHARE}/a") == "aura\nfrom the client\n"
    server.exec(as_aura(f"echo from the server >{SHARE}/b"))
    assert client.exec(f"cat {SHARE}/b") == "from the server\n"
    # root of the client is nobody.
    assert "denied" in client.exec(f"touch {SHARE}/root 2>&1", check=False)

    # One port, for the client only.
    for machine in (server, client):
        listening = machine.exec("ss -Hltnu | awk '{print $5}'")
        assert ":111\n" not in listening
        assert machine.exec("systemctl is-enabled rpcbind.socket", check=False).strip() == "masked"
    assert server.exec("cat /proc/fs/nfsd/versions").split()[0] == "-3"
    exported = [line.split()[1] for line in server.exec("cat /var/lib/nfs/etab").splitlines()]
    assert [text.partition("(")[0] for text in exported] == [shared.cluster.final(client)]
    with pytest.raises(OSError, match="timed out"):  # we are an administrator, and no node
        socket.create_connection((shared.cluster.final(server), 2049), timeout=10)

    assert "changed=0" in shared.cluster.share()
    assert not re.search("changed=[1-9]", shared.cluster.site("--check"))
    server.exec("exportfs -ua")
    client.exec("systemctl stop aura-shared-directory.timer srv-aura.mount")
    assert len(re.findall("changed=[1-9]", shared.cluster.share("--check"))) == 2
    shared.cluster.share()
    assert shared.mounted()
    assert not re.search("changed=[1-9]", shared.cluster.share())


def test_nothing_waits_for_a_server_that_is_off(shared: Shared) -> None:
    server, client = shared.server, shared.client
    files = ("service/templates/closed.j2", "trainer/templates/walls.j2")
    lines = "".join((ROOT / "roles" / file).read_text() for file in files).splitlines(keepends=True)
    walls = "".join(line for line in lines if "lookup(" not in line) + "ReadWritePaths=/var/lib/aura\n"
    before = (ROOT / "roles/trainer/templates/rank.j2").read_text().partition("[Service]")[0]
    rank = f"{before}[Service]\nType=oneshot\nUser=aura\nExecStart=/bin/true\n{walls}"
    client.exec(
        f"printf %s {shlex.quote(rank)} >/etc/systemd/system/aura-train@.service; systemctl daemon-reload"
    )
    client.exec(f"timeout 60 ls {SHARE}")
    server.power_off()

    # The mount is dead and nobody has looked yet: a rank starts all the same.
    assert shared.mounted()
    assert takes(client, "systemctl start aura-train@0.service") < PATIENCE
    assert client.exec("systemctl show -p Result --value aura-train@0.service").strip() == "success"
    assert not shared.mounted()
    said = shared.look()
    assert f"{shared.cluster.final(server)} does not answer (port 2049)" in said
    assert takes(client, "df; ls -la /srv/aura") < PATIENCE
    assert "ansible_mounts" in shared.cluster.facts(client)
    assert client.exec("systemctl --failed --no-legend --plain").strip() == ""

    # It boots without the server, and does not even call that a failure.
    client.reboot()
    client.wait_ssh(shared.cluster.final(client))
    wait_for(
        "it has looked",
        lambda: "does not answer" in client.exec("journalctl -b -u aura-shared-directory -o cat"),
    )
    assert client.exec("systemctl is-system-running --wait", check=False, limit=600).strip() == "running"

    # When the server is back, so is the directory, by itself.
    server.power_on()
    server.wait_ssh(shared.cluster.final(server))
    wait_for("the directory is mounted", shared.mounted, 600)
    client.exec(as_aura(f"echo again >{SHARE}/again"))


def test_a_link_that_fails_for_a_moment_unmounts_nothing(shared: Shared) -> None:
    client = shared.client
    client.exec("systemctl stop aura-copy-runs.timer aura-shared-directory.timer")
    client.exec(as_aura(f"echo mine >{SHARE}/mine"))
    client.exec(
        "nft 'add table inet cable; add chain inet cable out { type filter hook output priority 0; };"
        " add rule inet cable out tcp dport 2049 drop'; systemctl start --no-block aura-shared-directory.service;"
        " sleep 8; nft delete table inet cable"
    )
    client.wait_inside("test $(systemctl is-active aura-shared-directory.service) = inactive")
    said = client.exec("journalctl -u aura-shared-directory.service -n 5 -o cat")
    assert shared.mounted(), said
    assert "is unmounted" not in said
    assert client.exec(f"timeout 60 cat {SHARE}/mine") == "mine\n"


def test_a_shutdown_does_not_wait_for_the_server(shared: Shared) -> None:
    """With a file open there, and written to."""
    server, client = shared.server, shared.client
    client.exec("systemctl stop aura-shared-directory.timer")
    client.exec(f"systemd-run -u writer -p User=aura sh -c 'while :; do date; sleep 1; done >{SHARE}/log'")
    client.wait_inside(f"test -s {SHARE}/log")
    server.power_off()
    before = client.boot_id()
    client.reboot(wait=False)  # returns when the new boot has begun
    client.wait_ssh(shared.cluster.final(client))
    assert client.boot_id() != before


def test_the_server_reboots_under_the_client(shared: Shared) -> None:
    server, client = shared.server, shared.client
    client.exec(as_aura(f"echo before >{SHARE}/before"))
    server.reboot()
    server.wait_ssh(shared.cluster.final(server))
    reads = f"timeout 30 cat {SHARE}/before"
    wait_for("the client reads it again", lambda: client.exec(reads, check=False) == "before\n", 600)
    wait_for(
        "the client writes again",
        lambda: client.exec(
            as_aura(f"timeout 60 sh -c 'echo after >{SHARE}/after'") + " && echo written", check=False
        ),
        600,
    )
    assert server.exec(f"cat {SHARE}/after") == "after\n"


def test_what_lies_there_is_never_hidden(shared: Shared) -> None:
    client = shared.client
    # The copies of runs ask for the mount, too.
    client.exec("systemctl stop aura-copy-runs.timer aura-shared-directory.timer srv-aura.mount")
    client.exec(f"echo mine >{SHARE}/mine")
    assert "would be hidden" in client.exec(
        "systemctl start aura-shared-directory.service; journalctl -u aura-shared-directory -n 8 -o cat"
    )
    client.exec("systemctl start srv-aura.mount", check=False)
    assert not shared.mounted()
    refused = " ".join(shared.cluster.share(expect=1).split())
    assert f"there is something in {SHARE}, which would be hidden" in refused
    client.exec(f"rm {SHARE}/mine")
    shared.cluster.share()
    assert shared.mounted()


def test_a_mount_that_the_server_refuses_says_why(shared: Shared) -> None:
    """The commonest of all: a wrong path. What mount said of it is in the playbook's last words."""
    source = f"{shared.cluster.final(shared.server)}:/srv/nowhere"
    shared.settings(shared_source=source, shared_directory="/srv/refused")
    said = " ".join(shared.cluster.share(expect=1).split())
    sentence = rf"{shared.client.name}: {source} is not mounted at /srv/refused\. "
    assert re.search(rf"{sentence}[^{{}}]*mount\.nfs4: mounting {source} failed", said), said[-3000:]
    assert "Unable to start service" not in said


def test_another_pc_becomes_the_server(shared: Shared) -> None:
    """Its line is the first one of hosts.yml now. What the one before has goes nowhere by itself."""
    first, second, cluster = shared.server, shared.client, shared.cluster
    first.exec(as_aura(f"echo old >{SHARE}/a"))
    cluster.machines = [second, first]
    try:
        shared.settings()
        refused = " ".join(cluster.share(expect=1).split())
        assert f"there is something in {SHARE}, which would be hidden" in refused
        first.exec(f"mv {SHARE} {SHARE}.local")
        cluster.share()
        assert f"{cluster.final(second)}:{SHARE}" in first.exec(f"grep ' {SHARE} ' /proc/self/mountinfo")
        assert not shared.mounted()
        for machine, left in (
            (first, "/etc/exports.d/aura.exports"),
            (second, "/etc/systemd/system/srv-aura.mount"),
        ):
            assert machine.exec(f"ls {left} 2>&1", check=False).strip().endswith("No such file or directory")
        second.exec(as_aura(f"echo new >{SHARE}/a"))
        assert first.exec(f"cat {SHARE}/a {SHARE}.local/a") == "new\nold\n"
        again = cluster.share("--diff")
        assert not re.search("changed=[1-9]", again), again
    finally:
        cluster.machines = [first, second]


def test_it_goes_when_it_is_switched_off(shared: Shared) -> None:
    shared.settings(shared_directory="")
    assert len(re.findall("changed=[1-9]", shared.cluster.share("--check"))) == 2
    shared.cluster.share()
    assert not shared.mounted()
    assert shared.server.exec("cat /var/lib/nfs/etab") == ""
    for machine, unit in ((shared.server, "nfs-server"), (shared.client, "aura-shared-directory.timer")):
        assert machine.exec(f"systemctl is-active {unit}", check=False).strip() == "inactive"
    for machine in (shared.server, shared.client):
        assert machine.exec("systemctl is-enabled rpcbind.socket", check=False).strip() != "masked"
        assert machine.exec("ls /etc/systemd/system | grep aura-copy-runs", check=False) == ""
    assert not re.search("changed=[1-9]", shared.cluster.share())


def test_checkpoints_are_copied_and_survive_a_server_that_goes(shared: Shared) -> None:
    server, client = shared.server, shared.client
    checkpoint = "/var/lib/aura/runs/first/checkpoints/checkpoint-step-100"
    client.exec(as_aura(f"mkdir -p {checkpoint} /var/lib/aura/runs/first/rank-0"))
    client.exec(as_aura("touch /var/lib/aura/runs/first/rank-0/status.json"))
    client.exec(as_aura(f"python3 -c {shlex.quote(CHECKPOINT)} {checkpoint}"))
    # Slowly enough to be interrupted.
    client.exec(
        "sed -i 's/--rate 20/--rate 2/' /etc/systemd/system/aura-copy-runs.service; systemctl daemon-reload"
    )
    client.exec("systemctl stop aura-copy-runs.timer; systemctl start --no-block aura-copy-runs.service")
    part = f"{SHARE}/runs/first/checkpoints/checkpoint-step-100/model.safetensors"
    server.wait_inside(f"test -s {part}")
    server.power_off()
    client.exec("while systemctl is-active -q aura-copy-runs || systemctl show -p ActiveState aura-copy-runs"
                " | grep -q activating; do sleep 1; done", limit=600)  # fmt: skip
    said = client.exec("journalctl -u aura-copy-runs -o cat")
    assert "first cannot be copied now" in said
    assert "It is tried again" in said
    assert client.exec("systemctl show -p Result --value aura-copy-runs").strip() == "success"
    server.power_on()
    server.wait_ssh(shared.cluster.final(server))
    copy = f"{SHARE}/runs/first/checkpoints/checkpoint-step-100"
    assert server.exec(f"test -e {copy}/manifest.json && echo there; true") == ""
    client.exec(
        "sed -i 's/--rate 2/--rate 0/' /etc/systemd/system/aura-copy-runs.service; systemctl daemon-reload"
    )
    # Nobody types anything.
    client.exec("systemctl start aura-copy-runs.timer")
    wait_for("it is copied", lambda: "is copied" in client.exec("journalctl -u aura-copy-runs -o cat"), 900)
    sums = "sha256sum model.safetensors optimizer.safetensors state.json manifest.json"
    assert server.exec(f"cd {copy} && {sums}") == client.exec(f"cd {checkpoint} && {sums}")
    assert server.exec(f"ls -A {SHARE}/runs/first/checkpoints").split() == ["checkpoint-step-100"]
    exposure = client.exec("systemd-analyze security --no-pager aura-copy-runs.service | tail -1")
    assert float(re.findall(r"[0-9]+\.[0-9]+", exposure)[0]) < 3


# What the trainer writes, in the size of a small model: 24 MB.
CHECKPOINT = """
import hashlib, json, os, pathlib, sys
path = pathlib.Path(sys.argv[1])
sizes = {"model.safetensors": 24 << 20, "optimizer.safetensors": 1 << 20, "state.json": 100}
files = {}
for name, size in sizes.items():
    data = os.urandom(size)
    (path / name).write_bytes(data)
    files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
manifest = {"format": "aura-checkpoint-1", "step": 100, "files": files}
(path / "manifest.json").write_text(json.dumps(manifest))
"""


def test_a_nas_with_smb_takes_the_servers_place(shared: Shared) -> None:
    """Samba on the machine that was the server."""
    server, client = shared.server, shared.client
    server.exec(SAMBA, limit=1800)
    server.exec(
        "systemctl stop nfs-server; mkdir -p /srv/nas && chown aura: /srv/nas && systemctl restart smbd"
    )
    source = f"//{shared.cluster.final(server)}/nas"
    settings = {"shared_source": source, "shared_directory": "/srv/nas-files", "shared_smb_user": "aura"}
    shared.settings(**settings)
    refused = " ".join(shared.cluster.share(expect=1).split())
    assert f"{source} is SMB and wants to know who we are" in refused
    shared.settings(**settings, shared_smb_password="wrong")  # noqa: S106
    assert "mount error(13): Permission denied" in " ".join(shared.cluster.share(expect=1).split())
    shared.settings(**settings, shared_smb_password="correct horse, battery")  # noqa: S106
    said = shared.cluster.share("--diff", "-vvv")
    assert "correct horse" not in said
    # What it was before, it is not any more.
    assert client.exec("ls /etc/systemd/system/*.mount").split() == [
        "/etc/systemd/system/srv-nas\\x2dfiles.mount"
    ]
    assert "/srv/aura" not in client.exec("cat /proc/self/mountinfo")
    assert "masked" not in client.exec("systemctl is-enabled rpcbind.service rpcbind.socket || true")
    mount = client.exec("grep ' /srv/nas-files ' /proc/self/mountinfo")
    for words in (source, "nosuid", "nodev", "soft"):
        assert words in mount
    credentials = "/etc/aura-shared-directory.credentials"
    assert client.exec(f"stat --format '%U %a' {credentials}").strip() == "root 600"
    assert "correct horse" not in client.exec(
        "systemctl cat srv-nas\\\\x2dfiles.mount; cat /proc/self/mountinfo"
    )
    client.exec(as_aura("echo from the client >/srv/nas-files/a"))
    assert server.exec("cat /srv/nas/a") == "from the client\n"
    assert not re.search("changed=[1-9]", shared.cluster.share())


SAMBA = """
export DEBIAN_FRONTEND=noninteractive
apt-get -q -o DPkg::Lock::Timeout=300 update
apt-get -q -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends samba
echo '
[global]
server min protocol = SMB3
[nas]
path = /srv/nas
read only = no
valid users = aura
' >/etc/samba/smb.conf
printf 'correct horse, battery\\ncorrect horse, battery\\n' | smbpasswd -s -a aura
"""
