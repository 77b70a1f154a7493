"""The images under the nodes: this machine's own distribution as an ordinary install leaves it.

Built with mmdebstrap from this machine's apt sources, kept in the cache, named after a hash of all that
goes into it. Nodes put an overlay on it, so it is never written to again. VMs have an image of their own, with a
kernel and with what Ubuntu installs on every PC. By the same recipe a third one is made, which is no node: what the
images of containers begin with where no registry can be reached (container/build).
"""

from __future__ import annotations

import configparser
import hashlib
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from aura_lab import host

USER = "ubuntu"
PACKAGES = """
    systemd systemd-sysv systemd-timesyncd libpam-systemd dbus udev kmod procps
    netplan.io iproute2 iputils-ping netbase openssh-server openssh-client
    sudo python3 python3-apt ca-certificates tzdata less
""".split()

# A kernel (below), the lab's way in past the network, and what Ubuntu installs on a PC with a desktop.
VM_PACKAGES = (
    "initramfs-tools qemu-guest-agent network-manager unattended-upgrades needrestart ufw nftables".split()
)
KERNEL = {"debian": "linux-image-cloud-amd64", "ubuntu": "linux-image-virtual"}

FILES = {
    "etc/hostname": "ubuntu\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 ubuntu\n\n::1 ip6-localhost ip6-loopback\n",
    "etc/default/locale": "LANG=C.UTF-8\n",
    "etc/ssh/sshd_config.d/50-cloud-init.conf": "PasswordAuthentication yes\nPermitRootLogin no\n",
    # The image has no host keys: each node makes its own when it boots for the first time.
    "etc/systemd/system/first-boot-host-keys.service": """[Unit]
Description=Host keys of this machine
Before=ssh.service
ConditionPathExists=!/etc/ssh/ssh_host_ed25519_key

[Service]
Type=oneshot
ExecStart=/usr/bin/ssh-keygen -A

[Install]
WantedBy=multi-user.target
""",
    # As unattended-upgrades does on a real PC: whoever wants apt right after the boot has to wait.
    "usr/local/lib/busy-apt": """#!/usr/bin/python3
import fcntl, time
with open("/var/lib/dpkg/lock-frontend", "w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    time.sleep(15)
""",
    "etc/systemd/system/busy-apt.service": """[Unit]
Description=Something that holds the apt lock for the first seconds

[Service]
Type=exec
ExecStart=/usr/local/lib/busy-apt

[Install]
WantedBy=basic.target
""",
}
CONTAINER_FILES = {
    # /sys and /proc/sys must be writable for udev and `netplan apply`, but what is not a matter of the
    # node's own network belongs to the machine that carries the lab.
    "usr/local/lib/protect-host": """#!/bin/sh
for path in /proc/sys/kernel /proc/sys/vm /proc/sys/fs /proc/sys/dev /proc/sysrq-trigger \\
    /sys/kernel /sys/module /sys/power /sys/firmware /sys/block /sys/bus /sys/devices/system; do
    [ -e "$path" ] || continue
    mount --bind "$path" "$path" && mount -o remount,bind,ro "$path"
done
exit 0
""",
    "etc/systemd/system/protect-host.service": """[Unit]
Description=Keep this container's hands off the machine that carries it
DefaultDependencies=no
Before=sysinit.target systemd-sysctl.service systemd-udevd.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/lib/protect-host

[Install]
WantedBy=sysinit.target
""",
    # Only this node's network cards, not every device of the machine that carries it.
    "etc/systemd/system/systemd-udev-trigger.service.d/lab.conf": """[Service]
ExecStart=
ExecStart=-udevadm trigger --type=devices --action=add --subsystem-match=net
""",
}
VM_FILES = {
    "etc/fstab": "/dev/vda / ext4 errors=remount-ro 0 1\n",
    # As little as the lab's VMs need in order to find their disk: a few seconds less in each emulated boot.
    "etc/initramfs-tools/conf.d/lab": "MODULES=list\n",
    "etc/initramfs-tools/modules": "virtio_pci\nvirtio_blk\next4\n",
}
EXECUTABLE = {"usr/local/lib/busy-apt", "usr/local/lib/protect-host"}

ENABLED = ["first-boot-host-keys.service", "busy-apt.service", "systemd-networkd.service"]
CONTAINER_ENABLED = ["protect-host.service"]
# What a container cannot use and a virtual machine does not need, and timers that would make tests depend on the
# time of day.
MASKED = """
    console-getty.service container-getty@.service getty@.service getty-static.service serial-getty@.service
    systemd-binfmt.service systemd-hwdb-update.service systemd-pstore.service systemd-firstboot.service
    systemd-boot-update.service sys-kernel-debug.mount sys-kernel-tracing.mount sys-fs-fuse-connections.mount
    dev-hugepages.mount proc-sys-fs-binfmt_misc.automount
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service
    fstrim.timer man-db.timer motd-news.timer
""".split()
CONTAINER_MASKED = """
    kmod-static-nodes.service systemd-modules-load.service systemd-remount-fs.service sys-kernel-config.mount
""".split()

