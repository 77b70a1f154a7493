"""reboot.yml and upgrade.yml: one machine after the other, and none after one that does not come back."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import VirtualCluster
from machines import Machine

pytestmark = [pytest.mark.more, pytest.mark.timeout(5400)]

# Packages with nothing in them stand in for the real ones, in an archive that is the machine's only one. The kernel's
# asks for a reboot, as the real one does.
ARCHIVE = r"""
set -e
mkdir -p /opt/stand-ins && cd /opt/stand-ins
make() { # NAME VERSION COMMAND-WHEN-INSTALLED
  mkdir -p "$1/DEBIAN"
  printf 'Package: %s\nVersion: %s\n' "$1" "$2" >"$1/DEBIAN/control"
  printf 'Architecture: all\nMaintainer: nobody\nDescription: stand-in\n' >>"$1/DEBIAN/control"
  printf '#!/bin/sh\n%s\n' "$3" >"$1/DEBIAN/postinst"
  chmod 0755 "$1/DEBIAN/postinst"
  dpkg-deb --build "$1" "$1_$2.deb" >/dev/null
}
list() {
  for deb in *.deb; do
    dpkg-deb --field "$deb"
    printf 'Filename: ./%s\nSize: %s\nSHA256: %s\n\n' "$deb" "$(stat -c %s "$deb")" "$(sha256sum "$deb" | cut -c 1-64)"
  done >Packages
}
for name in NAMES; do make "$name" 1 true; done
dpkg --install *.deb >/dev/null
for name in NAMES; do
  case $name in linux-*) make "$name" 2 'touch /run/reboot-required';; *) make "$name" 2 true;; esac
done
list
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*
echo 'deb [trusted=yes] file:/opt/stand-ins ./' >/etc/apt/sources.list
"""


def archive(machine: Machine, *names: str) -> None:
    script = base64.b64encode(ARCHIVE.replace("NAMES", " ".join(names)).encode()).decode()
    machine.exec(f"echo {script} | base64 -d | bash", limit=600)


def version(machine: Machine, name: str) -> str:
    return machine.exec(f"dpkg-query --show --showformat '${{Version}}' {name}").strip()


@pytest.fixture
def two(vm: Callable[..., Machine], tmp_path: Path) -> VirtualCluster:
    """Two machines that have been through bootstrap; what comes after that does not matter here."""
    machines = [vm("server", number=number) for number in range(2)]
    for machine in machines:
        machine.wait_ssh()
    cluster = VirtualCluster(machines, tmp_path)
    cluster.write()
    cluster.bootstrap()
    return cluster


def test_a_kernel_reboots_its_node_and_no_other(two: VirtualCluster) -> None:
    first, second = two.machines
    archive(first, "linux-image-stand-in", "containerd-stand-in")
    archive(second, "containerd-stand-in")
    before = [first.boot_id(), second.boot_id()]
    said = " ".join(two.ansible("playbooks/upgrade.yml").split())
    assert "linux-image-stand-in 1 → 2" in said
    assert [version(first, "linux-image-stand-in"), version(second, "containerd-stand-in")] == ["2", "2"]
    assert first.boot_id() != before[0]
    assert second.boot_id() == before[1]
    # Nothing is left to do.
    assert "changed=0" in two.ansible("playbooks/upgrade.yml").splitlines()[-3]
    assert first.boot_id() != before[0]


def test_who_does_not_come_back_stops_the_rest(two: VirtualCluster) -> None:
    first, second = two.machines
    before = [first.boot_id(), second.boot_id()]
    two.ansible("playbooks/reboot.yml")
    after = [first.boot_id(), second.boot_id()]
    assert all(new != old for new, old in zip(after, before, strict=True))

    first.exec("systemctl mask ssh.service ssh.socket")
    said = " ".join(two.ansible("playbooks/reboot.yml", "-e", "reboot_timeout=120", expect=2).split())
    assert "Timed out waiting" in said
    assert second.boot_id() == after[1]
