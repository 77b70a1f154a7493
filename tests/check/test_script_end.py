"""How a script's ranks end: what run-rank keeps of it, and who is called the first to fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tree
from expressions import filled_in, loaded

script = tree.plugin("filter/script")


def rank(number: int, state: str, failed: float | None = None, **said: Any) -> dict[str, Any]:
    code = 1 if state == "failed" else 0
    return {"rank": number, "state": state, "failed": failed, "exit": code, "signal": None, "tail": []} | said


def status(number: int, *ranks: dict[str, Any], **said: Any) -> dict[str, Any]:
    found = {
        "ranks": list(ranks), "unit": "failed", "unit_exit": 1, "unit_signal": None, "unit_ended": 100.0,
        "active": False, **said,
    }  # fmt: skip
    return {"inventory_hostname": f"node{number}", "script_status": found}


VICTIM = status(0, rank(0, "failed", 20.4, tail=["RuntimeError: Connection closed by peer"]))
BEGUN = status(0, rank(0, "running"), active=True, unit="active")
OFF = {"unit": "inactive", "unit_exit": 0, "unit_ended": None}
SILENT = "node1 has not begun in time (script_start_timeout). Its last lines:\nwaiting"


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ([VICTIM, status(1, rank(1, "stopped")), status(2, rank(2, "failed", 20.1, tail=["ValueError: broken"]))],
         "Rank 2 on node2 ended with exit status 1, the first one to fail. Its last lines:\nValueError: broken"),
        ([status(0, rank(0, "running"), unit="inactive"), status(1, unit_ended=5.0)],
         "The launcher (torchrun) on node1 ended with exit status 1, the first one to fail. Its last lines:\nwaiting"),
        # systemd stops what is left of its unit, and the ranks of other nodes fail before that is known.
        ([VICTIM, status(1, rank(1, "stopped"), unit_result="oom-kill", unit_ended=31.0, unit_exit=0)],
         "The launcher (torchrun) on node1 was ended because that PC's memory ran out"),
        ([VICTIM, status(1, rank(1, "lost", went_off=True), **OFF)], "node1 went off while its ranks were at work"),
        # What was killed because it did not stop in time is no cause.
        ([VICTIM, status(1, rank(1, "lost", went_off=False), **OFF)], "Rank 0 on node0"),
        ([BEGUN, {"inventory_hostname": "node1", "script_status": {}}], SILENT),
        ([BEGUN, status(1, active=True)], SILENT),
        ([status(0, rank(0, "stopped")), status(1, rank(1, "done"), unit="inactive")], ""),
    ],
)  # fmt: skip
def test_the_first_to_fail_is_named_and_not_its_victims(nodes: list[dict[str, Any]], sentence: str) -> None:
    failure = script.script_failure(nodes)
    assert bool(failure) == bool(sentence)
    assert not failure or script.failure_sentence(failure, "torchrun", "waiting").startswith(sentence)


def test_nobody_joins_a_run_beside_a_script() -> None:
    """A node may have left a run for it."""
    tasks = [task for play in loaded("playbooks/join.yml") for task in play.get("tasks", [])]
    (task,) = (task for task in tasks if task["name"] == "Assert that the run was launched with this node")
    known = {"trainer_answers": True, "trainer_status": [{"run": "mine"}], "script_status": {}}
    that = f"{{{{ {task['ansible.builtin.assert']['that']} }}}}"
    assert filled_in(that, known)
    assert not filled_in(that, known | {"script_status": {"active": True}})


def start(folder: Path, code: str, *words: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(code)
    environment = {
        **os.environ, "RANK": "2", "AURA_SCRIPT_RANKS": str(folder),
        "AURA_SCRIPT_PYTHON": sys.executable, "AURA_SCRIPT_CARDS": "GPU-1a",
    }  # fmt: skip
    return subprocess.Popen(
        [tree.ROOT / "roles/script/files/run-rank", *(words or ["script.py"])], cwd=folder, env=environment,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def record(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / "2.json").read_text())
    return said


def ended(folder: Path, code: str, *words: str) -> tuple[int, str, str]:
    """Its code, and what it has said on stdout and stderr."""
    process = start(folder, code, *words)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


def test_a_rank_that_ends_well(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['CUDA_VISIBLE_DEVICES'])"
    status, out, _ = ended(tmp_path, code, "--local_rank=0", "script.py", "--epochs", "3")
    # DeepSpeed's own flag comes behind the script's name, where the script reads it.
    assert out == "[rank 2] ['--local_rank=0', '--epochs', '3'] GPU-1a\n"
    assert (status, record(tmp_path)["state"], record(tmp_path)["exit"]) == (0, "done", 0)


@pytest.mark.parametrize("before", ["", "[rank2]: "])  # torch shows in its own way what was not caught
def test_the_last_traceback_is_kept_with_its_time(tmp_path: Path, before: str) -> None:
    code = f"""
