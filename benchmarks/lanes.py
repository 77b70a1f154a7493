"""Many runs of five_ranks.py at once, of GPT-2 with Muon: each is a lane of batched matrix products, so that a card has
something to do with models that are very small. All micro-batches of a step are late, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from aura.config import TrainConfig
from aura.corpus.sequences import Sequences
from aura.model.gpt import GPT
from aura.optim.adamw import EPSILON
from aura.optim.groups import group_of
from aura.optim.muon import MOMENTUM, SIZE, matrices_in, orthogonalised, shape_in
from aura.optim.schedule import learning_rate
from aura.strategy.codec import BLOCK
from playing import VALIDATED_TOGETHER, Setting, one_pass, over_the_wire
from torch import Tensor
from torch.nn import functional

SMALL = 1e7  # parameters; of larger models the ranks compute one after the other


@dataclass(frozen=True)
class Lane:
    setting: Setting
    seed: int  # of the weights and of the order of the text
    rate: float = 1.0  # times the learning rate


class Layout:
    """Where a model's parameters lie in a flat row of `width`, as five_ranks.py has them; filled up to whole blocks."""

    def __init__(self, config: TrainConfig) -> None:
        named = dict(GPT(config, "meta").named_parameters())
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self.sizes = [parameter.numel() for parameter in named.values()]
        self.parameters = sum(self.sizes)
        self.filling = -self.parameters % BLOCK
        self.width = self.parameters + self.filling
        self.matrices: dict[tuple[int, int, int], list[slice]] = {}  # by number, rows and columns
        rate, decay, start = torch.zeros(self.width), torch.zeros(self.width), 0
        for (name, parameter), size in zip(named.items(), self.sizes, strict=True):
            part = slice(start, start + size)
            if matrices_in(name, parameter):
                self.matrices.setdefault(shape_in(name, parameter), []).append(part)
            else:
                rate[part], decay[part] = group_of(name, parameter, config)
            start += size
        self.rate, self.decay = rate, decay  # AdamW's, of every element; zero for Muon's

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Views of rows (lanes, width)."""
        parts = torch.split(rows, [*self.sizes, self.filling], dim=1)
        return {
            name: part.view(-1, *self.shapes[name]) for name, part in zip(self.shapes, parts, strict=False)
        }


def loss_sums(config: TrainConfig, p: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Nats of each lane, summed (lanes,). p: parameters by name, each (lanes, …); tokens: whole windows (lanes,
    windows, seq_len + 1)."""
    lanes, count, width, heads = len(tokens), tokens[0, :, 1:].numel(), config.d_model, config.heads

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (width,)) * p[f"{name}.weight"][:, None] + p[f"{name}.bias"][:, None]

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.baddbmm(p[f"{name}.bias"][:, None], x, p[f"{name}.weight"].mT)

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = (
            part.reshape(-1, config.seq_len, heads, width // heads).transpose(1, 2)
            for part in torch.split(linear(x, f"{name}.c_attn"), width, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(y.transpose(1, 2).reshape(lanes, count, width), f"{name}.c_proj")

    # The gradient of a product with rows of zeros and a one takes no atomic additions.
    ones = functional.one_hot(tokens[..., :-1].reshape(lanes, count), config.vocab_size)
    x = torch.bmm(ones.to(torch.float32), p["wte.weight"]).view(lanes, -1, config.seq_len, width)
    x = (x + p["wpe.weight"][:, None]).view(lanes, count, width)
    for layer in range(config.layers):
        name = f"h.{layer}"
        x = x + attention(norm(x, f"{name}.ln_1"), f"{name}.attn")
        hidden = functional.gelu(linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc"), approximate="tanh")
        x = x + linear(hidden, f"{name}.mlp.c_proj")
    logits = torch.bmm(norm(x, "ln_f"), p["wte.weight"].mT).flatten(0, 1)
    targets = tokens[..., 1:].reshape(-1)
    return functional.cross_entropy(logits, targets, reduction="none").view(lanes, -1).sum(1)


class Lanes:
    """lanes: those without a wire's format first; of a format there is one."""

    def __init__(self, config: TrainConfig, lanes: Sequence[Lane], device: str = "cpu") -> None:
        self.config, self.device, self.layout = config, device, Layout(config)
        self.seeds = list(dict.fromkeys(lane.seed for lane in lanes))
        self.of_seed = [self.seeds.index(lane.seed) for lane in lanes]
        first = torch.stack([self._weights(seed) for seed in self.seeds])[self.of_seed].to(device)
        # The owners' masters, and what replicas hold after the last update, the one before and the one before that
        self.master, self.versions = first, [first.clone() for _ in range(3)]
        self.mean, self.square, self.momentum = (torch.zeros_like(first) for _ in range(3))
        self.rate, self.decay = self.layout.rate.to(device), self.layout.decay.to(device)
        settings = [lane.setting for lane in lanes]
        for one in settings:
            assert one.late in (0, 1) and one.predicted == bool(one.late) and not one.local_steps
            assert one.differences == one.gradients
        formats = [one.gradients for one in settings]
        self.exact, self.format = formats.count("fp32"), formats[-1]
        assert formats == ["fp32"] * self.exact + [self.format] * (len(lanes) - self.exact)
        late_from = [round(one.after * config.steps) if one.late else config.steps for one in settings]
        self.late_from = torch.tensor(late_from, device=device)[:, None]  # step
        self.rates = torch.tensor([lane.rate for lane in lanes], device=device)[:, None]
        self.steps = 0

    def _weights(self, seed: int) -> Tensor:
        model = GPT(replace(self.config, seed=seed))
        flat = torch.cat([parameter.data.view(-1) for parameter in model.parameters()])
        return functional.pad(flat, (0, self.layout.filling))

    def step(self, batch: Tensor) -> None:
        """batch: whole windows (seeds, ranks, micro-batches, seq_len + 1)."""
        tokens, (ranks, windows) = batch.to(self.device)[self.of_seed], batch.shape[1:3]
        now, before, long_before = self.versions
        known = torch.where(self.steps >= self.late_from, before + (before - long_before), now)
        total = torch.zeros_like(now)
        together = ranks if self.layout.parameters < SMALL else 1
        for part in torch.split(tokens, together, dim=1):
            rows = known.repeat_interleave(together, 0).requires_grad_()
            losses = loss_sums(self.config, self.layout.named(rows), part.flatten(0, 1))
            (gradients,) = torch.autograd.grad(losses.sum(), rows)
            for gradient in gradients.view(len(now), together, -1).unbind(1):
                total[: self.exact] += gradient[: self.exact]
                total[self.exact :] += self._received(gradient)
        count = ranks * windows * self.config.seq_len
        norms = torch.linalg.vector_norm(total, dim=1, keepdim=True) / count
        total *= (self.config.clip / norms).clamp(max=1) / count
        self._update(total, learning_rate(self.config, self.steps) * self.rates)
        after = self.master.clone()
        after[self.exact :] = now[self.exact :] + self._received(self.master - now)
        self.versions = [after, now, before]
        self.steps += 1

    def _received(self, rows: Tensor) -> Tensor:
        """Of the lanes with a format."""
        sent = rows[self.exact :]
        return over_the_wire(sent.reshape(-1), self.format).view_as(sent) if len(sent) else sent

    def _update(self, gradient: Tensor, lr: Tensor) -> None:
        """As optim/adamw.py and optim/muon.py do it for one model."""
        config, count = self.config, self.steps + 1
        self.mean.lerp_(gradient, 1 - config.beta1)
        self.square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
        root = (self.square / (1 - config.beta2**count)).sqrt_().add_(EPSILON)
        change = self.mean / root / (1 - config.beta1**count)
        self.master *= 1 - lr * self.rate * self.decay
        self.master -= lr * self.rate * change
        for (_, rows, columns), parts in self.layout.matrices.items():
            momenta = torch.stack([self.momentum[:, part] for part in parts])
            new = torch.stack([gradient[:, part] for part in parts])
            momenta.lerp_(new, 1 - MOMENTUM)
            updates = orthogonalised(torch.lerp(new, momenta, MOMENTUM).view(-1, rows, columns))
            updates = updates.float().reshape(momenta.shape)
            for part, momentum, update in zip(parts, momenta, updates, strict=True):
                self.momentum[:, part] = momentum
                self.master[:, part] *= 1 - lr * config.weight_decay
                self.master[:, part] -= lr * SIZE * max(rows, columns) ** 0.5 * update

    @torch.no_grad()
    def validate(self, windows: Sequences) -> list[float]:
        """The loss of all of them [nats per token], of each lane."""
        weights = self.layout.named(self.versions[0])
        total = torch.zeros(len(self.master), dtype=torch.float64)
        for part in torch.split(windows.batch(np.arange(len(windows))), VALIDATED_TOGETHER):
            tokens = part.to(self.device).expand(len(self.master), -1, -1)
            total += loss_sums(self.config, weights, tokens).cpu()
        found: list[float] = (total / (len(windows) * self.config.seq_len)).tolist()
        return found


def train(
    config: TrainConfig, lanes: Sequence[Lane], train_on: Sequences, validate_on: Sequences, device: str
) -> list[float]:
    """The losses after one pass over the first windows, as five_ranks.train has them."""
    play = Lanes(config, lanes, device)
    for batch in one_pass(train_on, lanes[0].setting, config.steps, play.seeds):
        play.step(batch)
    return play.validate(validate_on)
