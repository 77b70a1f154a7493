"""Why an attempt is over, as its ranks tell each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed import Store

from aura.cluster.quorum import QuorumState
from aura.errors import EXIT_TEMPORARY, FOR_GOOD


class FailureReport(NamedTuple):
    """For a person, and what every rank ends with."""

    sentence: str
    exit_code: int = EXIT_TEMPORARY
    gone: int | None = None  # a rank that ends for good, while the others go on without it
    causes: Sequence[int] = ()  # ranks that are to blame, and may be back soon

    @property
    def is_final(self) -> bool:
        return self.exit_code in FOR_GOOD

    @classmethod
    def said(cls, values: Any) -> FailureReport:
        """Raises ValueError, LookupError, TypeError."""
        return cls(str(values["sentence"]), int(values["exit_code"]), values["gone"], values["causes"])

    def publish(self, store: Store) -> bytes:
        """Write it unless there is one; the one that stands. Raises RuntimeError."""
        return store.compare_set("broken", "", json.dumps(self._asdict()))

    def note(self, quorum_state: QuorumState) -> None:
        if self.gone is not None:
            quorum_state.left([self.gone])
        if self.causes:
            quorum_state.stopped_for(self.causes)