import sys, time, traceback
def shown(*what):
    for line in "".join(traceback.format_exception(*what)).splitlines():
        print({before!r} + line, file=sys.stderr)
sys.excepthook = shown
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
try:
    {{}}["seed"]
except KeyError as error:
    print(time.time(), flush=True)
    import atexit
    atexit.register(time.sleep, 4)
    raise ValueError("the batch is broken") from error
"""
    status, out, errors = ended(tmp_path, code)
    said = record(tmp_path)
    assert (status, said["state"], said["exit"]) == (1, "failed", 1)
    assert "ZeroDivisionError" in errors  # it is in the journal, and no reason
    assert "KeyError: 'seed'" in said["tail"] and said["tail"][-1] == "ValueError: the batch is broken"
    assert not any("ZeroDivisionError" in line for line in said["tail"])
    # Not when Python was through with tidying up: by then a victim may have failed, too.
    assert said["failed"] - float(out.split()[-1]) < 3 < said["ended"] - said["failed"]


@pytest.mark.parametrize(
    ("code", "end", "exit_status", "name"),
    [
        ("raise SystemExit(7)", 7, 7, None),
        ("import os; os.abort()", -signal.SIGABRT, None, "SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, None, "SIGKILL"),
    ],
)
def test_an_end_without_a_traceback(
    tmp_path: Path, code: str, end: int, exit_status: int | None, name: str | None
) -> None:
    assert ended(tmp_path, code)[0] == end
    said = record(tmp_path)
    assert (said["state"], said["exit"], said["signal"]) == ("failed", exit_status, name)


def test_a_rank_is_seen_while_it_runs_and_may_save_at_a_stop(tmp_path: Path) -> None:
    code = """
import pathlib, signal, sys, time
def save(number, frame):
    time.sleep(1)
    pathlib.Path("saved").touch()
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""
    process = start(tmp_path, code)
    assert process.stdout and process.stdout.readline() == "[rank 2] ready\n"
    give_up = time.monotonic() + 30
    while record(tmp_path)["last"] != "ready":
        assert time.monotonic() < give_up
        time.sleep(0.2)
    assert record(tmp_path)["state"] == "running"
    os.killpg(process.pid, signal.SIGTERM)  # as torchrun does
    process.communicate(timeout=60)
    assert (tmp_path / "saved").exists()
    assert (record(tmp_path)["state"], record(tmp_path)["exit"]) == ("stopped", 3)


def test_a_progress_bar_is_a_line_now_and_then(tmp_path: Path) -> None:
    code = """
import sys, time
for step in range(50):
    sys.stderr.write(f"\\r{step} of 50")
    sys.stderr.flush()
    time.sleep(0.01)
sys.stderr.write("\\nthe end\\n")
"""
    lines = ended(tmp_path, code)[2].splitlines()
    assert lines[-2:] == ["[rank 2] 49 of 50", "[rank 2] the end"]
    assert len(lines) < 5
    assert record(tmp_path)["last"] == "the end"
