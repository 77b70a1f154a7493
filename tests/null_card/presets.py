"""The memory of every preset's step on the null card (card.c), beside the plan: `make null-card` prints the table.

It proves what torch's allocator holds at the most, whether that is below the card, how often the host waits and how
much is compiled, with the real CUDA build of torch. It proves neither a number nor a time, nor what a real driver keeps
for itself. x86-64, gcc, and 5 GB for torch's CUDA build in an environment of its own, which nothing else uses:
$NULL_CARD_VENV, or .venv/null-card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from aura.corpus.prepare import build
from aura.corpus.sources import LocalFiles
from aura.corpus.work import Settings
from torch.distributed.elastic.utils.distributed import get_free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GIB = 2**30
T = TypeVar("T")
STEPS, STEPS_OF_RUN = 3, 9
# [GiB] The smallest card that a preset names; where it names none, one of the guides', and for gpt2-nano any.
CARDS = {
    "gpt2-nano": 4,
    "gpt2": 12,
    "gpt2-medium": 12,
    "gpt2-medium-10gb": 10,
    "gpt2-medium-6gb": 6,
    "gpt2-medium-4gb": 4,
    "qwen3-nano": 4,
    "qwen3-125m": 6,
    "qwen3-350m": 10,
    "qwen3-1b": 24,
    "hrm-text-100m": 80,
    "hrm-text-1b": 80,
    "aura-72h-extended": 80,
    "aura-72h-max": 80,
}


@dataclass(frozen=True)
class NullCard:
    python: Path  # of an environment with torch's CUDA build
    folder: Path  # for the libraries, a corpus, and what is compiled

    def build(self) -> None:
        (include,) = self.python.parents[1].glob("lib/python3*/site-packages/triton/backends/nvidia/include")
        library = self.folder / "libcuda.so.1"
        words = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*words, "-o", library, HERE / "card.c", "-lpthread"], check=True)
        (self.folder / "libnvidia-ml.so.1").symlink_to(library.name)
        text = self.folder / "text.txt"
        docs = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md"))
        # No document twice.
        text.write_text("".join(docs.replace("\n\n", f"\n\n{copy} ") for copy in range(6)))
        settings = Settings(vocab_size=300, validation_fraction=0.1)
        build(LocalFiles([text]), self.folder / "corpus", settings)

    def step(
        self, preset: str, gib: float, *flags: str, last: int = STEPS, of_rank: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Two accumulation steps: the second micro-batch is computed beside the gradients of the first. of_rank:
        variables of one of several."""
        words = f"--steps {STEPS_OF_RUN} --gradient-accumulation-steps 2 --validation-windows 80"
        words += " --allow-dataset-oversubscription true --micro-batch batch_size"
        with tempfile.TemporaryDirectory() as run:
            command = [self.python, HERE / "step.py", str(last), "train", "--corpus", self.folder / "corpus"]
            command += ["--run-dir", f"{run}/run", "--preset", preset, *words.split(), *flags]
            return self.run(gib, command, of_rank or {})

    def run(
        self, gib: float, command: Sequence[str | Path], variables: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        lib = str(self.folder)
        environment = os.environ | {
            "LD_PRELOAD": f"{lib}/libcuda.so.1",
            "LD_LIBRARY_PATH": lib,
            "TRITON_LIBCUDA_PATH": lib,
            "TRITON_CACHE_DIR": f"{lib}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{lib}/inductor",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "NULL_CARD_BYTES": str(int(gib * GIB)),
            "PYTHONPATH": str(ROOT / "training"),
            "AURA_LANG": "en",
            **variables,
        }
        return subprocess.run(command, env=environment, text=True, capture_output=True, check=False)

    def row(
        self, preset: str, gib: float, *flags: str, of_rank: dict[str, str] | None = None
    ) -> dict[str, Any]:
        done = self.step(preset, gib, *flags, of_rank=of_rank)
        if done.returncode:
            raise RuntimeError(f"{preset} {flags}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def rows_of_two(self, preset: str, gib: float, *flags: str) -> list[dict[str, Any]]:
        return of_two(lambda rank: self.row(preset, gib, "--join-timeout", "60", *flags, of_rank=rank))

    def runs_of_two(self, preset: str, gib: float, *flags: str) -> list[subprocess.CompletedProcess[str]]:
        """To their end."""
        words = ("--join-timeout", "60", *flags)
        return of_two(lambda rank: self.step(preset, gib, *words, last=STEPS_OF_RUN + 1, of_rank=rank))


def of_two(act: Callable[[dict[str, str]], T]) -> list[T]:
    """Two ranks as if on two nodes, with gloo between them; `act` gets a rank's variables."""
    together = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
    }
    ranks = [together | {"RANK": str(rank), "AURA_NODE": f"node{rank}"} for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(act, ranks))


def installed() -> Path:
    """The environment's python; installed by the hashes of the lock files where it is not there."""
    venv = Path(os.environ.get("NULL_CARD_VENV") or ROOT / ".venv/null-card")
    python = venv / "bin/python"
    if not (venv / "complete").exists():
        uv = Path(sys.executable).with_name("uv")
        locks = [f"-r{ROOT}/requirements/{name}.txt" for name in ("node", "torch-cu130")]
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, venv], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", python, "--require-hashes", *locks]
        subprocess.run(install, check=True)
        (venv / "complete").touch()
    return python


def table(card: NullCard) -> Iterator[str]:
    kinds = (f"{kind}: plan, peak, reserved" for kind in ("eager", "compiled"))
    yield f"| preset, card | micro-batch | {' | '.join(kinds)} | graphs | waits |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for preset, gib in CARDS.items():
        eager, compiled = (card.row(preset, gib, "--compile", kind) for kind in ("false", "true"))
        cells = [f"{preset}, {gib} GiB", str(eager["batch"])]
        for one in (eager, compiled):
            cells.append(", ".join(f"{one[what] / GIB:.2f}" for what in ("plan", "peak", "reserved")))
        cells += [str(compiled["graphs"]), f"{eager['waits']}, {compiled['waits']}"]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        null_card = NullCard(installed(), Path(folder))
        null_card.build()
        for line in table(null_card):
            print(line, flush=True)
