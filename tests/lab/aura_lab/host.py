"""What the lab asks of this machine: commands, processes it started, packages, where things lie."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
LAB = REPOSITORY / "tests/lab/lab"
# What the playbooks need to know of the lab (password, name servers); removed by `down`.
INVENTORY_STATE = REPOSITORY / "inventory/lab/state"
# The nodes' disks, one directory each, and `.lab` for what the lab remembers about itself.
BASE = Path("/var/lib/aura-lab")
OWN = BASE / ".lab"
LOCK = Path("/run/lock/aura-lab.lock")

# command -> the package that brings it
PACKAGES = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "dnsmasq": "dnsmasq-base",
    "nft": "nftables",
    "ip": "iproute2",
    "tc": "iproute2",
    "openssl": "openssl",
    "ssh": "openssh-client",
}
# the same, for VM nodes only
VM_PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mke2fs": "e2fsprogs",
}


class LabError(Exception):
    """One sentence for the person; the command ends with `code`."""

    code = 1


class Unavailable(LabError):
    """This machine cannot have a lab at all (not root, no namespaces): callers may fall back."""

    code = 3


def say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, check: bool = True, stdin: str | None = None) -> str:
    """Run a command and return its stdout; a failure becomes one sentence with what it said."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, input=stdin, capture_output=True, text=True, start_new_session=True, check=False
    )
    if check and done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise LabError(f"`{' '.join(words)}` failed: {' / '.join(said[-3:])}")
    return done.stdout


def succeeds(*command: str | Path) -> bool:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, start_new_session=True, check=False).returncode == 0


def run_with_progress(what: str, command: Sequence[str | Path], log: Path, must_finish: bool = False) -> None:
    """Run something slow with its output in `log`, saying every ten seconds that it still runs.

    Interrupted, it is ended; with `must_finish` (a package that is being installed) it is waited for.
    """
    say(what)
    started = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    say(f"... {time.monotonic() - started:.0f} s")
        except BaseException:
            if must_finish:
                say("this has to finish first")
                process.wait()
                raise
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise
    if process.returncode != 0:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
        raise LabError(f"{what}: this failed ({' / '.join(last)}); everything it said is in {log}")


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.touch(0o600)
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(mode)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return {}


_interrupted = threading.Event()


def interrupt() -> None:
    """Tell everything that waits in another thread to stop waiting."""
    _interrupted.set()


def stop_if_interrupted() -> None:
    if _interrupted.is_set():
        raise LabError("interrupted")


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("AURA_CACHE") or f"{base}/aura")


# --- processes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A process that the lab started. The start time tells it from a later one with the same number."""

    pid: int
    start: int

    @staticmethod
    def of(pid: int) -> Process | None:
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if after_name[0] in "ZX" else Process(pid, int(after_name[19]))

    def alive(self) -> bool:
        return Process.of(self.pid) == self

    def kill(self, how: int = signal.SIGKILL, wait: float = 60) -> None:
        """Send the signal and wait until the process is gone."""
        if not self.alive():
            return
        try:
            os.kill(self.pid, how)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + wait
        while self.alive():
            if time.monotonic() > deadline:
                raise LabError(f"process {self.pid} does not end")
            time.sleep(0.02)
            reap(self.pid)


def processes_with(argument: str) -> list[Process]:
    """The processes that were started with exactly this argument, oldest first.

    The lab's own processes carry a path of the lab in their command line: nothing has to be written
    down that could be lost when `up` is interrupted, and no other process can be meant.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            process = Process.of(int(entry.name)) if argument.encode() in words else None
            if process:
                found.append(process)
    return sorted(found, key=lambda process: (process.start, process.pid))


def reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


# --- can this machine have a lab? ------------------------------------------------------------------

# Everything a node needs from the kernel, tried in namespaces of its own so that nothing stays.
_PROBE = """
set -e
mount -t tmpfs none "$1"
mkdir "$1/l" "$1/u" "$1/w" "$1/m"
mount -t overlay -o "lowerdir=$1/l,upperdir=$1/u,workdir=$1/w" overlay "$1/m"
ip link add probe0 type bridge
ip link add probe1 type veth peer name probe2
tc qdisc add dev probe1 root tbf rate 1gbit burst 128kb latency 25ms
"""


def require_root() -> None:
    if os.geteuid() != 0:
        raise Unavailable("The lab needs root (it makes containers and a bridge): run it with sudo.")


def require_namespaces() -> None:
    """Raise Unavailable unless containers, overlays, bridges and shaping work here."""
    directory = OWN / "probe"
    directory.mkdir(parents=True, exist_ok=True)
    namespaces = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork"]
    done = subprocess.run(
        [*namespaces, "sh", "-c", _PROBE, "probe", str(directory)],
        capture_output=True, text=True, start_new_session=True, check=False,
    )  # fmt: skip
    directory.rmdir()
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["unknown reason"])[-1]
        raise Unavailable(f"This machine cannot run container nodes ({reason}).")


def setup(vms: bool = False) -> None:
    """Install by name what the lab needs and lacks."""
    missing = sorted(
        {
            package
            for command, package in (PACKAGES | (VM_PACKAGES if vms else {})).items()
            if not shutil.which(command)
        }
    )
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise Unavailable(f"The lab needs Debian or Ubuntu here, or {', '.join(missing)} already installed.")
    OWN.mkdir(parents=True, exist_ok=True)
    log = OWN / "setup.log"
    apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=300"]
    install = [*apt, "install", "-y", "--no-install-recommends", *missing]
    what = f"installing {', '.join(missing)}"
    try:
        run_with_progress(what, install, log, must_finish=True)
    except LabError:
        run_with_progress("refreshing apt's lists", ["apt-get", "update"], log)
        run_with_progress(what, install, log, must_finish=True)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def runs_systemd() -> bool:
    return Path("/run/systemd/system").is_dir()


@contextmanager
def locked() -> Iterator[None]:
    """Only one command at a time may change the lab."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    told = False
    while True:
        descriptor = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                say("another lab command is at work; waiting for it")
                told = True
            os.close(descriptor)
            time.sleep(0.3)
            continue
        # The holder before us may have removed the file: then ours is not the one others will lock.
        if LOCK.exists() and os.fstat(descriptor).st_ino == LOCK.stat().st_ino:
            break
        os.close(descriptor)
    try:
        yield
    finally:
        if not OWN.exists():
            LOCK.unlink(missing_ok=True)
        os.close(descriptor)


def mounts_below(directory: Path) -> list[Path]:
    """Mount points at or below a directory, deepest first."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(line.split()[4].encode().decode("unicode_escape"))
        if point == directory or directory in point.parents:
            points.append(point)
    return sorted(points, key=lambda point: len(point.parts), reverse=True)


def unmount(directory: Path) -> None:
    for point in mounts_below(directory):
        if not succeeds("umount", point):
            run("umount", "--lazy", point)


def remove_tree(directory: Path) -> None:
    """rm -rf that refuses to reach into a mount."""
    unmount(directory)
    if mounts_below(directory):
        raise LabError(f"{directory} is still mounted")
    run("rm", "-rf", "--one-file-system", directory)
