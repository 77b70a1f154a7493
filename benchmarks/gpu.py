"""`make bench-gpu`: speed and memory of the presets on one GPU, in at most eight minutes.

    speed    gpt2 and gpt2-medium in bf16, `aura train` and reference_loop.py, eager and compiled
    memory   the low-memory presets and aura-72h-max, each under a hard limit of what torch may allocate

`aura train` runs as it is (limited_train.py only limits and ends it), on made-up text: what the tokens say does not
change how long they take. FLOPs per token are 6 N + 12 L d T (Chowdhery et al. 2022, PaLM, appendix B; N without
the positions, which are looked up). MFU is relative to the dense bf16 peak of the GPU. What there is no time for, or
what does not fit, says so in its row. Every figure goes to bench-results/gpu.json.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from aura.config import TrainConfig, resolve
from aura.plan import gpus
from aura.plan.flops import flops_per_token
from loops import HERE, QUIET, Settings, flags, run, write_results
from rich.console import Console
from rich.table import Table

NO_GPU = 3  # the exit code without one
TIME_LIMIT = 470.0  # seconds for everything

# 65,536 tokens per step. Small enough for 80 GB without chunks of the loss.
COMMON = {"precision": "bf16", "gradient_checkpointing": "false", "loss_chunk": 0, "seq_len": 1024}
SPEED: dict[str, Settings] = {
    "gpt2": {**COMMON, "batch_size": 32, "gradient_accumulation_steps": 2},
    "gpt2-medium": {**COMMON, "batch_size": 16, "gradient_accumulation_steps": 4},
}
REFERENCE_STEPS = {"gpt2": 50, "gpt2-medium": 25}
LIMITS = {"gpt2-medium-10gb": 10, "gpt2-medium-6gb": 6, "gpt2-medium-4gb": 4, "aura-72h-max": 80}


@dataclass
class Row:
    preset: str
    loop: str
    mode: str
    settings: Settings  # after those of SPEED
    tokens_per_second: float | None = None
    mfu: float | None = None  # of 1
    peak_gigabytes: float | None = None  # reserved by torch's allocator [10^9 bytes]
    limit_gigabytes: float | None = None
    note: str = ""


def mfu(tokens_per_second: float, config: TrainConfig) -> float | None:
    """Of the dense bf16 peak in the plan's table; None for a GPU that is not in it."""
    device = torch.cuda.get_device_properties()
    peak = gpus.called(device.name, device.total_memory).peak.get("bf16")
    return peak and tokens_per_second * flops_per_token(config) / peak


def made_up_corpus(directory: Path) -> Path:
    """About seven million tokens."""
    rng = random.Random(0)  # noqa: S311 - no secret
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(5000)]
    paragraphs = (" ".join(rng.choices(words, k=600)) for _ in range(4000))
    (directory / "text.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    corpus = directory / "corpus"
    command = [sys.executable, "-m", "aura", "prepare", "--input", str(directory / "text.txt")]
    run([*command, "--output", str(corpus), "--vocab-size", "4096"])
    return corpus


def measure(row: Row, command: list[str], seconds: float) -> None:
    """Run the command, whose last line is JSON, and fill the row with what it measured or why not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1, seconds), check=False)
    except subprocess.TimeoutExpired:
        row.note = "not measured: no time left"
        return
    lines = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        row.note = f"ended with {done.returncode}: {lines[-1] if lines else ''}"
        return
    report = json.loads(lines[-1])
    (first_step, begin), (last_step, end) = report["points"][0], report["points"][-1]
    config = resolve(row.preset, {**SPEED.get(row.preset, {}), **row.settings})
    tokens = (last_step - first_step) * sum(config.shares(1)) * config.seq_len
    row.tokens_per_second = tokens / (end - begin)
    row.peak_gigabytes = report["peak_reserved"] and report["peak_reserved"] / 1e9
    row.mfu = mfu(row.tokens_per_second, config)


def ours(row: Row, corpus: Path, directory: Path, seconds: float) -> None:
    run_dir = directory / f"run-{time.monotonic_ns()}"
    settings = {**QUIET, **SPEED.get(row.preset, {}), **row.settings, "steps": 10**6}
    words = ["--preset", row.preset, "--corpus", str(corpus), *flags(settings)]
    command = [sys.executable, str(HERE / "limited_train.py"), "--run-dir", str(run_dir)]
    if row.limit_gigabytes:
        command += ["--gigabytes", str(row.limit_gigabytes), "--warm-up", "1"]
    measure(row, [*command, "--", *words], seconds)


def reference(row: Row, corpus: Path, directory: Path, seconds: float) -> None:
    settings = {**SPEED[row.preset], **row.settings}
    command = [sys.executable, str(HERE / "reference_loop.py"), "--preset", row.preset]
    command += ["--corpus", str(corpus), "--warm-up", "4", "--stop-after", str(REFERENCE_STEPS[row.preset])]
    words = [f"{name}={value}" for name, value in settings.items()]
    measure(row, [*command, "--set", *words], seconds)


def plan() -> list[Row]:
    """What is most worth knowing first."""
    eager, compiled = {"compile": "false"}, {"compile": "true"}
    rows = [
        Row(preset, loop, "compiled" if settings is compiled else "eager", settings)
        for settings in (compiled, eager)
        for preset in SPEED
        for loop in ("ours", "reference")
    ]
    limited = [Row(name, "ours", "preset's", {}, limit_gigabytes=limit) for name, limit in LIMITS.items()]
    return [*rows[:4], *limited, *rows[4:]]


def table_of(rows: list[Row], device: str) -> Table:
    table = Table(title=f"bf16 training on one {device}")
    for heading in ("preset", "loop", "mode", "tokens/s", "MFU", "peak GB", "limit GB", "note"):
        table.add_column(
            heading, justify="left" if heading in ("preset", "loop", "mode", "note") else "right"
        )
    for row in rows:
        table.add_row(
            row.preset,
            row.loop,
            row.mode,
            "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            "" if row.mfu is None else f"{row.mfu:.1%}",
            "" if row.peak_gigabytes is None else f"{row.peak_gigabytes:.2f}",
            "" if row.limit_gigabytes is None else f"{row.limit_gigabytes:g}",
            row.note,
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if not torch.cuda.is_available():
        print("make bench-gpu needs an NVIDIA GPU, and torch sees none on this machine.", file=sys.stderr)
        return NO_GPU
    console, deadline = Console(), time.monotonic() + TIME_LIMIT
    device = torch.cuda.get_device_name()
    rows = plan()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        corpus = made_up_corpus(directory)
        for row in rows:
            console.print(f"{row.preset}, {row.loop}, {row.mode} …")
            of_loop = ours if row.loop == "ours" else reference
            of_loop(row, corpus, directory, deadline - time.monotonic())
    console.print(table_of(rows, device))
    console.print(
        f"Every figure: {write_results('gpu', {'device': device, 'rows': [asdict(r) for r in rows]})}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
