"""What lies at a path of a node, and its text."""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
from collections.abc import Callable, Sequence


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def file_state(path: str) -> dict[str, object]:
    """kind, sha256, mode, owner, group, target and mtime, as node_state answers them."""
    state: dict[str, object] = dict.fromkeys(("sha256", "mode", "owner", "group", "target"), "")
    try:
        status = os.lstat(path)
    except OSError:
        return {"kind": "absent", **state, "mtime": 0.0}
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
    state["mode"] = f"{stat.S_IMODE(status.st_mode):04o}"
    state["owner"] = name_of(pwd.getpwuid, status.st_uid)
    state["group"] = name_of(grp.getgrgid, status.st_gid)
    if kind == "file":
        with open(path, "rb") as file:
            state["sha256"] = hashlib.sha256(file.read()).hexdigest()
    elif kind == "link":
        state["target"] = os.readlink(path)
    return {"kind": kind, **state, "mtime": status.st_mtime}


def name_of(find: Callable[[int], Sequence[str]], number: int) -> str:
    try:
        return find(number)[0]
    except KeyError:
        return str(number)
