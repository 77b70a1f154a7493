"""Two people never run site.yml on the same nodes at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_cluster import ROOT, Cluster

LASTS = 15  # seconds that a lock outlives a controller that has lost its power
PLAYBOOK = f"""
- name: Work for a while
  hosts: cluster
  gather_facts: false
  any_errors_fatal: true
  tasks:
    - name: Find the nodes
      ansible.builtin.import_tasks: {ROOT}/playbooks/tasks/find_nodes.yml
    - name: Take the lock
      ansible.builtin.import_tasks: {ROOT}/playbooks/tasks/lock.yml
    - name: The lock is held
      ansible.builtin.copy: {{dest: "{{{{ held }}}}", content: "", mode: "0600"}}
      delegate_to: localhost
      run_once: true
    - name: Work
      ansible.builtin.pause: {{seconds: "{{{{ seconds }}}}"}}
"""


def holders(of: int) -> list[int]:
    """The processes on this machine that hold the lock for one ansible-playbook."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"hold-lock" in path.read_bytes() and os.getsid(int(path.parent.name)) != os.getsid(of):
                found.append(int(path.parent.name))
        except (OSError, ProcessLookupError):
            continue
    return found


@pytest.fixture
def playbook(tmp_path: Path) -> Path:
    path = tmp_path / "work.yml"
    path.write_text(PLAYBOOK)
    (tmp_path / "group_vars").symlink_to(ROOT / "playbooks/group_vars")
    return path


@pytest.fixture
def first(cluster: Cluster, playbook: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that holds the lock."""
    held = tmp_path / "held"
    options = ["-e", f"lock_lasts={LASTS}", "-e", "seconds=300", "-e", f"held={held}", "-e", "secret=hush"]
    run = subprocess.Popen(
        ["ansible-playbook", "-i", "inventory/lab", playbook, *options],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        cluster.wait("the first run has the lock", lambda: held.exists() or run.poll() is not None, 90)
        assert run.poll() is None, "the first run ended"
        yield run
    finally:
        run.kill()
        run.wait()


def test_a_second_run_is_refused_until_the_first_is_killed(
    cluster: Cluster, first: subprocess.Popen[bytes], playbook: Path
) -> None:
    said = " ".join(cluster.refused("site.yml").split())
    assert "at work on it since" in said
    assert "ansible-playbook -i inventory/lab" in said
    assert "hush" not in said, "what -e says is nobody else's business"
    second = ("-e", "seconds=0", "-e", f"held={playbook.parent / 'second'}")
    cluster.ansible(str(playbook), "--check", *second)  # who only looks does not disturb

    holding = holders(first.pid)
    assert holding
    first.kill()
    first.wait()
    cluster.wait(
        "nothing is left on the controller",
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in holding),
        90,
    )
    cluster.ansible(str(playbook), *second)


@pytest.mark.more
def test_a_controller_that_slept_finds_that_others_went_on_without_it(
    cluster: Cluster, first: subprocess.Popen[bytes], playbook: Path
) -> None:
    asleep = holders(first.pid)
    for process in asleep:
        os.kill(process, signal.SIGSTOP)  # for the nodes, that is the same as a controller without power
    held = playbook.parent / "second"
    assert "at work on it since" in cluster.refused(str(playbook), "-e", "seconds=0", "-e", f"held={held}")
    time.sleep(LASTS)
    second = subprocess.Popen(
        ["ansible-playbook", "-i", "inventory/lab", playbook, "-e", "seconds=20", "-e", f"held={held}"],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    cluster.wait("the second run has the lock", lambda: held.exists() or second.poll() is not None, 90)
    assert second.poll() is None, "the second run did not get the lock"
    for process in asleep:
        os.kill(process, signal.SIGCONT)
    assert first.wait(90) != 0, "two were at work"
    assert second.wait(120) == 0
