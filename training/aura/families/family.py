"""What a family of models has to say of itself, so that whoever plans, optimizes or exports need not know which it is.

The network is a file of its own in aura/model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from re import Pattern
from typing import Any, Protocol

from aura.errors import ConfigError


class Settings(Protocol):
    """What a family reads of a TrainConfig."""

    @property
    def family(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def vocab_multiple(self) -> int: ...
    @property
    def tied(self) -> str: ...
    @property
    def dropout(self) -> float: ...
    @property
    def steps(self) -> int: ...


@dataclass(frozen=True)
class Matrix:
    rows: int
    columns: int
    parts: int = 1  # below one another, each a matrix by itself

    def __len__(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Shape:
    """Counts are elements; what is outside of the blocks has the unused rows too."""

    layers: int
    matrices: tuple[Matrix, ...]  # of a block
    vectors: tuple[int, ...]  # of a block
    outside: tuple[int, ...]  # the embedding first
    unused: int
    looked_up: int  # of what is outside: in no product, so no work
    # Of one token in a block that gets gradients
    kept: int  # what matrix products, attention and activation function read, and keep for the backward pass
    widest: int  # what that computes at once: GELU's output, or gradients of SwiGLU's factors
    # Of `kept`, by what torch.compile writes for a GPU: half of SwiGLU, and where autocast is on, what it casts
    # (measured: `make null-card`)
    computed_again: int
    cast_again: int
    in_norm: int  # what one of its two norms keeps, and so does the last norm of all
    statistics: int  # of a norm
    norms_in_fp32: bool  # whatever the parameters are in, on a CPU
    in_head_norms: int = 0  # what the norms of queries and keys keep
    head_statistics: int = 0  # of these
    norms_on_cpu: int = 1  # how often a norm keeps that there: torch puts it together of several operations
    biases: int = 0  # of the matrices of a block
    stacks: int = 1
    calls: int = 1  # of stacks, that get gradients
    tied: bool = True  # the output matrix is the embedding, whose gradient has two halves

    @property
    def in_matrices(self) -> int:
        """Of a block."""
        return sum(map(len, self.matrices))

    @property
    def stored(self) -> int:
        """All parameters, with the unused rows of embedding and output matrix."""
        return sum(self.outside) + self.layers * (self.in_matrices + sum(self.vectors))

    @property
    def blocks(self) -> int:
        """That get gradients, as often as they are called."""
        return self.calls * self.layers // self.stacks


# What most architectures of transformers call our settings, since Llama.
AS_LLAMA = {
    "seq_len": "max_position_embeddings",
    "d_model": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}


@dataclass(frozen=True)
class Names:
    """What transformers calls the parameters, and how it writes down the shape."""

    model_type: str
    architecture: str
    prefix: str  # of all parameters but the output matrix
    settings: Mapping[str, str]  # what ours are called there
    others: Callable[[Settings], dict[str, Any]]  # what else is in its configuration, but vocab_size
    gguf: Mapping[str, str] = field(default_factory=dict)  # what else llama.cpp asks; empty: it has none
    stacks: int = 1  # it counts the layers of one
    turned: Pattern[str] | None = None  # these are x @ W there; torch's Linear, and so ours, is x @ W.T

    def of(self, name: str) -> str:
        return name if name.startswith("lm_head") else self.prefix + name

    def config(self, config: Settings) -> dict[str, Any]:
        shape = {theirs: getattr(config, ours) for ours, theirs in self.settings.items()}
        shape[self.settings["layers"]] //= self.stacks
        return {"architectures": [self.architecture], **shape, **self.others(config)}

    def shape(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Our settings, of such a configuration."""
        shape = {ours: values[theirs] for ours, theirs in self.settings.items()}
        tied = str(values["tie_word_embeddings"]).lower()
        heads = values.get("num_key_value_heads", 0)
        return shape | {"layers": self.stacks * shape["layers"], "kv_heads": heads, "tied": tied}


def once(config: Settings, steps: range) -> tuple[float, float]:
    """Every block is called once for a token, and gets its gradient."""
    return 1, 1


@dataclass(frozen=True)
class Family:
    name: str
    check: Callable[[Settings], None]  # raises ConfigError
    shape: Callable[[Settings], Shape]
    # How the names of their parameters begin: what Muon updates are the matrices among them
    blocks: tuple[str, ...]
    embeddings: tuple[str, ...]  # how the names of these begin
    projections: tuple[str, ...]  # how the names end of what gives to the residual stream
    names: Names
    # How the name of such a parameter ends that is several matrices, one below another
    parts: Mapping[str, int]
    calls: Callable[[Settings, range], tuple[float, float]] = once  # of all blocks in a step; with gradient


def rows(config: Settings) -> int:
    return math.ceil(config.vocab_size / config.vocab_multiple) * config.vocab_multiple


def mlp_width(config: Settings) -> int:
    """Of SwiGLU: two thirds of GPT-2's, so that three matrices are as large as two, in multiples of 256."""
    return 256 * math.ceil(round(8 * config.d_model / 3) / 256)


def head_width(config: Settings) -> int:
    return config.d_model // config.heads


def check_rotation(config: Settings) -> None:
    width = head_width(config)
    if width % 2:
        raise ConfigError(
            "turns_pairs", family=config.family, d_model=config.d_model, heads=config.heads, width=width
        )


def check_no_dropout(config: Settings) -> None:
    if config.dropout:
        raise ConfigError("has_no_dropout", family=config.family, dropout=config.dropout)


def check_ungrouped(config: Settings) -> None:
    if config.kv_heads not in (0, config.heads):
        raise ConfigError("has_no_groups", family=config.family, kv_heads=config.kv_heads, heads=config.heads)


def check_tied(config: Settings, only: str) -> None:
    if config.tied not in ("auto", only):
        raise ConfigError("tied_otherwise", family=config.family, tied=config.tied, only=only)
