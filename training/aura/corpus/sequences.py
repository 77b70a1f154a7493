"""Which tokens are trained on at which step.

The tokens of a split are one long sequence, cut into fixed sequences. Every epoch visits all sequences once, in an
order that depends on (seed, epoch) only. The position in the data is one number, the sequences consumed so far, so a
run resumes exactly, also with another number of ranks: a step takes the next sequences, whoever computes them.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aura.config import TrainConfig
from aura.corpus.corpus import Corpus, check_vocabulary
from aura.errors import DataError

MIXER = 0x9E3779B97F4A7C15  # splitmix64, https://prng.di.unimi.it/splitmix64.c


def allow_open_files() -> None:
    """As many as this process may have: each shard is one, and the usual 1,024 are a hundred billion tokens."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Sequences:
    """The sequences of one split: sequence i holds tokens [i * seq_len, (i + 1) * seq_len], both ends included.

    Neighbours share one token: the last target of one is the first input of the next.
    """

    def __init__(self, corpus: Corpus, split: str, seq_len: int) -> None:
        entries = corpus.files[split]
        paths = [Path(corpus.path, entry["name"]) for entry in entries if entry["tokens"]]
        # Of each shard: which part of a mixture it is validated with, "" where there are none.
        self.parts = [entry.get("part", "") for entry in entries if entry["tokens"]]
        self.names = [part for part in dict.fromkeys(self.parts) if part]
        allow_open_files()
        self.shards = [np.memmap(path, dtype=f"<u{corpus.bytes_per_token}", mode="r") for path in paths]
        self.starts = np.array([0, *accumulate(len(shard) for shard in self.shards)])
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (int(self.starts[-1]) - 1) // self.seq_len)

    def read(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each int64 of shape (len(indices), seq_len); both are views of one tensor."""
        return inputs_and_targets(self.batch(indices))

    def batch(self, indices: NDArray[np.int64]) -> torch.Tensor:
        """The whole sequences, int64 of shape (len(indices), seq_len + 1)."""
        rows = np.stack([self._tokens(int(index) * self.seq_len, self.seq_len + 1) for index in indices])
        return torch.from_numpy(rows.astype(np.int64))

    def by_part(self, indices: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Which of these sequences belong to which part of a mixture: that in which they begin. Every part has an
        entry, without parts everything is under ""."""
        shards = np.searchsorted(self.starts, indices * self.seq_len, side="right") - 1
        parts = np.array(self.parts)[shards]
        return {part: indices[parts == part] for part in dict.fromkeys(self.parts)}

    def _tokens(self, start: int, count: int) -> NDArray[np.unsignedinteger[Any]]:
        """`count` tokens from `start` on; they may lie in several shards."""
        parts = []
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while count:
            offset = start - int(self.starts[shard])
            part = self.shards[shard][offset : offset + count]
            parts.append(part)
            start, count, shard = start + len(part), count - len(part), shard + 1
        return np.concatenate(parts)


@dataclass(frozen=True)
class ByPart:
    """A figure of validation sequences: of all, and of each part of a mixture that has any."""

    whole: float
    parts: dict[str, float]

    @classmethod
    def ratio(cls, above: Mapping[str, float], below: Mapping[str, float]) -> ByPart:
        """Of these sums by part."""
        parts = {part: above[part] / below[part] for part in above if part and below[part]}
        return cls(sum(above.values()) / sum(below.values()), parts)

    def times(self, other: ByPart) -> ByPart:
        parts = {part: value * other.parts[part] for part, value in self.parts.items() if part in other.parts}
        return ByPart(self.whole * other.whole, parts)


def inputs_and_targets(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole sequences without their last token, and without their first; views."""
    return batch[:, :-1], batch[:, 1:]


class Order:
    """The order of training: position -> sequence, for ever."""

    def __init__(self, sequences: int, seed: int) -> None:
        self.sequences, self.seed = sequences, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def at(self, position: int, count: int) -> NDArray[np.int64]:
        """The sequences at positions [position, position + count); they may reach into the next epoch."""
        parts = []
        while count:
            epoch, offset = divmod(position, self.sequences)
            part = self._of_epoch(epoch)[offset : offset + count]
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _of_epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, permutation(self.sequences, self.seed, epoch)
        return self._permutation


def permutation(sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Windows sorted by a hash of (seed, epoch, sequence).

    NumPy's own permutation may change between versions; a run must not lose its place by an upgrade.
    """
    start = _mix(np.uint64(seed) + _mix(np.array([epoch], dtype=np.uint64)))
    hashes = _mix(start + np.arange(sequences, dtype=np.uint64) * np.uint64(MIXER))
    return np.argsort(hashes, kind="stable")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(MIXER)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def share_of(rank: int, shares: list[int]) -> tuple[int, int]:
    """Offset and length of a rank's part when rank r takes shares[r] sequences of every step."""
    return sum(shares[:rank]), shares[rank]


def even_share(rank: int, ranks: int, count: int) -> range:
    """The part of range(count) that a rank validates; all parts together are everything, once."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def check_corpus(corpus: Corpus, config: TrainConfig, world_size: int) -> None:
    """Refuse a corpus that does not fit the configuration. Raises DataError."""
    check_vocabulary(corpus, config.vocab_size, config.preset)
    sequences = len(Sequences(corpus, "train", config.seq_len))
    shares = config.shares(world_size)
    short = sequences < sum(shares)
    if short and not (config.allow_dataset_oversubscription and sequences):
        raise DataError(
            "corpus_too_small_for_tokens" if config.global_batch_tokens else "corpus_too_small",
            path=corpus.path,
            tokens=corpus.tokens["train"],
            sequences=sequences,
            seq_len=config.seq_len,
            taken=sum(shares),
            accumulation=config.gradient_accumulation_steps,
            ranks=world_size,
            batch=config.global_batch_tokens,
        )
    if not len(Sequences(corpus, "validation", config.seq_len)):
        raise DataError(
            "validation_too_small",
            path=corpus.path,
            tokens=corpus.tokens["validation"],
            seq_len=config.seq_len,
        )
