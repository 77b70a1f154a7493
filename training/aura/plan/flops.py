"""How much there is to compute for one token, and what part of a device's peak is reached. Standard library only."""

from __future__ import annotations

from aura.config import TrainConfig
from aura.families.known import FAMILIES
from aura.plan.gpus import Gpu
from aura.plan.shapes import parameter_count, shape_of
from aura.texts.console import text

EAGER = 1 / 1.85  # nanoGPT's README: torch.compile takes a step from 250 ms to 135 ms


def flops_per_token(config: TrainConfig, steps: range | None = None) -> int:
    """Forward and backward, the mean over these steps (from 0), or over the run.

    6 N + 12 layers d_model seq_len, N without what is only looked up: PaLM (Chowdhery et al. 2022), appendix B, as
    nanoGPT's estimate_mfu counts GPT-2. Where blocks are called several times, or without a gradient: of every call its
    forward pass, 2 N of the block and 4 d_model seq_len of attention, and twice that with a gradient. What is computed
    twice to save memory does not count.
    """
    shape = shape_of(config)
    forward, backward = _calls(config, steps)
    outside_matrices = parameter_count(config) - shape.looked_up - shape.layers * shape.in_matrices
    return round((forward + 2 * backward) * _forward_of_the_blocks(config)) + 6 * outside_matrices


def recomputed_flops_per_token(config: TrainConfig) -> int:
    """The forward work of the blocks, where it is done a second time because its results were not kept."""
    return round(config.gradient_checkpointing * _calls(config)[1] * _forward_of_the_blocks(config))


def _calls(config: TrainConfig, steps: range | None = None) -> tuple[float, float]:
    return FAMILIES[config.family].calls(config, steps or range(config.steps))


def _forward_of_the_blocks(config: TrainConfig) -> int:
    """Of each once."""
    return config.layers * (2 * shape_of(config).in_matrices + 4 * config.d_model * config.seq_len)


def update_flops(config: TrainConfig) -> int:
    """Of one optimizer step, where they count: Muon's five iterations, of m x n each 4 m m n + 2 m m m, m the smaller
    one."""
    if config.optimizer != "muon":
        return 0
    work = 0
    for matrix in shape_of(config).matrices:
        short, long = sorted((matrix.rows // matrix.parts, matrix.columns))
        work += matrix.parts * (4 * short * short * long + 2 * short**3)
    return config.layers * 5 * work


def update_flops_of_a_rank(config: TrainConfig, ranks: int) -> float:
    """Of so many owners each does a part; with rounds each rank updates everything."""
    return update_flops(config) / (1 if config.strategy == "rounds" else ranks)


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
