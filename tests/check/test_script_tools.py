"""The tools of the role script: what is packed for the nodes and unpacked there, and what is kept of a rank's end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import tree

TOOLS = tree.ROOT / "roles/script/files"


def pack(directory: Path, tar: Path, **more: Any) -> tuple[str, str]:
    """What goes to the nodes, and why it cannot."""
    asked = {
        "run": "probe",
        "most_megabytes": 500,
        "leave_out": [],
        "directory": str(directory),
        "tar": str(tar),
    }
    words = [sys.executable, str(TOOLS / "pack")]
    done = subprocess.run(words, input=json.dumps(asked | more), capture_output=True, text=True, check=False)
    assert done.returncode == bool(done.stderr)
    return done.stdout, done.stderr


def names(tar: Path) -> list[str]:
    with tarfile.open(tar) as archive:
        return archive.getnames()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name in (
        "train.py", "lib/model.py", ".git/HEAD", "lib/__pycache__/model.pyc", "my-env/pyvenv.cfg", "my-env/bin/python",
        "checkpoint-500/model.safetensors", "data/text.txt", "wheels/one.whl",
        ".env", "lib/.env.local",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (tmp_path / "outside").mkdir()
    (root / "corpus").symlink_to(tmp_path / "outside")
    (root / "linked.py").symlink_to("train.py")
    return root


def test_what_no_node_needs_is_left_out_and_said(project: Path, tmp_path: Path) -> None:
    said, _ = pack(project, tmp_path / "parcel.tar")
    assert names(tmp_path / "parcel.tar") == ["data/text.txt", "lib/model.py", "linked.py", "train.py"]
    left = "Left out: .env, .git, checkpoint-500, corpus, lib/.env.local, lib/__pycache__, my-env, wheels."
    assert said.endswith(f"/var/lib/aura/scripts/probe/code.\n{left}\n")
    pack(project, tmp_path / "parcel.tar", leave_out=("data", "lib/*.py"))
    assert names(tmp_path / "parcel.tar") == ["linked.py", "train.py"]


def test_a_directory_that_is_far_too_large_is_refused_with_ways_out(project: Path, tmp_path: Path) -> None:
    with (project / "data/film.mp4").open("wb") as film:
        film.truncate(3_000_000)
    _, problem = pack(project, tmp_path / "parcel.tar", most_megabytes=1)
    assert "3.0 MB" in problem
    for way_out in ("data (3.0 MB)", "-e leave_out=data", "-e most_megabytes=4"):
        assert way_out in problem
    assert not (tmp_path / "parcel.tar").exists()
    assert pack(project, tmp_path / "parcel.tar", most_megabytes=4)[1] == ""


def test_a_file_that_cannot_be_read_is_a_sentence_and_no_parcel(project: Path, tmp_path: Path) -> None:
    """That of the kernel only takes what is written to it, from root too."""
    (project / "token").symlink_to("/proc/sys/vm/drop_caches")
    _, problem = pack(project, tmp_path / "parcels/parcel.tar")
    assert f"{project}/token cannot be read or written here: Permission denied." in problem
    assert "-e leave_out=" in problem
    assert list((tmp_path / "parcels").iterdir()) == []
    assert pack(project, tmp_path / "parcel.tar", leave_out=("token",))[1] == ""


def send(project: Path, run: Path, **more: Any) -> str:
    """Pack and unpack; the names of those that stay there as they are."""
    parcel = run.with_suffix(".tar")
    pack(project, parcel, **more)
    words = [TOOLS / "unpack", parcel, run, project]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def test_another_project_does_not_go_on_from_checkpoints_of_the_first(project: Path, tmp_path: Path) -> None:
    for name in ("id_ed25519", ".netrc"):
        (project / name).touch()
    run, other = tmp_path / "probe", tmp_path / "other"
    assert send(project, run) == send(project, run) == ""
    assert not {"id_ed25519", ".netrc"} & {path.name for path in (run / "code").iterdir()}
    other.mkdir()
    (other / "train.py").write_text("another")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        send(other, run)
    sentence = f"The run probe is that of {project}: give this one another name, -e run="
    assert refused.value.stderr.startswith(sentence)
    assert (run / "code/train.py").read_text() == "train.py"
    (run / "project").unlink()
    send(other, run)
    assert (run / "code/train.py").read_text() == "another"


def test_what_the_script_wrote_stays_and_what_is_gone_here_goes_there(project: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert send(project, run) == ""
    (run / "code/checkpoint-1").mkdir()
    (run / "code/checkpoint-1/model").touch()
    (project / "lib/model.py").rename(project / "lib/net.py")
    (project / "train.py").write_text("newer")
    os.utime(project / "train.py", (1, 1))  # a clock that is behind
    (project / "lib/run.sh").write_text("")
    (project / "lib/run.sh").chmod(0o750)
    assert send(project, run) == ""
    there = [(run / "code" / name).exists() for name in ("checkpoint-1/model", "lib/net.py", "lib/model.py")]
    assert there == [True, True, False]
    assert (run / "code/train.py").read_text() == "newer"
    assert (run / "code/lib/run.sh").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in run.iterdir()) == ["code", "project", "sent"]
    assert [path.stat().st_mode & 0o777 for path in (run, run / "code")] == [0o750, 0o750]


@pytest.mark.parametrize("controllers_clock", [-86400.0, 0.0, 86400.0])
def test_a_trial_runs_checkpoint_takes_no_place_of_the_clusters(
    project: Path, tmp_path: Path, controllers_clock: float
) -> None:
    """Whatever the clocks: nanoGPT writes out/ckpt.pt here and there."""
    run = tmp_path / "run"
    here, there = project / "out/ckpt.pt", run / "code/out/ckpt.pt"

    def trial(text: str) -> None:
        here.write_text(text)
        os.utime(here, (time.time() + controllers_clock, time.time() + controllers_clock))

    here.parent.mkdir()
    trial("trial, step 5")
    send(project, run)
    there.write_text("cluster, step 50000")
    (project / "train.py").write_text("edited")
    assert send(project, run) == "out/ckpt.pt"
    trial("trial, step 10")
    assert send(project, run) == "out/ckpt.pt"
    assert send(project, run, leave_out=("out",)) == ""
    here.unlink()
    send(project, run)
    assert there.read_text() == "cluster, step 50000"
    assert (run / "code/train.py").read_text() == "edited"


def test_what_is_no_file_there_any_more_stays(project: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (project / "out").write_text("")
    send(project, run)
    code = run / "code"
    (code / "train.py").rename(code / "other.py")
    (code / "train.py").symlink_to("other.py")
    (code / "out").unlink()
    (code / "out").mkdir()
    shutil.rmtree(code / "lib")
    (code / "lib").write_text("a file")
    assert send(project, run).split() == ["lib/model.py", "out", "train.py"]
    assert send(project, run, leave_out=("lib",)).split() == ["out", "train.py"]
    assert (code / "train.py").is_symlink() and (code / "lib").read_text() == "a file"


def test_what_an_interrupted_launch_put_there_is_not_the_scripts(project: Path, tmp_path: Path) -> None:
    run, parcel = tmp_path / "run", tmp_path / "run.tar"
    send(project, run)
    (project / "train.py").write_text("second")
    (project / "weights").write_bytes(bytes(1 << 20))
    pack(project, parcel)
    full = subprocess.run(
        ["bash", "-c", 'ulimit -f 512; exec "$@"', "-", TOOLS / "unpack", parcel, run, project],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (full.returncode, full.stderr) == (1, "[Errno 27] File too large\n")
    assert (run / "code/train.py").read_text() == "second"
    assert not (run / "code/weights").exists()
    (project / "train.py").write_text("third")
    assert send(project, run) == ""
    assert (run / "code/train.py").read_text() == "third"
    assert (run / "code/weights").stat().st_size == 1 << 20


def start(folder: Path, code: str, *words: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(code)
    environment = {
        **os.environ, "RANK": "2", "AURA_SCRIPT_RANKS": str(folder),
        "AURA_SCRIPT_PYTHON": sys.executable, "AURA_SCRIPT_CARDS": "GPU-1a",
    }  # fmt: skip
    return subprocess.Popen(
        [TOOLS / "run-rank", *(words or ["script.py"])], cwd=folder, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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


@pytest.mark.parametrize("torch_is_there", [False, True])
def test_the_last_traceback_is_kept_with_its_time(tmp_path: Path, torch_is_there: bool) -> None:
    code = """
