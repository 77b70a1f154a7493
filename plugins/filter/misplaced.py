"""Directories that the service user cannot be given: somebody's home, the system's, somebody else's files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# With all that is in them. Of /var only what a distribution puts there.
SYSTEM = re.compile(
    r"/(?:bin|boot|dev|etc|lib(?:32|64|x32)?|opt/aura|proc|root|run|s?bin|snap|sys|tmp|usr"
    r"|var/(?:backups|cache|crash|lib|local|lock|log|mail|opt|run|snap|spool|tmp))(?:/|$)"
)
PATH = re.compile(r"(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*){2,}")


def misplaced(
    path: str, setting: str, there: Mapping[str, object] | None = None, ours: Sequence[str] = ("aura",)
) -> str:
    """Why this directory cannot be the service user's and what to do, as a sentence; '' when it can be.

    setting: the variable that names it. there: what node_state sees at it (`mounts`), if it has looked. ours: the names
    (or numbers, where they have no name yet) of those who may own it.
    """
    it = f"{setting} is {path}"
    if re.match(r"/home(?:/|$)", path):
        return (
            f"{it}, which lies in somebody's home. Homes are closed to others, so the user aura cannot come to it;"
            " and if the home itself were aura's, SSH would let its owner in no more. Name a directory outside,"
            " /srv/aura say, and make a link to it where you are used to it (ln -s /srv/aura ~/output)."
        )
    if not PATH.fullmatch(path):
        return (
            f"{it}, and no absolute path of at least two names, of letters, digits and _ . - only. Name one such as"
            " /srv/aura."
        )
    if SYSTEM.match(path):
        return f"{it}, which belongs to the system. Name a directory of its own, /srv/aura say."
    if there and not there["empty"] and there["owner"] not in ours:
        whose = f"{there['owner']}'s" if there["owner"] else "somebody else's"
        return (
            f"{it}, which is {whose} there and not empty: it would become aura's. Name one that is not there yet,"
            f" {path}/aura say."
        )
    return ""


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"misplaced": misplaced}
