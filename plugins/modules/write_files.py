"""The files, links and directories of a role are as they shall be, all in one call.

What ansible.builtin.template, copy and file do one by one, each with a connection of its own. Only what differs is
written, whole or not at all, and shown by --diff. A directory that a file lies in is made, as root's, where there is
none.

files: each has a path and one of template (of the role), copy (a file of the role), content, link (where it leads),
directory (true) and absent (true: it goes, a directory with all that is in it). Also mode (0644, of directories 0755),
owner and group (root), and original: what lies there before the first change is kept, and comes back with absent;
where nothing was ever changed, absent leaves it as it is. A file with a secret has a task of its own, with no_log. (The
action of the same name fills in template and copy.)
The answer: paths, what was made, written or taken away.
"""

from __future__ import annotations

import os
import shutil
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node_files import file_state

ORIGINALS = "/var/backups/aura/originals"
EDITED = "/var/backups/aura/edited"
KINDS = ("content", "link", "directory", "absent")
Entry = dict  # of str


def wanted(file: Entry) -> Entry:
    """The entry with its defaults; raises ValueError with a sentence."""
    path = file.get("path", "")
    kinds = [kind for kind in KINDS if kind in file and file[kind] not in (False, None)]
    if not path.startswith("/") or len(kinds) != 1:
        raise ValueError(
            f"{path or 'an entry without a path'}: an absolute path and one of {', '.join(KINDS)}"
        )
    unknown = set(file) - {"path", *KINDS, "mode", "owner", "group", "original"}
    if unknown:
        raise ValueError(f"{path}: unknown {', '.join(sorted(unknown))}")
    mode = file.get("mode") or ("0755" if kinds[0] == "directory" else "0644")
    return {
        "path": path.rstrip("/"), "kind": kinds[0], "value": file[kinds[0]], "mode": int(str(mode), 8),
        "owner": file.get("owner") or "root", "group": file.get("group") or file.get("owner") or "root",
        "original": bool(file.get("original")),
    }  # fmt: skip


def now(path: str) -> Entry:
    """What is there, in the words of `wanted`."""
    there = file_state(path)
    there |= {"mode": int(str(there["mode"] or 0), 8), "value": there["target"] or True}
    if there["kind"] == "file":
        with open(path, "rb") as file:
            there |= {"kind": "content", "value": file.read().decode(errors="surrogateescape")}
    return there


def same(entry: Entry, there: Entry) -> bool:
    if entry["kind"] in ("link", "absent"):
        return (entry["kind"], entry["value"]) == (there["kind"], there["value"])
    return all(entry[key] == there[key] for key in ("kind", "value", "mode", "owner", "group"))


def shown(path: str, there: Entry) -> str:
    if there["kind"] == "absent":
        return ""
    about = f"{path} {there['mode']:04o} {there['owner']}:{there['group']}"
    if there["kind"] == "content":
        return f"{about}\n{there['value']}"
    return f"{about} ({there['kind']}{' to ' + there['value'] if there['kind'] == 'link' else ''})\n"


def kept(path: str) -> str:
    return ORIGINALS + path


def keep(path: str) -> None:
    """The file before the first change; an empty mark where there was none."""
    if os.path.lexists(kept(path)) or os.path.lexists(f"{kept(path)}.none"):
        return
    os.makedirs(os.path.dirname(kept(path)), exist_ok=True)
    if os.path.isfile(path):
        # Whole or not there: what is kept once is never taken again.
        new, status = f"{kept(path)}.new", os.stat(path)
        shutil.copy2(path, new)
        os.chown(new, status.st_uid, status.st_gid)
        with open(new, "rb") as file:
            os.fsync(file.fileno())
        os.replace(new, kept(path))
    else:
        open(f"{kept(path)}.none", "w").close()


def comes_back(asked: Entry) -> bool:
    return bool(asked["original"]) and asked["kind"] == "absent"


def with_original(entry: Entry) -> Entry:
    """What `absent` means of a file with an original: that one again; what lies there, where nothing was changed."""
    path = entry["path"]
    if not comes_back(entry) or os.path.lexists(f"{kept(path)}.none"):
        return entry
    return {**now(kept(path) if os.path.isfile(kept(path)) else path), "path": path}


def forget(asked: Entry) -> None:
    """Once it has come back, what lies there is not ours any more."""
    for mark in (kept(asked["path"]), f"{kept(asked['path'])}.none"):
        if comes_back(asked) and os.path.lexists(mark):
            os.unlink(mark)


def make(entry: Entry) -> None:
    path = entry["path"]
    if entry["kind"] == "absent":
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if entry["kind"] == "directory":
        # Not in the place of a link: what it leads to may be all that somebody has.
        if os.path.lexists(path) and now(path)["kind"] != "directory":
            raise ValueError(f"{path} is no directory there; it should be one. Move it away")
        os.makedirs(path, 0o700, exist_ok=True)
        own(path, entry)
        return
    if os.path.isdir(path) and not os.path.islink(path):
        raise ValueError(f"{path} is a directory there; it should be none. Move it away")
    descriptor, new = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".aura-")
    os.close(descriptor)
    if entry["kind"] == "link":
        os.unlink(new)
        os.symlink(entry["value"], new)
    else:
        with open(new, "wb") as file:
            file.write(entry["value"].encode(errors="surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
        own(new, entry)
    os.replace(new, path)


def own(path: str, entry: Entry) -> None:
    shutil.chown(path, entry["owner"], entry["group"])
    os.chmod(path, entry["mode"])


def write(asked: Entry, entry: Entry) -> None:
    """entry: `asked`, or the original that comes back in its place. What somebody may have edited since is kept."""
    path = asked["path"]
    if comes_back(asked) and os.path.isfile(path):
        os.makedirs(os.path.dirname(EDITED + path), exist_ok=True)
        shutil.copy2(path, EDITED + path)
    elif asked["original"]:
        keep(path)
    make(entry)


class Quiet(AnsibleModule):
    """Says nothing of its arguments in the node's journal: a Wi-Fi's password stands in netplan's files."""

    def _log_invocation(self) -> None:
        pass


def main() -> None:
    module = Quiet(
        argument_spec={
            "files": {"type": "list", "elements": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    done, diff = [], []
    os.umask(0o022)  # hardened images have 027: directories on the way to a file would be closed to aura
    try:
        for asked in map(wanted, module.params["files"]):
            entry, path = with_original(asked), asked["path"]
            there = now(path)
            differs = not same(entry, there)
            if differs:
                done.append(path)
                diff.append({
                    "before_header": path, "before": shown(path, there),
                    "after_header": path, "after": shown(path, entry),
                })  # fmt: skip
            if module.check_mode:
                continue
            if differs:
                write(asked, entry)
            forget(asked)
    except (ValueError, OSError, LookupError) as error:
        module.fail_json(msg=f"{error}.", paths=done)
    answer = {"changed": bool(done), "paths": done, "diff": diff}
    if answer["changed"] and not module.check_mode:
        # What was seen of the node before does not hold any more (node_state).
        answer["ansible_facts"] = {"node_looks": {}}
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
