"""NVIDIA's driver as its library tells of it: what a test does not say, it does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pynvml
import pytest


def raises(error: type[Exception]) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def driver(monkeypatch: pytest.MonkeyPatch, cards: int = 0, **answers: Any) -> None:
    """`answers`: of nvmlDeviceGet<name>, a function of a card's index."""
    for name in dir(pynvml):
        if name.startswith("nvmlDeviceGet"):
            monkeypatch.setattr(pynvml, name, raises(pynvml.NVMLError_NotSupported))
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    for name, answer in ({"Count": lambda: cards, "HandleByIndex": lambda index: index} | answers).items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", answer)


def no_driver(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] = pynvml.NVMLError_LibraryNotFound
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", raises(error))
