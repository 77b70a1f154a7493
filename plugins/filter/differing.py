"""What node_state has seen, against what is wanted."""

from __future__ import annotations

from collections.abc import Mapping


def differing(
    seen: Mapping[str, Mapping[str, object]], wanted: Mapping[str, Mapping[str, object]]
) -> list[str]:
    """The names (paths of files, names of units, …) of which something is not as wanted.

    Only the keys that `wanted` has are compared: `{kind: absent}` asks for nothing else.
    """
    return [
        name
        for name, properties in wanted.items()
        if any(seen.get(name, {}).get(key) != value for key, value in properties.items())
    ]


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"differing": differing}
