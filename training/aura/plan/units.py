"""Quantities of a plan, as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from aura.plan.memory import GIB
from aura.texts.console import text


def in_gib(value: float) -> str:
    return f"{value / GIB:.2f} GiB" if value >= 0.1 * GIB else f"{value / 2**20:.1f} MiB"


def in_bytes(value: float) -> str:
    """As disks and networks are sold."""
    return f"{_figures(value / 1e9)} GB" if value >= 1e8 else f"{_figures(value / 1e6)} MB"


def in_seconds(value: float | None) -> str:
    return text("plan_unknown") if value is None else f"{_figures(value)} s"


def _figures(value: float) -> str:
    """Three of them, and never 3.01e+03."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """'71.9 hours', or in the unit that suits."""
    if seconds is None:
        return text("plan_unknown_time")
    for unit, size in (("plan_days", 86400), ("plan_hours", 3600), ("plan_minutes", 60)):
        if seconds >= 2 * size and (unit != "plan_days" or seconds >= 5 * size):
            return text(unit, count=seconds / size)
    return text("plan_seconds", count=seconds)


def in_short(numbers: Sequence[int]) -> str:
    """'8', or '8, 8, 4'."""
    return ", ".join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))
