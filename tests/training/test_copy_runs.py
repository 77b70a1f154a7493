"""What a run has finished is copied whole or not at all, and goes on where it stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aura.checkpoint import manifest
from aura.checkpoint import store as checkpoint
from aura.commands import copy_runs as command
from aura.copies import copy_runs, on_disk
from aura.errors import EXIT_OK, EXIT_TEMPORARY
from spanish import english_in


def save(run: Path, step: int, fill: float = 1.0, size: int = 1000) -> Path:
    tensors = {"weight": torch.full((size,), fill)}
    (run / "rank-0").mkdir(parents=True, exist_ok=True)
    return checkpoint.write(
        run / "checkpoints",
        f"checkpoint-step-{step}",
        tensors,
        {"weight.step": torch.zeros(1)},
        {"step": step},
    )


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs/first"
    save(run, 100)
    save(run, 200)
    (run / "final").mkdir()
    (run / "final/model.safetensors").write_bytes(b"model")
    (run / "final/config.json").write_bytes(b"{}")
    (run / "tokenizer.json").write_bytes(b"tokenizer")
    (run / "rank-0/status.json").write_bytes(b"{}")
    return run


@pytest.fixture
def copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def copy(*words: str) -> tuple[int, str]:
        code = command.main(
            [
                "--runs",
                str(tmp_path / "runs"),
                "--target",
                str(tmp_path / "share"),
                "--leave-free",
                "0",
                *words,
            ]
        )
        return code, capsys.readouterr().out

    return copy


def test_what_is_finished_is_copied_once(
    run: Path, tmp_path: Path, copy: Callable[..., tuple[int, str]]
) -> None:
    (run / "checkpoints/checkpoint-step-300.tmp-1").mkdir()
    (run / "checkpoints/damaged-checkpoint-step-400").mkdir()
    code, said = copy()
    assert code == EXIT_OK
    assert "checkpoint-step-200: 0.0 MB copied" in said
    share = tmp_path / "share/first"
    names = {"checkpoint-step-100", "checkpoint-step-200"}
    assert {path.name for path in (share / "checkpoints").iterdir()} == names
    for name in names:
        manifest.verify(share / "checkpoints" / name)
        assert tree(share / "checkpoints" / name) == tree(run / "checkpoints" / name)
    assert tree(share / "final") == tree(run / "final")
    assert (share / "tokenizer.json").read_bytes() == b"tokenizer"
    assert not (share / "rank-0").exists()

    before = {path: path.stat().st_mtime_ns for path in share.rglob("*")}
    # Nothing is written again, and what the run keeps stays.
    assert copy("--keep", "0") == (EXIT_OK, "")
    assert {path: path.stat().st_mtime_ns for path in share.rglob("*")} == before


def test_what_has_changed_is_copied_again(
    run: Path, tmp_path: Path, copy: Callable[..., tuple[int, str]]
) -> None:
    copy()
    shutil.rmtree(run / "checkpoints/checkpoint-step-200")
    save(run, 200, fill=2.0)  # the same step, computed again
    (run / "final/model.safetensors").write_bytes(b"trained longer")
    (run / "training_log.csv").write_bytes(b"1,2,3\n")
    copy()
    share = tmp_path / "share/first"
    assert tree(share / "checkpoints") == tree(run / "checkpoints")
    assert tree(share / "final") == tree(run / "final")
    assert (share / "training_log.csv").read_bytes() == b"1,2,3\n"
    assert not [path for path in share.rglob(".*")]


def test_a_killed_copy_is_invisible_and_goes_on_where_it_stopped(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    save(run, 300, size=10 << 20)  # 40 MB
    share = tmp_path / "share"
    command = [
        *(
            sys.executable,
            "-m",
            "aura",
            "copy-runs",
            "--runs",
            str(tmp_path / "runs"),
            "--target",
            str(share),
        ),
        *("--leave-free", "0"),
    ]
    process = subprocess.Popen([*command, "--rate", "10"])
    deadline = time.monotonic() + 120
    while not any(
        path.stat().st_size >= on_disk.CHUNK for path in share.rglob(".checkpoint-step-300.*/model*")
    ):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (share / "first/checkpoints/checkpoint-step-300").exists()
    (part,) = share.rglob(".checkpoint-step-300.*/model*")
    begun = part.stat()
    assert 0 < begun.st_size < (run / "checkpoints/checkpoint-step-300/model.safetensors").stat().st_size
    # A byte that did not arrive as it was.
    with part.open("r+b") as file:
        file.write(b"\xff")
    subprocess.run(command, check=True)
    whole = share / "first/checkpoints/checkpoint-step-300"
    manifest.verify(whole)
    assert (whole / "model.safetensors").stat().st_ino == begun.st_ino
    assert not list(share.rglob(".*"))


def test_what_is_damaged_is_not_copied(
    run: Path, tmp_path: Path, copy: Callable[..., tuple[int, str]]
) -> None:
    with (run / "checkpoints/checkpoint-step-200/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    (run / "checkpoints/checkpoint-step-100/manifest.json").write_text("{}")
    good = save(run, 50)
    code, said = copy()
    assert code == EXIT_OK
    assert "REFUSED" in said
    assert "the checksum of model.safetensors differs" in said
    share = tmp_path / "share/first/checkpoints"
    assert [path.name for path in share.iterdir()] == [good.name]


def test_older_ones_go_only_after_a_newer_one_has_come(
    run: Path, tmp_path: Path, copy: Callable[..., tuple[int, str]]
) -> None:
    checkpoints, share = run / "checkpoints", tmp_path / "share/first/checkpoints"

    def there() -> set[int]:
        return {manifest.step_of(path) for path in manifest.checkpoints(share)}

    for step in (300, 400):
        copy("--keep", "2")
        save(run, step)
        shutil.rmtree(checkpoints / f"checkpoint-step-{step - 200}")
        os.utime(share / f"checkpoint-step-{step - 200}", (step, step))  # it has come earlier
    copy("--keep", "2")
    assert there() == {300, 400}
    # A disk that was lost takes no copy with it, and neither does a new beginning.
    shutil.rmtree(checkpoints)
    copy("--keep", "1")
    assert there() == {300, 400}
    save(run, 10)
    copy("--keep", "2")
    assert 10 in there()
    assert len(there()) == 2
    assert not list(share.glob(".*"))


def test_runs_of_which_rank_0_was_elsewhere_are_not_copied(
    run: Path, tmp_path: Path, copy: Callable[..., tuple[int, str]]
) -> None:
    shutil.move(run / "rank-0", run / "rank-1")
    (run.parent / "link").symlink_to(tmp_path)
    (tmp_path / "rank-0").mkdir()
    assert copy() == (EXIT_OK, "")
    assert not (tmp_path / "share").exists()


def test_a_target_that_cannot_be_written_is_for_later(
    run: Path, tmp_path: Path, copy: Callable[..., tuple[int, str]]
) -> None:
    (tmp_path / "share").write_text("not a directory")
    code, said = copy()
    assert code == EXIT_TEMPORARY
    assert "first cannot be copied now: " in said
    assert "tried again" in said
    (tmp_path / "share").unlink()
    code, said = copy("--leave-free", "1e9")
    assert code == EXIT_OK
    assert "shall stay free. Delete old runs there." in said
    assert not [path for path in (tmp_path / "share").rglob("*step*")]


def test_in_spanish(
    run: Path,
    tmp_path: Path,
    copy: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AURA_LANG", "es")
    (run / "checkpoints/checkpoint-step-200/state.json").write_text("{}")
    (tmp_path / "share").write_text("no directory")
    code, said = copy()
    assert code == EXIT_TEMPORARY
    assert "first no se puede copiar ahora: " in said and said.endswith(" Se intenta de nuevo.\n")
    (tmp_path / "share").unlink()
    said = copy("--leave-free", "1e9")[1]
    assert "tienen que quedar libres 1000000000.0 GB" in said
    said = copy()[1].replace(str(tmp_path), "")
    for words in ("MB copiados en 0 s.", "RECHAZADO: ", "y no se copia.", "final: copiado."):
        assert words in said, said
    assert not english_in(said), said


def test_a_slow_pace_is_kept() -> None:
    pace, began = copy_runs.Pace(1e6), time.monotonic()
    for _ in range(4):
        pace.passed(50_000)
    assert time.monotonic() - began >= 0.2


def test_copying_does_not_load_torch() -> None:
    script = "import sys, aura.commands.copy_runs; sys.exit(bool({'torch', 's3fs'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True)
