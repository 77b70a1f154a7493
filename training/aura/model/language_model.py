"""What a model is to the loop and to `aura sample`, whatever its family: token ids in, a loss or logits out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from aura.config import TrainConfig
from aura.families.known import FAMILIES
from aura.model.loss import LinearCrossEntropy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

KERNELS_OF_A_LENGTH = 4  # at the most: HRM-Text calls a block with gradients and without


# torch fills new layers with numbers that a model would only replace: half a minute for 2.5 billion of them.
class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        pass


class LanguageModel(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.seq_len, self.vocab_size, self.d_model = config.seq_len, config.vocab_size, config.d_model
        self.loss_chunk, self.gradient_checkpointing = config.loss_chunk, config.gradient_checkpointing
        self.is_compiled = False

    def begin(self, config: TrainConfig, device: torch.device | str) -> None:
        """All layers are there: their format, and their first numbers, but on the device "meta"."""
        self.to(DTYPES[config.parameter_format])
        if torch.device(device).type != "meta":
            self._initialise(config)

    @torch.no_grad()
    def _initialise(self, config: TrainConfig) -> torch.Generator:
        """The same numbers for the same seed, whatever the format and the number of unused rows. What goes on drawing
        draws from the generator."""
        generator = torch.Generator(next(self.parameters()).device).manual_seed(config.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            is_added = name.endswith(FAMILIES[config.family].projections)
            drawn = torch.empty(self._words(name, parameter).shape, device=parameter.device)
            # As GPT-2, 1/sqrt(number of additions) for what is added to the residual stream.
            self._draw(drawn, 0.02 / math.sqrt(2 * config.layers if is_added else 1), generator)
            if is_added and config.zero_projections:
                drawn.zero_()  # as many numbers have been drawn
            parameter.zero_()[: len(drawn)].copy_(drawn)
        return generator

    def _draw(self, matrix: Tensor, std: float, generator: torch.Generator) -> None:
        matrix.normal_(std=std, generator=generator)

    def begin_step(self, step: int, steps: int) -> None:
        """What follows is computed for this step (from 0) of so many."""

    def before_logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids (batch, time) to hidden states (batch, time, d_model), and the matrix (rows, d_model) that makes
        logits of them."""
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, time) to logits (batch, time, vocab_size)."""
        return self._logits(*self.before_logits(tokens))

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        # The unused rows are no words: they take no part in the softmax.
        return functional.linear(hidden, weight)[..., : self.vocab_size]

    def loss_sum(self, tokens: Tensor, targets: Tensor, gradient_scale: Tensor | None = None) -> Tensor:
        """Cross-entropy in nats, in fp32, summed over the batch * time targets.

        gradient_scale: what the result is multiplied with before its backward pass (loss scaling).
        """
        hidden, weight = self.before_logits(tokens)
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if not torch.is_grad_enabled():
            parts = zip(self._pieces(hidden), self._pieces(targets), strict=True)
            return torch.stack([self._cross_entropy(part, weight, wanted) for part, wanted in parts]).sum()
        hidden = as_matrix_products_read(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            chunk = self.loss_chunk or len(targets)
            return LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
                hidden, weight, targets, self.vocab_size, chunk, gradient_scale, self.is_compiled
            )

    def _cross_entropy(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self._logits(hidden, weight).float(), targets, reduction="sum")

    def _pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return torch.split(tensor, self.loss_chunk or len(tensor))

    def through(self, block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`block(*inputs)`; with gradient_checkpointing nothing of what it computes on the way stays in memory for the
        backward pass."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def compile_blocks(self, lengths: int = 1) -> None:
        """From now on torch.compile makes the kernels of training: of a block, once for all that are alike, and of the
        loss. One graph of the whole model would keep the logits of several chunks at once, and all gradients of a
        micro-batch beside the sum of those before. lengths: how many different ones micro-batches may have."""
        self.is_compiled = True
        # Behind its limit of 8 torch would go on without kernels.
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, KERNELS_OF_A_LENGTH * lengths)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, limits.recompile_limit)
        for block in self.blocks():
            block.forward = _by_kernels_while_training(block)

    def blocks(self) -> Iterable[nn.Module]:
        """What `through` is called with."""
        raise NotImplementedError

    def parameter_count(self) -> int:
        """Without the rows of embedding and output matrix that are no words."""
        counted = (self._words(name, parameter) for name, parameter in self.named_parameters())
        return sum(rows.numel() for rows in counted)

    def _words(self, name: str, parameter: Tensor) -> Tensor:
        return parameter[: self.vocab_size] if name in self.vocabulary else parameter

    vocabulary: frozenset[str]  # the parameters that have a row for each word, and rows that are none


def _by_kernels_while_training(block: nn.Module) -> Callable[..., Tensor]:
    """Validation and samples have other shapes: kernels for each of them would take longer than they save."""
    eager = block.forward
    compiled = torch.compile(eager, dynamic=False)
    return lambda *inputs: (compiled if block.training else eager)(*inputs)


def as_matrix_products_read(x: Tensor) -> Tensor:
    """In autocast's format, where it is on: cast once, for all products that read it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