BASE = "base"  # the kind that is no node


@dataclass(frozen=True)
class Recipe:
    """Everything that goes into the image: for which kind of node, and what comes from this machine."""

    kind: str
    distribution: str
    codename: str
    sources: list[str]
    apt_settings: list[str]
    authorities: dict[str, str]
    pip: str

    @property
    def packages(self) -> list[str]:
        if self.kind == BASE:
            return ["ca-certificates"]
        # A part of systemd itself in Ubuntu and in Debian 11.
        part_of_systemd = self.distribution == "ubuntu" or self.codename == "bullseye"
        resolver = [] if part_of_systemd else ["systemd-resolved"]
        machine = [*VM_PACKAGES, KERNEL[self.distribution]] if self.kind == "vm" else []
        return [*PACKAGES, *resolver, *machine]

    @property
    def files(self) -> dict[str, str]:
        if self.kind == BASE:
            return {}
        return FILES | (VM_FILES if self.kind == "vm" else CONTAINER_FILES)

    @property
    def enabled(self) -> list[str]:
        return ENABLED + ([] if self.kind == "vm" else CONTAINER_ENABLED)

    @property
    def masked(self) -> list[str]:
        return MASKED + ([] if self.kind == "vm" else CONTAINER_MASKED)

    @property
    def family(self) -> str:
        """What an older image of the same kind of node begins with."""
        return f"{self.distribution}-{self.codename}-" + ("" if self.kind == "container" else f"{self.kind}-")

    @property
    def finish(self) -> Callable[[Path, Recipe], None]:
        return _finish_base if self.kind == BASE else _finish

    def key(self) -> str:
        steps = [self.packages, self.files, sorted(EXECUTABLE), self.enabled, self.masked]
        text = json.dumps([*steps, inspect.getsource(self.finish), self.__dict__], sort_keys=True)
        return f"{self.family}{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def recipe(kind: str, suite: str = "") -> Recipe:
    """`suite`: another release of this machine's distribution, from the same apt sources."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', Path("/etc/os-release").read_text(), re.MULTILINE))
    distribution, codename = release.get("ID", ""), release.get("VERSION_CODENAME", "")
    if distribution not in ("debian", "ubuntu") or not codename:
        raise host.Unavailable(
            "The lab's nodes are made from this machine's own apt sources: Debian or Ubuntu only."
        )
    sources = _sources(distribution, codename)
    if suite and suite != codename:
        sources = [_of_suite(line, codename, suite) for line in sources]
        codename = suite
    return Recipe(kind, distribution, codename, sources, _apt_settings(), _authorities(), _pip_settings())


def _of_suite(source: str, codename: str, suite: str) -> str:
    """A line of apt's sources for another release; `main` and `universe` are in each."""
    kind, uri, name, *parts = source.split()
    parts = [part for part in parts if part in ("main", "universe")]
    return " ".join([kind, uri, name.replace(codename, suite), *parts])


def _sources(distribution: str, codename: str) -> list[str]:
    """The distribution's own apt sources (not those of other vendors), one line each."""
    listing = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI) $(RELEASE) $(COMPONENT)"]
    suites: dict[tuple[str, str], list[str]] = {}
    for attempt in ("as it is", "after an update"):
        for line in host.run(*listing, "Created-By: Packages").splitlines():
            words = line.split()
            own = len(words) == 4 and words[0].lower() == distribution and words[2].split("-")[0] == codename
            if own and words[3] not in suites.setdefault((words[1], words[2]), []):
                suites[words[1], words[2]].append(words[3])
        if suites or attempt == "after an update":
            break
        host.OWN.mkdir(parents=True, exist_ok=True)
        host.run_with_progress("refreshing apt's lists", ["apt-get", "update"], host.OWN / "setup.log")
    if not suites:
        raise host.LabError(
            f"No apt source of {distribution} {codename} found on this machine (apt-get update?)."
        )
    return [f"deb {uri} {suite} {' '.join(parts)}" for (uri, suite), parts in suites.items()]


def _is_elsewhere(value: str) -> bool:
    """Whether a node can reach what the value names, and may know it: not a local path, not with a password."""
    return not re.search(r"localhost|127\.\d+\.\d+\.\d+|\[::1\]|file:|@|^/", value)


def _apt_settings() -> list[str]:
    """How this machine's apt talks to the network (proxies, date checks), where it holds for a node too."""
    wanted = re.compile(r"^Acquire::(Check-|https?::|Retries|ForceIPv4|Max-FutureTime|Languages)")
    lines = [line for line in host.run("apt-config", "dump").splitlines() if wanted.match(line)]
    values = {line: line.partition('"')[2].rstrip('";') for line in lines}
    return [line for line, value in values.items() if value and _is_elsewhere(value)]


