"""How much there is to compute for one token, and what part of a device's peak is reached. Standard library only."""

from __future__ import annotations

from aura.config import TrainConfig
from aura.plan.gpus import Gpu
from aura.plan.memory import parameter_count
from aura.texts.console import text

EAGER = 1 / 1.85  # nanoGPT's README: torch.compile takes a step from 250 ms to 135 ms


def flops_per_token(config: TrainConfig) -> int:
    """Forward and backward: 6 N + 12 layers d_model seq_len, N without the position embedding.

    PaLM (Chowdhery et al. 2022), appendix B, as nanoGPT's estimate_mfu counts it. What is computed twice to save
    memory does not count.
    """
    n = parameter_count(config) - config.seq_len * config.d_model
    return 6 * n + 12 * config.layers * config.d_model * config.seq_len


def recomputed_flops_per_token(config: TrainConfig) -> int:
    """The forward work of the blocks, where it is done a second time because its results were not kept."""
    d = config.d_model
    return config.layers * (24 * d * d + 4 * d * config.seq_len) if config.gradient_checkpointing else 0


def update_flops(config: TrainConfig) -> int:
    """Of one optimizer step, where they count: Muon's iterations. The matrices of a block are (3 of) d x d, d x d,
    4d x d and d x 4d; of m x n, an iteration takes 4 m m n + 2 m m m."""
    if config.optimizer != "muon":
        return 0
    return config.layers * 5 * (4 * 6 + 2 * 18) * config.d_model**3


def utilisation(config: TrainConfig, gpu: Gpu, given: float | None) -> tuple[float, str]:
    """MFU: flops_per_token's part of the peak; and the sentence that says where the number comes from.

    `given` is what the live line of such a run shows: what is computed twice has already lowered it.
    """
    if given is not None:
        return given, text("utilisation_given", reached=given)
    reached, why = gpu.mfu, []
    if gpu.is_gpu and config.compile == "false":
        reached *= EAGER
        why.append(text("utilisation_eager"))
    # What was reported for models of this size was reached without checkpointing (llm-foundry: MFU = HFU up to 3b).
    if recomputed := recomputed_flops_per_token(config):
        again = recomputed / flops_per_token(config)
        reached /= 1 + again
        why.append(text("utilisation_recomputed", again=again))
    source = gpu.mfu_source or text("utilisation_not_reported")
    if why:
        source = "; ".join([f"{gpu.mfu:.0%}: {source}", *why])
    return reached, text("utilisation_assumed", reached=reached, source=source)
