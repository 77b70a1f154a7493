"""Cross-entropy of a linear output layer, with the gradients made on the way.

The plain way keeps all logits for the backward pass, and there computes with them again. Here each piece of the
logits lives only until its part of the gradients is known, as in the Liger kernels (Hsu et al., 2024).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunk: int,
        gradient_scale: Tensor | None,
        compiled: bool = False,
    ) -> Tensor:
        """Summed over the targets, in nats and fp32.

        hidden (n, d_model), weight (rows, d_model) of which only the first `vocab_size` are words, targets (n,). The
        matrix products are those of hidden's format; weight may have a wider one, and its gradient has the same.
        chunk: targets at a time. gradient_scale: what the result will be multiplied with before its backward pass
        (fp16: a probability that is small by itself would become zero). compiled: let torch.compile write what is
        between the products. Not the loop: it would keep the logits of several pieces at once.
        """
        differences = _compiled_differences() if compiled else _differences
        narrow_weight = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        # Added up in bf16, small parts would be lost beside the sum of those before.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if chunk < len(hidden) else None
        total = torch.zeros((), device=hidden.device)
        for first in range(0, len(hidden), chunk):
            piece = slice(first, first + chunk)
            nats, narrow = differences(
                hidden[piece], narrow_weight, targets[piece, None], vocab_size, gradient_scale
            )
            total += nats
            grad_hidden[piece] = narrow @ narrow_weight
            if grad_weight is None:
                grad_weight = narrow.T @ hidden[piece]
            elif hidden.dtype == torch.float32:
                grad_weight.addmm_(narrow.T, hidden[piece])
            else:
                grad_weight += narrow.T @ hidden[piece]
            del narrow  # before the next piece needs the room
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.gradient_scale, ctx.dtype = gradient_scale, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grad if ctx.gradient_scale is None else grad / ctx.gradient_scale
        return grad_hidden.mul_(factor), grad_weight.mul_(factor).to(ctx.dtype), *[None] * 5


def _differences(
    hidden: Tensor, weight: Tensor, wanted: Tensor, vocab_size: int, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The summed loss of a piece, and the gradient of its logits (n, rows) in hidden's format. wanted: (n, 1)."""
    logits = (hidden @ weight.T).float()
    logits[:, vocab_size:] = -torch.inf
    log_p = torch.log_softmax(logits, dim=1)
    del logits
    nats = -log_p.gather(1, wanted)
    # The probabilities, less one at the target
    difference = log_p.exp_()
    difference.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=torch.float32))
    if scale is not None:
        difference.mul_(scale)
    return nats.sum(), difference.to(hidden.dtype)


def _fused_differences(
    hidden: Tensor, weight: Tensor, wanted: Tensor, vocab_size: int, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same, written so that a compiler makes one pass of it: no step of it needs to be kept."""
    logits = (hidden @ weight.T).float()
    column = torch.arange(logits.shape[1], device=logits.device)
    logits = torch.where(column < vocab_size, logits, -torch.inf)
    log_z = torch.logsumexp(logits, dim=1, keepdim=True)
    nats = log_z - logits.gather(1, wanted)
    difference = (logits - log_z).exp() - (column == wanted).float()
    if scale is not None:
        difference = difference * scale
    return nats.sum(), difference.to(hidden.dtype)


@cache
def _compiled_differences() -> Any:
    return torch.compile(_fused_differences, dynamic=False)
