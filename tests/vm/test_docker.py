"""A port that a container publishes is a port of the node: nobody reaches it who was not let in."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import VirtualCluster
from machines import Machine, wait_for

pytestmark = [pytest.mark.more, pytest.mark.timeout(5400)]

# An image of one static program: no registry is needed.
IMAGE = """
apt-get -q -o DPkg::Lock::Timeout=300 update
export DEBIAN_FRONTEND=noninteractive
apt-get -q -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends docker.io apparmor iptables busybox-static
mkdir -p /tmp/tiny/bin /tmp/tiny/www && cp /bin/busybox /tmp/tiny/bin/ && echo hello >/tmp/tiny/www/index.html
tar -C /tmp/tiny -c . | docker import - tiny
"""


def says(address: str, port: int) -> str:
    """The page there; empty when nobody answers within some seconds."""
    try:
        with socket.create_connection((address, port), timeout=8) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with connection.makefile(encoding="utf-8") as page:
                return page.read()
    except OSError:
        return ""


def test_published_ports_obey_the_firewall(vm: Callable[..., Machine], tmp_path: Path) -> None:
    machine = vm()
    machine.wait_ssh()
    machine.exec(IMAGE, limit=1800)
    serve = "tiny /bin/busybox httpd -f -p 80 -h /www"
    machine.exec(f"docker run -d -p 8080:80 {serve} && docker run -d -p 9090:80 {serve}", limit=300)
    # It is Docker that opens them to everybody: without this the test proves nothing.
    wait_for("the published port", lambda: "hello" in says(machine.address, 8080), 120)

    cluster = VirtualCluster([machine], tmp_path)
    # This machine is in the admin networks, and no peer.
    cluster.write(**{machine.name: {"firewall_admin_ports": [9090]}})
    cluster.bootstrap()
    cluster.site()
    address = cluster.final(machine)
    assert says(address, 8080) == ""
    assert "hello" in says(address, 9090)
    assert "hello" in machine.exec(
        "exec 3<>/dev/tcp/127.0.0.1/8080; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    )
