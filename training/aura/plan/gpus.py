"""What GPUs can do according to their makers, and what this machine has.

Standard library, and nvidia-ml-py where it is.

Peaks are dense matrix products (no sparsity), accumulated in fp32, and fp32 without TF32, as torch computes by default.
For the GeForce cards they follow from the GA102, AD102 and GB202 architecture papers: multiprocessors x 512 (half
precision) or 256 (fp32) operations per clock x boost clock. Turing has other rates, and is not in the table.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
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


GPUS = [
    _gpu("RTX 3050 Laptop", 4, 14.3, 7.1, "16 SM, 1.74 GHz"),  # the highest boost
    _gpu("RTX 3050", 8, 18.2, 9.1, "20 SM, 1.777 GHz"),
    _gpu("RTX 3060", 12, 25.5, 12.7, "28 SM, 1.78 GHz"),
    _gpu("RTX 3060 Ti", 8, 32.4, 16.2, "38 SM, 1.665 GHz"),
    _gpu("RTX 3070", 8, 40.6, 20.3, "46 SM, 1.725 GHz"),
    _gpu("RTX 3070 Ti", 8, 43.5, 21.7, "48 SM, 1.77 GHz"),
    _gpu("RTX 3080", 10, 59.5, 29.8, "68 SM, 1.71 GHz"),  # with 12 GB: 70
    _gpu("RTX 3080 Ti", 12, 68.2, 34.1, "80 SM, 1.665 GHz"),
    _gpu("RTX 3090", 24, 71.0, 35.6, "NVIDIA GA102 architecture paper", 0.45, "nanochat, issue 509"),
    _gpu("RTX 3090 Ti", 24, 80.0, 40.0, "84 SM, 1.86 GHz"),
    _gpu("RTX 4060", 8, 30.2, 15.1, "24 SM, 2.46 GHz"),
    _gpu("RTX 4060 Ti", 8, 44.1, 22.1, "34 SM, 2.535 GHz"),
    _gpu("RTX 4070", 12, 58.3, 29.1, "46 SM, 2.475 GHz"),
    _gpu("RTX 4070 SUPER", 12, 71.0, 35.5, "56 SM, 2.475 GHz"),
    _gpu("RTX 4070 Ti", 12, 80.2, 40.1, "60 SM, 2.61 GHz"),
    _gpu("RTX 4070 Ti SUPER", 16, 88.2, 44.1, "66 SM, 2.61 GHz"),
    _gpu("RTX 4080", 16, 97.5, 48.7, "76 SM, 2.505 GHz"),
    _gpu("RTX 4080 SUPER", 16, 104.4, 52.2, "80 SM, 2.55 GHz"),
    _gpu("RTX 4090", 24, 165.2, 82.6, "NVIDIA AD102 architecture paper", 0.5, "nanoGPT, issue 182"),
    _gpu("RTX 5060", 8, 38.4, 19.2, "30 SM, 2.497 GHz"),
    _gpu("RTX 5060 Ti", 16, 47.4, 23.7, "36 SM, 2.572 GHz"),
    _gpu("RTX 5070", 12, 61.7, 30.9, "48 SM, 2.512 GHz"),
    _gpu("RTX 5070 Ti", 16, 87.9, 43.9, "70 SM, 2.452 GHz"),
    _gpu("RTX 5080", 16, 112.6, 56.3, "84 SM, 2.617 GHz"),
    _gpu("RTX 5090", 32, 209.5, 104.8, "170 SM, 2.407 GHz"),
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
    # Only the size of the memory may be left unsaid, where it leaves no choice.
    found = [gpu for gpu in GPUS if said <= _words(gpu.name) <= said | {"40gb", "80gb"} and said]
    if len(found) == 1:
        return found[0]
    names = [gpu.name for gpu in GPUS]
    if found:
        raise ConfigError("gpu_ambiguous", name=name, names=", ".join(gpu.name for gpu in found))
    raise ConfigError("gpu_unknown", name=name, hint=did_you_mean(name, names), names=", ".join(names))


def called(name: str, memory: float) -> Gpu:
    """The GPU that the driver calls so, with the memory that it has [bytes]; without a peak when unknown."""
    try:
        return replace(find(name), memory=memory)
    except ConfigError:
        return Gpu(name, memory, {}, text("not_in_the_table"))


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
    words = re.findall(r"[a-z0-9]+", name.lower().replace("rtx", " ").replace(" gb", "gb"))
    return {word for word in words if not re.fullmatch(r"nvidia|geforce|gpu|sxm\d?|hbm\w*", word)}


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
