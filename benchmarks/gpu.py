"""`make bench-gpu`: speed and memory of the presets on one GPU, in at most ten minutes.

    speed    gpt2 and gpt2-medium in bf16, `aura train` and reference_loop.py, eager and compiled
    filling  presets as they are, and with the micro-batches that micro_batch=auto gives them on this card
    memory   the low-memory presets and aura-72h-max, each under a hard limit of what torch may allocate

`aura train` runs as it is (limited_train.py only limits and ends it), on made-up text: what the tokens say does not
change how long they take. FLOPs per token are 6 N + 12 L d T (Chowdhery et al. 2022, PaLM, appendix B; N without
the positions, which are looked up). MFU is relative to the dense bf16 peak of the GPU. What there is no time for, or
what does not fit, says so in its row. Every figure goes to bench-results/gpu.json.
"""

from __future__ import annotations

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
from measuring import HERE, QUIET, Settings, corpus_of, flags, options, plain_command, show, write_results

NO_GPU = 3  # the exit code without one
TIME_LIMIT = 590.0  # seconds for everything

# 65,536 tokens per step. Small enough for 80 GB without chunks of the loss.
COMMON = {"precision": "bf16", "gradient_checkpointing": "false", "loss_chunk": 0, "seq_len": 1024}
SPEED: dict[str, Settings] = {
    "gpt2": {**COMMON, "batch_size": 32, "gradient_accumulation_steps": 2},
    "gpt2-medium": {**COMMON, "batch_size": 16, "gradient_accumulation_steps": 4},
}
REFERENCE_STEPS = {"gpt2": 50, "gpt2-medium": 25}
# A step of qwen3-350m has a million tokens: with two sequences at once it would take all the time there is.
FILLED: dict[str, Settings] = {"gpt2-medium": {}, "gpt2": {}, "qwen3-350m": {"global_batch_tokens": 65_536}}
LIMITS = {"gpt2-medium-10gb": 10, "gpt2-medium-6gb": 6, "gpt2-medium-4gb": 4, "aura-72h-max": 80}


@dataclass
class Row:
    preset: str
    loop: str
    mode: str
    settings: Settings
    tokens_per_second: float | None = None
    mfu: float | None = None  # of 1
    peak_gigabytes: float | None = None  # reserved by torch's allocator [10^9 bytes]
    limit_gigabytes: float | None = None
    note: str = ""

    def cells(self) -> list[str]:
        speed = (self.tokens_per_second, ",.0f"), (self.mfu, ".1%")
        memory = (self.peak_gigabytes, ".2f"), (self.limit_gigabytes, "g")
        figures = ("" if value is None else format(value, form) for value, form in (*speed, *memory))
        return [self.preset, self.loop, self.mode, *figures, self.note]


def mfu(tokens_per_second: float, config: TrainConfig) -> float | None:
    """Of the dense bf16 peak in the plan's table; None for a GPU that is not in it."""
    device = torch.cuda.get_device_properties()
    peak = gpus.called(device.name, device.total_memory).peak.get("bf16")
    return peak and tokens_per_second * flops_per_token(config) / peak


def write_made_up_text(file: Path) -> None:
    """About seven million tokens."""
    rng = random.Random(0)  # noqa: S311 - no secret
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(5000)]
    paragraphs = (" ".join(rng.choices(words, k=600)) for _ in range(4000))
    file.write_text("\n\n".join(paragraphs), encoding="utf-8")


def command_of(row: Row, corpus: Path, run_dir: Path) -> list[str]:
    """Its last line is JSON."""
    if row.loop == "reference":
        steps = f"--stop-after={REFERENCE_STEPS[row.preset]}"
        return plain_command(row.preset, corpus, row.settings, "--warm-up=4", steps)
    command = [sys.executable, str(HERE / "limited_train.py"), f"--run-dir={run_dir}"]
    if row.limit_gigabytes:
        command += [f"--gigabytes={row.limit_gigabytes}", "--warm-up=1"]
    settings = {**QUIET, **row.settings, "steps": 10**6}
    return [*command, "--", f"--preset={row.preset}", f"--corpus={corpus}", *flags(settings)]


def measure(row: Row, command: list[str], seconds: float) -> None:
    """Run the command and fill the row with what it measured or why not."""
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
    config = resolve(row.preset, row.settings)
    tokens = (last_step - first_step) * sum(config.shares(1)) * config.seq_len
    row.tokens_per_second = tokens / (end - begin)
    row.peak_gigabytes = report["peak_reserved"] and report["peak_reserved"] / 1e9
    row.mfu = mfu(row.tokens_per_second, config)


def plan() -> list[Row]:
    """What is most worth knowing first."""
    rows = [
        Row(preset, loop, mode, {**SPEED[preset], "compile": str(mode == "compiled").lower()})
        for mode in ("compiled", "eager")
        for preset in SPEED
        for loop in ("ours", "reference")
    ]
    filled = [
        Row(name, "ours", f"micro_batch={value}", {**settings, "micro_batch": value})
        for name, settings in FILLED.items()
        for value in ("batch_size", "auto")
    ]
    as_asked = {"micro_batch": "batch_size"}  # auto would fill the card, whatever the limit
    limited = [
        Row(name, "ours", "preset's", as_asked, limit_gigabytes=limit) for name, limit in LIMITS.items()
    ]
    return [*rows[:4], *filled, *limited, *rows[4:]]


def main() -> int:
    options(__doc__, text=False).parse_args()
    if not torch.cuda.is_available():
        print("make bench-gpu needs an NVIDIA GPU, and torch sees none on this machine.", file=sys.stderr)
        return NO_GPU
    deadline, device, rows = time.monotonic() + TIME_LIMIT, torch.cuda.get_device_name(), plan()
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory, "text.txt")
        write_made_up_text(text)
        with corpus_of(text, 4096, validation=0.01) as corpus:
            for number, row in enumerate(rows):
                print(f"{row.preset}, {row.loop}, {row.mode} …", flush=True)
                command = command_of(row, corpus, Path(directory, f"run-{number}"))
                measure(row, command, deadline - time.monotonic())
    words, figures = ("preset", "loop", "mode", "note"), ("tokens/s", "MFU", "peak GB", "limit GB")
    show(
        f"bf16 training on one {device}",
        (*words[:3], *figures, words[3]),
        [row.cells() for row in rows],
        words,
    )
    file = write_results("gpu", {"device": device, "rows": [asdict(row) for row in rows]})
    print(f"Every figure: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
