"""What ranks talk with each other. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence


def agreed_backend(wishes: Sequence[str], nodes: Sequence[str]) -> str:
    """What all ranks talk, gloo or nccl. wishes: of every rank; gloo, nccl, or auto of one that could do both.

    Between nodes auto is gloo: NCCL's kernels hold a part of the card while they wait for the link, on gigabit for
    seconds of every step, beside which the next one shall be computed. Inside one node they are done at once.
    """
    if "gloo" in wishes:
        return "gloo"
    return "nccl" if "nccl" in wishes or len(set(nodes)) == 1 else "gloo"