def _certificates(bundle: str) -> list[str]:
    return re.findall(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", bundle, re.DOTALL)


def _authorities() -> dict[str, str]:
    """Certificate authorities that this machine trusts beyond the distribution's own."""
    directory = Path("/usr/local/share/ca-certificates")
    return {path.name: path.read_text() for path in sorted(directory.rglob("*.crt"))}


def _pip_settings() -> str:
    """pip's settings of this machine, as far as they name remote things."""
    parser = configparser.RawConfigParser()
    home = Path.home()
    parser.read(["/etc/pip.conf", home / ".pip/pip.conf", home / ".config/pip/pip.conf"])
    found = dict(parser.items("global")) if parser.has_section("global") else {}
    lines = []
    for name in ("index-url", "extra-index-url", "trusted-host", "find-links"):
        value = os.environ.get("PIP_" + name.upper().replace("-", "_"), found.get(name, ""))
        words = [word for word in value.split() if _is_elsewhere(word)]
        if words:
            lines.append(f"{name} = {' '.join(words)}")
    return "\n".join(lines)


def build(what: Recipe, in_use: Iterable[str] = ()) -> Path:
    """The image's directory, built first if the cache has none. Older ones go, except those in use."""
    home = host.cache() / "lab"
    for left_over in home.glob(".building-*"):
        host.remove_tree(left_over)
    rootfs = home / what.key()
    if rootfs.is_dir():
        return rootfs
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    building = home / f".building-{what.key()}"
    log = home / "build.log"
    log.write_text("")
    # In namespaces of its own, and ended with us: no mount and no process can stay behind.
    command = ["setpriv", "--pdeathsig", "KILL"]
    command += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"]
    command += [f"--include={','.join(what.packages)}"]
    command += [f"--aptopt={setting}" for setting in what.apt_settings]
    command += [what.codename, str(building), *what.sources]
    try:
        host.run_with_progress(f"building the node image ({what.key()}), a minute or two, once", command, log)
        what.finish(building, what)
        building.rename(rootfs)
    except BaseException:
        host.remove_tree(building)
        raise
    for older in home.iterdir():
        same = re.fullmatch(re.escape(what.family) + "[0-9a-f]{12}", older.name)
        if same and older != rootfs and str(older) not in in_use:
            host.remove_tree(older)
    return rootfs


def _finish(root: Path, what: Recipe) -> None:
    """From a minimal system to one that looks like a PC after an ordinary install."""
    for name, text in what.files.items():
        host.write(root / name, text, 0o755 if name in EXECUTABLE else 0o644)
    # The locale file and others may be links in the image; the resolver's is one on every Ubuntu.
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")
    host.run("chroot", root, "useradd", "--create-home", "--shell", "/bin/bash", "--groups", "sudo,adm", USER)
    host.run("systemctl", f"--root={root}", "enable", *what.enabled, "systemd-resolved.service")
    host.run("systemctl", f"--root={root}", "mask", *what.masked)
    if what.kind == "vm":
        host.run("chroot", root, "update-initramfs", "-u")

    for name, text in what.authorities.items():
        host.write(root / "usr/local/share/ca-certificates" / name, text)
    host.run("chroot", root, "update-ca-certificates")
    trusted = set(_certificates((root / "etc/ssl/certs/ca-certificates.crt").read_text()))
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    extra = [c for c in _certificates(bundle.read_text()) if c not in trusted] if bundle.exists() else []
    for number, certificate in enumerate(extra):
        host.write(root / f"usr/local/share/ca-certificates/host-{number}.crt", certificate + "\n")
    if extra:
        host.run("chroot", root, "update-ca-certificates")
    if what.authorities or extra or what.pip:
        # pip inside a venv brings its own list of authorities.
        own = "cert = /etc/ssl/certs/ca-certificates.crt\n" if what.authorities or extra else ""
        host.write(root / "etc/pip.conf", f"[global]\n{own}{what.pip}\n")

    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/machine-id").write_text("")
    (root / "var/lib/dbus/machine-id").unlink(missing_ok=True)
    shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
    (root / "var/lib/apt/lists/partial").mkdir(parents=True)


def _finish_base(root: Path, what: Recipe) -> None:
    """Whom this machine trusts, and nothing of a PC."""
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    if bundle.exists():
        shutil.copyfile(bundle, root / "etc/ssl/certs/ca-certificates.crt")
    for name, text in what.authorities.items():
        host.write(root / "usr/local/share/ca-certificates" / name, text)
    host.write(root / "etc/pip.conf", f"[global]\ncert = {bundle}\n{what.pip}\n")
    shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
    (root / "var/lib/apt/lists/partial").mkdir(parents=True)
