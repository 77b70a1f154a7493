"""Who hears how a preparation goes. A room only tells; `aura prepare` shows it (aura/commands/bars.py)."""

from __future__ import annotations

from typing import Protocol


class Bar(Protocol):
    """How far one pass over the input is; called with the number of bytes that were read."""

    def __call__(self, count: int) -> None: ...

    def first_document(self) -> None:
        """What was read up to the first call was done before."""

    def expect(self, part: float) -> None:
        """`part` of what this start has to do is done: that says how much there is in all."""


class Listener(Protocol):
    def say(self, sentence: str) -> None: ...

    def warn(self, sentence: str) -> None:
        """What is left behind when somebody interrupts the preparation."""

    def start(self, description: str, size: int | None) -> Bar:
        """A pass over `size` bytes begins; None where it is not known how many there are."""


class Silence:
    """Hears nothing, and is its own bar: a preparation that nobody looks at."""

    def say(self, sentence: str) -> None:
        pass

    def warn(self, sentence: str) -> None:
        pass

    def start(self, description: str, size: int | None) -> Bar:
        return self

    def __call__(self, count: int) -> None:
        pass

    def first_document(self) -> None:
        pass

    def expect(self, part: float) -> None:
        pass


NOBODY = Silence()
