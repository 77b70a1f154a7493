"""Who waits for apt's lock says who holds it."""

import subprocess
import sys
from pathlib import Path

import tree

HOLD = "import fcntl, sys; it = open(sys.argv[1], 'w'); fcntl.lockf(it, fcntl.LOCK_EX); print(1, flush=True); input()"


def test_the_holder_of_a_lock_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "lock-frontend"
    lock.touch()
    ask = ["sh", "-c", tree.plugin("action/install_packages").HOLDER.format(path=lock)]
    assert subprocess.run(ask, text=True, capture_output=True, check=True).stdout == ""
    with subprocess.Popen([sys.executable, "-c", HOLD, lock], stdin=-1, stdout=-1) as holder:
        assert holder.stdin and holder.stdout
        holder.stdout.readline()
        said = subprocess.run(ask, text=True, capture_output=True, check=True).stdout
        assert said.startswith("python")
        assert f"({holder.pid})" in said
        holder.stdin.close()
