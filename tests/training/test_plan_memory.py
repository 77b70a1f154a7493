"""The memory model of `aura plan` against the tensors that are alive while a real step is computed, on the CPU.

The static part has to be exact. What a micro-batch keeps has to be right within 1 %, and the highest sum of everything
that is alive at one moment within 3 % (its temporary part from 5 % below to 20 % above the truth). On a GPU, attention
keeps the same things (its inputs, its output, one fp32 number per token and head), and LayerNorm reads and writes fp32
under autocast as it does here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aura.cluster.dist_env import DistEnv
from aura.cluster.ranks import Ranks
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import Corpus
from aura.corpus.sequences import Sequences
from aura.model.family import model_of
from aura.model.forward import autocast, validation_loss
from aura.optim.gradient_sum import GradientSum
from aura.optim.muon import optimizer_of
from aura.plan.memory import (
    GIB,
    Sizes,
    checkpoint_bytes,
    largest_micro_batch,
    memory_of,
    moment_bytes,
    parameter_bytes,
    settings_that_fit,
)
from aura.run.out_of_memory import out_of_memory
from aura.strategy.buckets import owners
from aura.strategy.owner_shard import OwnerShard
from aura.strategy.sharded import whole_matrices
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
# Where the logits are most of it; where a block is; where both count; where the copies of the weights do.
SHAPES = [
    {"layers": 4, "d_model": 64, "vocab_size": 4000, "seq_len": 64},
    {"layers": 3, "d_model": 64, "vocab_size": 100, "seq_len": 256},
    {"layers": 3, "d_model": 96, "vocab_size": 2000, "seq_len": 96},
    {"layers": 8, "d_model": 128, "vocab_size": 100, "seq_len": 16},
]
FORMATS = [  # precision, parameters, moments
    ("fp32", "fp32", "fp32"),
    ("bf16", "fp32", "fp32"),
    ("bf16", "fp32", "int8"),
    ("bf16", "fp32", "bf16"),
    ("bf16", "bf16", "int8"),
]


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, until they are freed."""

    def __init__(self, not_counted: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in not_counted}
        self.now = self.highest = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or size == 0:
            return
        self.known.add(key)
        self.now += size
        self.highest = max(self.highest, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


class Step:
    """What one optimizer step needs, made as aura/run/trainer.py makes it."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.model = config, model_of(config)
        self.optimizer = optimizer_of(self.model, config)
        self.gradients = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            parameter.grad = gradient
        self.tokens = torch.randint(config.vocab_size, (config.batch_size, config.seq_len))

    def static(self) -> list[Tensor]:
        return [*self.model.state_dict().values(), *self.gradients, *self.optimizer.tensors().values()]

    def loss(self) -> Tensor:
        with autocast(self.config, CPU):
            return self.model.loss_sum(self.tokens, self.tokens)


def made(shape: dict[str, Any], formats: tuple[str, str, str], **settings: Any) -> TrainConfig:
    names = ("precision", "parameter_format", "moment_format")
    fixed = {"heads": 4, "vocab_multiple": 64, "batch_size": 3}
    return resolve("gpt2-nano", fixed | shape | dict(zip(names, formats, strict=True)) | settings)


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize(
    ("formats", "optimizer"), [*((formats, "adamw") for formats in FORMATS), (FORMATS[0], "muon")]
)
def test_parameters_gradients_and_moments_are_exact(formats: tuple[str, str, str], optimizer: str) -> None:
    config = made(SHAPES[2], formats, vocab_size=2001, optimizer=optimizer)
    step = Step(config)
    step.loss().backward()
    step.optimizer.step(1e-3)
    predicted = memory_of(config, config.batch_size, on_gpu=False)
    assert predicted.parameters == nbytes(step.model.parameters()) == parameter_bytes(config)
    assert predicted.gradients == nbytes(step.gradients)
    assert predicted.moments == nbytes(step.optimizer.tensors().values()) == moment_bytes(config)
    assert checkpoint_bytes(config, 1) == predicted.parameters + predicted.moments


@pytest.mark.parametrize("preset", ["gpt2-medium", "gpt2-medium-4gb", "hrm-text-100m"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_owners_divide_the_moments(preset: str, optimizer: str) -> None:
    """On the device `meta`: what every rank of five allocates."""
    config = resolve(preset, {} if preset == "gpt2-medium-4gb" else {"optimizer": optimizer})
    model = model_of(config, "meta")
    parameters = dict(model.named_parameters())
    matrices = whole_matrices(model) if config.optimizer == "muon" else {}
    owned = owners({name: tuple(p.shape) for name, p in parameters.items()}, matrices, 5)
    predicted = memory_of(config, config.batch_size, on_gpu=False, ranks=5)
    for segments in owned:
        shard = OwnerShard(parameters, segments, set(matrices))
        held = optimizer_of(shard, config).tensors().values()
        assert predicted.moments == pytest.approx(sum(tensor.nbytes for tensor in held), rel=0.01)
        assert predicted.gradients - parameter_bytes(config) == pytest.approx(shard.gradient.nbytes, rel=0.01)
    alone = memory_of(config, config.batch_size, on_gpu=False)
    assert predicted.moments == pytest.approx(alone.moments / 5, rel=1e-3)


@pytest.mark.parametrize("formats", [FORMATS[0], FORMATS[1], FORMATS[4]])
@pytest.mark.parametrize("loss_chunk", [0, 128])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_the_backward_pass_keeps(
    formats: tuple[str, str, str], loss_chunk: int, checkpointing: bool
) -> None:
    shape = {"layers": 8, "d_model": 64, "vocab_size": 64, "seq_len": 256}
    config = made(shape, formats, loss_chunk=loss_chunk, gradient_checkpointing=checkpointing)
    step = Step(config)
    parameters = {p.untyped_storage()._cdata for p in step.model.parameters()}
    weights = {p.shape for p in step.model.parameters()}  # copies made by autocast are counted elsewhere
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_copy = tensor.shape in weights or tensor.t().shape in weights if tensor.dim() == 2 else False
        if storage._cdata not in parameters and not is_copy:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step.loss()
    loss.backward()
    predicted = Sizes(config, config.batch_size, on_gpu=False).kept
    assert predicted == pytest.approx(sum(saved.values()), rel=0.01)


MUONS = {"layers": 2, "d_model": 256, "vocab_size": 64, "seq_len": 16}
HRM = {"family": "hrm-text", "layers": 4, "vocab_multiple": 1}
QWEN = {"family": "qwen3", "kv_heads": 2}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("shape", "formats", "changes"),
    [
        *((SHAPES[0], formats, {}) for formats in FORMATS),
        *((shape, FORMATS[1], {}) for shape in SHAPES[1:]),
        (SHAPES[1], FORMATS[0], {}),
        (SHAPES[2], FORMATS[4], {}),
        # In the second micro-batch, whose gradients in bf16 are added to the first one's
        *((shape, FORMATS[4], {"gradient_accumulation_steps": 2}) for shape in SHAPES[:3]),
        # HRM-Text at its deepest, as most of a run is: logits, a call of a stack, the gradients of both stacks
        (SHAPES[0], FORMATS[1], HRM),
        (SHAPES[1], FORMATS[4], HRM),
        ({"d_model": 192, "vocab_size": 100, "seq_len": 16}, FORMATS[0], HRM | {"optimizer": "muon"}),
        # Qwen3: logits with the halves of a tied gradient, blocks in the formats, an output matrix of its own
        (SHAPES[0], FORMATS[1], QWEN),
        (SHAPES[1], FORMATS[0], QWEN),
        (SHAPES[1], FORMATS[4], QWEN),
        (SHAPES[2], FORMATS[1], QWEN | {"tied": "false"}),
        (SHAPES[3], FORMATS[1], QWEN),
        # The iterations of Muon, where little else is
        (MUONS, FORMATS[0], {"optimizer": "muon", "batch_size": 1}),
    ],
)
def test_the_highest_sum_of_what_is_alive(
    shape: dict[str, int], formats: tuple[str, str, str], changes: dict[str, Any], checkpointing: bool
) -> None:
    for loss_chunk in (0, 64):
        settings = {**shape, **changes, "loss_chunk": loss_chunk, "gradient_checkpointing": checkpointing}
        config = made(settings, formats)
        step = Step(config)
        if sums := "gradient_accumulation_steps" in changes:
            GradientSum(step.model, 0).begin_step(0)
            step.loss().backward()
        with Alive(step.static()) as alive:
            step.loss().backward()
            step.optimizer.step(1e-3)
        static = nbytes(step.static())
        predicted = memory_of(config, config.batch_size, on_gpu=False)
        assert predicted.total == pytest.approx(static + alive.highest, rel=0.03), loss_chunk
        assert sums or 0.95 <= (predicted.total - static) / alive.highest <= 1.2, loss_chunk
        assert predicted.moments == nbytes(step.optimizer.tensors().values())
        assert predicted.parameters == nbytes(step.model.parameters())
        assert shape is not MUONS or predicted.moment == "optimizer"


@pytest.mark.parametrize(
    ("preset", "eager", "compiled"),
    [
        ("gpt2", 5.205, 4.872),
        ("gpt2-medium", 7.192, 6.953),
        ("gpt2-medium-10gb", 6.629, 6.575),
        ("gpt2-medium-4gb", 2.419, 2.419),
        ("hrm-text-100m", 39.639, 33.510),
    ],
)
def test_a_step_on_a_gpu_needs_what_make_null_card_has_measured(
    preset: str, eager: float, compiled: float
) -> None:
    for kind, measured in (("false", eager), ("auto", eager), ("true", compiled)):
        config = resolve(preset, {"compile": kind})
        predicted = memory_of(config, largest_micro_batch(config), on_gpu=True).tensors
        assert predicted / GIB == pytest.approx(measured, rel=0.01), kind


def test_muon_gives_way_where_only_small_moments_fit() -> None:
    config = resolve("gpt2", {"optimizer": "muon", "batch_size": 1, "gradient_checkpointing": True})
    less = settings_that_fit(config, memory_of(config, 1, on_gpu=True).total * 0.8, on_gpu=True)
    assert less and less["optimizer"] == "adamw"


@pytest.mark.parametrize("capability", [(8, 6), (7, 5)])
def test_a_card_is_advised_what_it_can_do(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turing imitates bf16 only, and the next start would refuse it."""
    small = {"batch_size": 1, "gradient_checkpointing": True, "loss_chunk": 256, "micro_batch": "batch_size"}
    config = resolve("gpt2", {"optimizer": "adamw", "moment_format": "int8", "precision": "fp16", **small})
    least = replace(config, precision="bf16", parameter_format="bf16")
    total = int(memory_of(least, 1, on_gpu=True).total / 0.95) + 2**20
    card = SimpleNamespace(name="NVIDIA T4", total_memory=total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    alone = DistEnv(0, 0, 1, "", 0, "node0")
    said = out_of_memory(config, alone, torch.device("cuda", 0), tmp_path)
    assert ("--precision bf16" in said) is (capability == (8, 6))


def test_a_delay_gives_way_before_precision_does() -> None:
    small = {"batch_size": 1, "gradient_checkpointing": True, "loss_chunk": 256}
    config = resolve("gpt2", {"optimizer": "muon", "delay": 0.5, **small})
    strict = memory_of(replace(config, delay=0.0), 1, on_gpu=True, ranks=5).total
    assert settings_that_fit(config, strict, on_gpu=True, ranks=5) == {"delay": 0.0}
    assert settings_that_fit(config, 2**20, on_gpu=True, ranks=5) is None


def test_the_settings_that_fit_keep_the_tokens_of_a_step() -> None:
    medium = resolve("gpt2", {"batch_size": 12, "gradient_accumulation_steps": 2})
    needs = memory_of(medium, 12, on_gpu=True).total
    assert settings_that_fit(medium, needs, on_gpu=True) == {}
    less = settings_that_fit(medium, 3 * 2**30, on_gpu=True)
    assert less is not None
    smaller = resolve("gpt2", {"batch_size": 12, "gradient_accumulation_steps": 2, **less})
    assert smaller.shares(1) == medium.shares(1)
    assert memory_of(smaller, largest_micro_batch(smaller), on_gpu=True).total <= 3 * 2**30
    assert settings_that_fit(medium, 2**29, on_gpu=True) is None


def test_every_divisor_of_the_micro_batch_is_tried_and_what_is_kept_is_kept() -> None:
    odd = resolve("gpt2", {"batch_size": 9, "gradient_accumulation_steps": 2, "loss_chunk": 128})
    third = memory_of(replace(odd, batch_size=3, gradient_checkpointing=True), 3, on_gpu=True).total
    less = settings_that_fit(odd, third, on_gpu=True)
    assert less == {"gradient_checkpointing": True, "batch_size": 3, "gradient_accumulation_steps": 6}
    kept = settings_that_fit(odd, third, on_gpu=True, keep={"batch_size"})
    assert kept is None or not {"batch_size", "gradient_accumulation_steps"} & set(kept)


def test_every_rank_may_have_its_own_room() -> None:
    config = resolve("gpt2", {"rank_batch_sizes": "2,8", "moment_format": "int8"})
    rooms = [memory_of(config, size, on_gpu=True, ranks=2).total for size in (2, 8)]
    assert settings_that_fit(config, rooms, on_gpu=True) == {}
    assert settings_that_fit(config, rooms[::-1], on_gpu=True) != {}


@pytest.mark.parametrize("preset", ["gpt2-nano", "qwen3-nano"])
def test_a_validation_keeps_nothing_for_a_backward_pass(preset: str, corpus: Corpus) -> None:
    config = resolve(preset, {"batch_size": 2, "validation_windows": 4})
    kept: list[torch.Size] = []
    ranks, sequences = Ranks(0, ["node0"], CPU), Sequences(corpus, "validation", config.seq_len)
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda shape: shape):
        validation_loss(model_of(config), sequences, config, ranks, CPU)
    assert not kept
