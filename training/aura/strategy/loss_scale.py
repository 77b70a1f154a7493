"""fp16: what losses are multiplied with before their backward passes, so that small gradients do not become zero.

One scale for all micro-batches of a step. The rule, and the names of its state, are those of torch.amp.GradScaler
(Micikevicius et al., 2018), which cannot be used where the optimizer sees only a part of the gradients.
"""

from __future__ import annotations

from typing import Any

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000  # the interval in steps


class LossScale:
    def __init__(self, scale: float, enabled: bool) -> None:
        """Not enabled, it is 1 for ever and has no state."""
        self.enabled = enabled
        self.scale = scale if enabled else 1.0
        self.good_steps = 0  # since it has changed

    def update(self, left_out: bool) -> None:
        """After a step: was it left out because a gradient was not finite?"""
        if not self.enabled:
            return
        if left_out:
            self.scale, self.good_steps = self.scale * BACKOFF, 0
            return
        self.good_steps += 1
        if self.good_steps == INTERVAL:
            self.scale, self.good_steps = self.scale * GROWTH, 0

    def state(self) -> dict[str, Any]:
        if not self.enabled:
            return {}
        factors = {"growth_factor": GROWTH, "backoff_factor": BACKOFF, "growth_interval": INTERVAL}
        return {"scale": self.scale, **factors, "_growth_tracker": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["_growth_tracker"])
