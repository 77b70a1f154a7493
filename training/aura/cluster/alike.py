"""Which ranks compute alike: of unlike versions they may wait for each other for ever, of unlike settings learn
something else."""

from __future__ import annotations

from aura.cluster.rendezvous_store import Member
from aura.errors import ConfigError
from aura.texts.console import text


def _versions(with_nccl: bool) -> list[tuple[str, str]]:
    return [("torch", "torch"), *([("NCCL", "nccl")] if with_nccl else [])]


def _usual(members: list[Member], field: str) -> str:
    found = [str(getattr(member, field)) for member in members]
    return max(found, key=found.count)


def check_versions(members: list[Member], with_nccl: bool) -> None:
    """Ranks of unlike versions may wait for each other for ever. Raises ConfigError, alike on all of them."""
    for what, field in _versions(with_nccl):
        usual = _usual(members, field)
        odd = [f"{one} {what} {its}" for one in members if (its := getattr(one, field)) != usual]
        if odd:
            raise ConfigError("versions_differ", odd=", ".join(odd), usual=f"{what} {usual}")


def unlike(member: Member, others: list[Member], with_nccl: bool) -> str:
    """Why it cannot work with the others, of which there is one at least; empty where it can."""
    for what, field in _versions(with_nccl):
        if (its := getattr(member, field)) != (usual := _usual(others, field)):
            return text("versions_differ", odd=f"{member} {what} {its}", usual=f"{what} {usual}")
    for field, key in (("settings", "settings_differ"), ("corpus", "corpora_differ")):
        if getattr(member, field) != _usual(others, field):
            return text(key, ranks=member)
    return ""
