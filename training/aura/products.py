"""Matrix products in fp32 on the processor.

torch has MKL make them. oneDNN, which torch has as well, takes half as long on an AMD processor with AVX-512, which MKL
probably does without there (docs/benchmarks.md). Both round each multiplication and addition to fp32; they add up in
another order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def onednn_is_faster(cpuinfo: str) -> bool:
    """Of the processor alone, so that a run that is resumed on it gets the same numbers."""
    lines = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    of = {name.strip(): value.split() for name, value in lines.items()}
    return of.get("vendor_id") == ["AuthenticAMD"] and "avx512f" in of.get("flags", [])


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


ONEDNN = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and onednn_is_faster(_cpuinfo())
)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (n, m) times b (m, k), without a gradient."""
    return _onednn(a, b.t()) if _is_for_onednn(a, b) else a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., m) times the transpose of weight (k, m), plus bias (k,): (..., k)."""
    if _is_for_onednn(x, weight) and not torch.is_autocast_enabled("cpu"):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return functional.linear(x, weight, bias)


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    return ONEDNN and a.device.type == "cpu" and a.dtype == b.dtype == torch.float32


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        # Of oneDNN's own operator, torch.compile takes only what is never trained.
        return torch.ops.aura.linear(x, weight, bias)
    return _called(x, weight, bias)


def _called(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


_library = torch.library.Library("aura", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("linear", _called, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("aura::linear")  # type: ignore[untyped-decorator]
def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            product(flat, weight).view(x.shape) if wants_x else None,
            product(flat.t(), x.reshape(-1, x.shape[-1])) if wants_weight else None,
            flat.sum(0) if wants_bias else None,
        )
