"""Is there English in what a Spanish run says?"""

from __future__ import annotations

import re

ENGLISH = frozenset(
    "the of and is to at has not for other others waiting waits with answered ended attempt on been each every per it "
    "than which assumed note measured read left going from must be required argument invalid copied "
    "cannot among answer".split()
)


def english_in(said: str) -> set[str]:
    """Words in capitals are names: ON, NAME=ADDRESS."""
    return ENGLISH & {word.lower() for word in re.findall(r"\b[A-Z]?[a-zñáéíóú]+\b", said)}
