"""A Docker Engine of the test's own: its own data, socket and containerd, no bridge, no rule of a firewall."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CAP_SYS_RESOURCE = 24
CGROUP = "aura-test-docker"


@contextmanager
def home_of_engine() -> Iterator[Path]:
    """Where all of it lies. AURA_KEEP_LAB=1 leaves what was built: for work on these tests."""
    keep = "AURA_KEEP_LAB" in os.environ
    home = (
        Path("/var/tmp/aura-containers") if keep else Path(tempfile.mkdtemp(prefix="aura-", dir="/var/tmp"))
    )
    home.mkdir(exist_ok=True)
    try:
        yield home
    finally:
        if not keep:
            shutil.rmtree(home)


class Engine:
    """In `home`, which must not lie in memory or on something that overlayfs does not take."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = self.home / "dockerd.log"
        self.environment = {
            **os.environ,
            "DOCKER_HOST": f"unix://{self.home}/docker.sock",
            "DOCKER_CONFIG": f"{self.home}/client",
            "PATH": f"/usr/bin:{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        (self.home / "daemon.json").write_text("{}")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(), env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    @classmethod
    @contextmanager
    def running(cls, home: Path) -> Iterator[Engine]:
        if os.geteuid() != 0:
            pytest.fail("A Docker Engine is started for these tests, which needs root: sudo make test-more")
        ubuntu = "ID=ubuntu" in Path("/etc/os-release").read_text().splitlines()
        packages = ["docker.io", "docker-compose-v2" if ubuntu else "docker-compose"]
        subprocess.run([ROOT / "requirements/apt", *packages], check=True, timeout=600)
        (home / "docker").mkdir(exist_ok=True)
        engine = cls(home / "docker")
        try:
            engine.wait()
            yield engine
        finally:
            engine.end()

    def _command(self) -> list[str]:
        places = {
            "host": self.environment["DOCKER_HOST"],
            "data-root": self.home / "data",
            "exec-root": self.home / "exec",
            "pidfile": self.home / "pid",
            "config-file": self.home / "daemon.json",
            # A containerd that runs here already has room for both.
            "containerd-namespace": "aura-test",
            "containerd-plugins-namespace": "aura-test-plugins",
            "cgroup-parent": CGROUP,
            "bridge": "none",
            "iptables": "false",
        }
        command = ["dockerd", *(f"--{name}={value}" for name, value in places.items())]
        bounding = re.search(r"^CapBnd:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert bounding
        if not int(bounding[1], 16) >> CAP_SYS_RESOURCE & 1:
            wrapper = ROOT / "tests/containers/runc-without-limits"
            command += [f"--add-runtime=limited={wrapper}", "--default-runtime=limited"]
        return command

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while self.docker("version", check=False).returncode:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"dockerd does not answer: {self.log.read_text()[-3000:]}")
            time.sleep(0.5)

    def docker(self, *words: str, check: bool = True, limit: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", *words], env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=limit, check=check,
        )  # fmt: skip

    def end(self) -> None:
        """No container, no process, no mount, no cgroup of it stays."""
        left = self.docker("ps", "--all", "--quiet", check=False).stdout.split()
        if left:
            self.docker("rm", "--force", *left, check=False)
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if line.split()[1].startswith(f"{self.home}/"):
                subprocess.run(["umount", "--lazy", line.split()[1]], check=False)
        # Where this process has a cgroup of its own, they are below that one. BuildKit makes one more.
        for parent in Path("/sys/fs/cgroup").rglob(CGROUP):
            groups = [parent, *(path for path in parent.rglob("*") if path.is_dir())]
            for group in reversed(groups):
                with suppress(OSError):  # the last process may not have left yet
                    group.rmdir()
