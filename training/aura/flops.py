"""How much there is to compute for one token, and what part of a device's peak is reached. Standard library only."""

from __future__ import annotations

from aura.config import TrainConfig
from aura.gpus import Gpu
from aura.memory import parameter_count, rows

EAGER = 1 / 1.85  # nanoGPT's README: torch.compile takes a step from 250 ms to 135 ms


def flops_per_token(config: TrainConfig) -> int:
    """Forward and backward: 6 N + 12 layers d_model seq_len, N without the position embedding.

    PaLM (Chowdhery et al. 2022), appendix B, as nanoGPT's estimate_mfu counts it. What is computed twice to save
    memory does not count.
    """
    n = parameter_count(config) - config.seq_len * config.d_model
    return 6 * n + 12 * config.layers * config.d_model * config.seq_len


def recomputed_flops_per_token(config: TrainConfig) -> int:
    """The forward work that is done a second time, because its results were not kept."""
    d, blocks = config.d_model, 0
    if config.gradient_checkpointing:
        blocks = config.layers * (24 * d * d + 4 * d * config.seq_len)
    return blocks + (2 * rows(config) * d if config.loss_chunk else 0)


def update_flops(config: TrainConfig) -> int:
    """Of one optimizer step, where they count: Muon's iterations. The matrices of a block are (3 of) d x d, d x d,
    4d x d and d x 4d; of m x n, an iteration takes 4 m m n + 2 m m m."""
    if config.optimizer != "muon":
        return 0
    return config.layers * 5 * (4 * 6 + 2 * 18) * config.d_model**3


def utilisation(config: TrainConfig, gpu: Gpu, given: float | None) -> tuple[float, str]:
    """The part of the peak that is reached, and the sentence that says where the number comes from."""
    if given is not None:
        return given, f"{given:.0%} of that are reached (--mfu)."
    if config.compile or not gpu.is_gpu:
        return gpu.mfu, f"{gpu.mfu:.0%} of that are reached ({gpu.mfu_source})."
    reached = gpu.mfu * EAGER
    return reached, (
        f"{reached:.0%} of that are reached: {gpu.mfu:.0%} with torch.compile ({gpu.mfu_source}), which takes 1/1.85 "
        "of the time without it (nanoGPT's README). --mfu says it better, once measured."
    )