import logging, time
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("handled")
try:
    {}["seed"]
except KeyError as error:
    began = time.time()
    print(began, flush=True)
    import atexit
    atexit.register(time.sleep, 1)
    raise ValueError("the batch is broken") from error
"""
    if torch_is_there:  # its own way to show what was not caught
        code = f"""
import sys, traceback
def shown(*what):
    for line in "".join(traceback.format_exception(*what)).splitlines():
        print("[rank2]:", line, file=sys.stderr)
sys.excepthook = shown
{code}"""
    status, out, errors = ended(tmp_path, code)
    said = record(tmp_path)
    assert (status, said["state"], said["exit"]) == (1, "failed", 1)
    assert "ZeroDivisionError" in errors  # it is in the journal, and no reason
    assert "KeyError: 'seed'" in said["tail"]
    assert said["tail"][-1] == "ValueError: the batch is broken"
    assert not any("ZeroDivisionError" in line for line in said["tail"])
    # Not when Python was through with tidying up: by then a victim may have failed, too.
    assert said["failed"] - float(out.split()[-1]) < 0.9 < said["ended"] - said["failed"]


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


def test_a_rank_that_is_told_to_stop_may_save(tmp_path: Path) -> None:
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


def test_a_rank_is_seen_while_it_runs(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; print('step 1', flush=True); time.sleep(60)")
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "2.json").exists() or record(tmp_path)["last"] != "step 1":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert record(tmp_path)["state"] == "running"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


def test_a_controller_without_the_trainers_wheels_says_how_they_come_back(tmp_path: Path) -> None:
    """The nodes have them from another one, or its cache was emptied."""
    words = [TOOLS / "resolve-requirements", tmp_path / "cache/script.tar", tmp_path / "wheelhouse-cpu"]
    done = subprocess.run([*words, "cpu", sys.executable, ""], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ansible-playbook site.yml --tags python_env" in done.stderr
    assert not any(tmp_path.iterdir())
