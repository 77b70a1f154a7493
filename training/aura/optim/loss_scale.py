"""fp16 holds nothing below 6e-8: the loss is multiplied by a scale, so that small gradients do not become zero."""

from __future__ import annotations

from typing import Any

GROWTH_INTERVAL = 2000  # good steps, as in torch.amp.GradScaler
LARGEST, SMALLEST = 2.0**127, 2.0**-20  # gradients that are not finite at the smallest are not finite at any


class LossScale:
    """One number for all micro-batches and ranks of a step; changed as torch.amp.GradScaler changes it, but without
    reading anything from the device: the strategy knows whether a gradient was not finite."""

    def __init__(self, first: float, enabled: bool, delayed: bool = False) -> None:
        """delayed: `update` comes in the middle of the step after, which keeps its scale; see `begin_next`."""
        self.enabled, self.delayed = enabled, delayed
        self.value = first if enabled else 1.0
        self.next = self.value  # of the step after the one that computes
        self.good_steps = 0  # since the last change

    @property
    def is_exhausted(self) -> bool:
        """A lower scale would not help."""
        return not self.enabled or self.value < SMALLEST

    def update(self, left_out: bool) -> None:
        """After a step: half of it where the gradient was not finite, twice as much after many that were."""
        if not self.enabled:
            return
        self.good_steps = 0 if left_out else self.good_steps + 1
        if left_out:
            self.next /= 2
        elif self.good_steps == GROWTH_INTERVAL:
            self.next, self.good_steps = min(LARGEST, 2 * self.next), 0
        if not self.delayed:
            self.begin_next()

    def begin_next(self) -> None:
        """All micro-batches of a step have been computed."""
        self.value = self.next

    def state(self) -> dict[str, Any]:
        """Empty where it is not enabled. The names are those of torch.amp.GradScaler."""
        if not self.enabled:
            return {}
        state = {"scale": self.value, "_growth_tracker": self.good_steps}
        return state | ({"next": self.next} if self.delayed else {})

    def load(self, state: dict[str, Any]) -> None:
        """`state`; nothing happens where that or this one is of another number format than fp16."""
        if self.enabled and state:
            self.value, self.good_steps = float(state["scale"]), int(state["_growth_tracker"])
            self.next = float(state.get("next", self.value))
