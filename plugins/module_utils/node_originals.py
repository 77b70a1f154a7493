"""How a node was before a role first changed it, and how it becomes so again.

/var/backups/aura/manifest.json says of every path that a role makes what it was before (`paths`), which packages were
not installed (`packages`) and which users did not exist (`users`), each with the role that said so; copies of replaced
files lie in originals/. An entry is written once, before the first change, and stays until it is put back.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import time

BACKUPS = "/var/backups/aura"
# Runs and corpora are the user's: whatever a manifest says, nothing in here goes with its directory.
NEVER_WHOLE = "/var/lib/aura"
# A role looks at more: devices, what a program in /run says of itself.
MADE_IN = ("/etc/", "/opt/", "/srv/", "/usr/local/", "/var/")
# A file that a role wrote before there was a manifest is no original.
OURS = b"Written by Ansible (role"
# What makes a file that was put back count.
AFTER = {"/etc/hostname": ["hostname", "-F", "/etc/hostname"]}
UNITS = "/etc/systemd/system/"
# Where it is ours, runs and corpora lie on another disk.
DATA_UNIT = "var-lib-aura.mount"
Entry = dict  # of str


def read_manifest() -> Entry:
    with contextlib.suppress(FileNotFoundError), open(f"{BACKUPS}/manifest.json", encoding="utf-8") as file:
        return json.load(file)
    return {"schema": 1, "paths": {}, "packages": {}, "users": {}, "units": {}}


def write_manifest(manifest: Entry) -> None:
    """The whole manifest or the old one, never half of it."""
    path = f"{BACKUPS}/manifest.json"
    descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def original(path: str) -> str:
    return f"{BACKUPS}/originals{path}"


def look(path: str) -> Entry:
    """What is there now; a file that is ours counts as nothing."""
    try:
        status = os.lstat(path)
    except OSError:
        return {"was": "absent"}
    about = {"mode": stat.S_IMODE(status.st_mode), "owner": status.st_uid, "group": status.st_gid}
    if stat.S_ISLNK(status.st_mode):
        return {"was": "link", "target": os.readlink(path)}
    if stat.S_ISDIR(status.st_mode):
        return {"was": "directory", **about}
    if not stat.S_ISREG(status.st_mode):
        return {"was": "other"}
    with open(path, "rb") as file:
        return {"was": "absent"} if OURS in file.read(400) else {"was": "file", **about}


def copy(path: str, to: str) -> None:
    os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
    shutil.copyfile(path, to)
    os.chmod(to, 0o600)


# ── before the first change ──────────────────────────────────────────────────────────────────────


def expanded(makes: list[str]) -> list[str]:
    """The paths, each pattern as the files that fit it now."""
    found = [path for entry in makes for path in (sorted(glob.glob(entry)) if "*" in entry else [entry])]
    return [path for path in found if path.startswith(MADE_IN)]


def keep(role: str, makes: list[str], missing: list[str], users: list[str], units: list[str]) -> list[str]:
    """Write down what is not written down yet; the paths that are new in the manifest.

    makes: absolute paths; one that ends with / is a directory that goes with all that is in it. missing: packages that
    are not installed. users: whom the role makes. units: what is started again when the role's files are put back.
    """
    os.makedirs(BACKUPS, mode=0o700, exist_ok=True)
    manifest = read_manifest()
    new = {path: look(path.rstrip("/")) for path in expanded(makes) if path not in manifest["paths"]}
    for path, entry in new.items():
        if entry["was"] == "file":
            copy(path, original(path))
        manifest["paths"][path] = {"role": role, **entry}
    known = {entry.pw_name for entry in pwd.getpwall()}
    additions = {
        "packages": dict.fromkeys(missing, role),
        "users": dict.fromkeys(set(users) - known, role),
        "units": dict.fromkeys(units, role),
    }
    grown = any(set(names) - set(manifest[kind]) for kind, names in additions.items())
    for kind, names in additions.items():
        manifest[kind] = {**names, **manifest[kind]}
    if new or grown:
        write_manifest(manifest)
    return list(new)


# ── back to that ─────────────────────────────────────────────────────────────────────────────────


def of(manifest: Entry, roles: list[str], leave: list[str]) -> dict[str, Entry]:
    """The paths of these roles (of all, if none is named) but those of `leave`, what lies in a directory before it."""
    found = {
        path: entry
        for path, entry in manifest["paths"].items()
        if (not roles or entry["role"] in roles) and entry["role"] not in leave
    }
    return dict(sorted(found.items(), key=lambda item: -item[0].rstrip("/").count("/")))


def action(path: str, entry: Entry) -> str:
    """What there is to do: 'remove', 'restore', '' for nothing, or why the path stays."""
    now, bare = look(path.rstrip("/")), path.rstrip("/")
    is_there = os.path.lexists(bare)
    if entry["was"] == "absent":
        if not is_there:
            return ""
        if now["was"] == "directory" and not path.endswith("/"):
            return "stays: there is something in it" if os.listdir(bare) else "remove"
        if path.endswith("/") and (bare + "/").startswith(NEVER_WHOLE + "/"):
            return "stays: it is never removed with what is in it"
        if path.endswith("/") and mounted_below(bare):
            return "stays: something is mounted in it"
        owner = said("dpkg-query", "--search", bare).partition(":")[0] if now["was"] != "directory" else ""
        return f"stays: it belongs to the package {owner}" if owner else "remove"
    if entry["was"] == "other":
        return ""
    if entry["was"] == "directory" and is_there and now["was"] != "directory":
        return "stays: it was a directory, and is none"
    same = {key: now.get(key) for key in entry if key != "role"} == {
        key: entry[key] for key in entry if key != "role"
    }
    if same and entry["was"] == "file":
        same = read(bare) == read(original(path))
    return "" if same and is_there else "restore"


def mounted_below(path: str) -> bool:
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        return any((line.split()[1] + "/").startswith(path + "/") for line in file)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def said(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def as_change(roles: list[str]) -> list[Entry]:
    """The way back for safe_change: its `files`."""
    files = []
    for path, entry in of(read_manifest(), roles, []).items():
        what = action(path, entry)
        if what == "remove":
            files.append({"path": path, "absent": True})
        elif what == "restore" and entry["was"] == "file":
            text = read(original(path)).decode(errors="surrogateescape")
            files.append({"path": path, "content": text, "mode": f"{entry['mode']:04o}"})
        elif what == "restore" and entry["was"] == "link":
            files.append({"path": path, "link": entry["target"]})
    return files


def plan(roles: list[str], leave: list[str]) -> list[Entry]:
    """What there is to do: path, role and what."""
    found = of(read_manifest(), roles, leave)
    steps = [
        {"path": path, "role": entry["role"], "what": action(path, entry)} for path, entry in found.items()
    ]
    return [step for step in steps if step["what"]]


def put_back(roles: list[str], leave: list[str]) -> Entry:
    """Do it; what was done, where the files that went lie now, what complained, and where runs lie if elsewhere."""
    manifest = read_manifest()
    paths = of(manifest, roles, leave)
    data = data_elsewhere(paths)
    went = f"{BACKUPS}/reset-{time.strftime('%Y-%m-%dT%H%M%S')}"
    complaints = stop(paths)
    done = []
    for path, entry in paths.items():
        what = action(path, entry)
        if what == "remove" or (what == "restore" and entry["was"] != "directory"):
            take_away(path.rstrip("/"), went)
        if what == "restore":
            restore(path.rstrip("/"), entry)
        if what:
            done.append({"path": path, "role": entry["role"], "what": what})
    moved = {step["path"] for step in done if not step["what"].startswith("stays")}
    if any(path.startswith(UNITS) for path in moved):
        complaints += run(["systemctl", "daemon-reload"])
    for path in moved & set(AFTER):
        complaints += run(AFTER[path])
    taken_back = {entry["role"] for entry in paths.values()}
    for unit in [unit for unit, role in manifest["units"].items() if role in taken_back]:
        if said("systemctl", "show", "--property=LoadState", "--value", unit).strip() == "loaded" and moved:
            complaints += run(["systemctl", "try-restart", unit])
    forget(manifest, paths, taken_back, keep_users=bool(data))
    return {
        "done": done,
        "went": went if os.path.isdir(went) else "",
        "complaints": complaints,
        "data": data,
    }


def data_elsewhere(paths: dict[str, Entry]) -> str:
    """The directory that our unit mounts as /var/lib/aura; '' where there is no such unit, or it is not ours."""
    unit = f"{UNITS}{DATA_UNIT}"
    if unit not in paths or look(unit)["was"] != "absent" or not os.path.isfile(unit):
        return ""
    what = re.search(r"^What=(.+)$", read(unit).decode(errors="replace"), re.MULTILINE)
    return what[1] if what else ""


def stop(paths: dict[str, Entry]) -> list[str]:
    """Units that are about to go are stopped and switched off."""
    complaints = []
    for path, entry in paths.items():
        name = os.path.basename(path)
        if os.path.dirname(path) + "/" == UNITS and entry["was"] == "absent" and os.path.isfile(path):
            if os.path.islink(path):
                continue  # a mask
            if "@." in name:
                complaints += run(["systemctl", "stop", name.replace("@.", "@*.")])
                complaints += run(["systemctl", "disable", name])
            else:
                complaints += run(["systemctl", "disable", "--now", name])
    return complaints


def run(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{' '.join(command)}: {error}"]
    return [] if done.returncode == 0 else [f"{' '.join(command)}: {' '.join(done.stdout.split())[-300:]}"]


def take_away(path: str, went: str) -> None:
    """What is there goes; a file's content is kept beside the manifest."""
    if os.path.isdir(path) and not os.path.islink(path):
        # An empty directory, or one that is ours with all that is in it.
        if os.listdir(path):
            shutil.rmtree(path)
        else:
            os.rmdir(path)
    elif os.path.lexists(path):
        if os.path.isfile(path) and not os.path.islink(path):
            copy(path, went + path)
        os.unlink(path)


def restore(path: str, entry: Entry) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if entry["was"] == "link":
        os.symlink(entry["target"], path)
        return
    if entry["was"] == "directory":
        os.makedirs(path, exist_ok=True)
    else:
        shutil.copyfile(original(path), path)
    os.chown(path, entry["owner"], entry["group"])
    os.chmod(path, entry["mode"])


def forget(manifest: Entry, paths: dict[str, Entry], roles: set[str], keep_users: bool) -> None:
    """The manifest without what was put back. A user goes when nothing of theirs is left, on another disk neither."""
    for path in paths:
        del manifest["paths"][path]
    manifest["units"] = {unit: role for unit, role in manifest["units"].items() if role not in roles}
    for user in [user for user, role in manifest["users"].items() if role in roles]:
        home = next((entry.pw_dir for entry in pwd.getpwall() if entry.pw_name == user), "")
        if home and not keep_users and not os.path.exists(home):
            run(["userdel", user])
        del manifest["users"][user]
    if manifest["paths"]:
        write_manifest(manifest)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{BACKUPS}/manifest.json")
    shutil.rmtree(f"{BACKUPS}/originals", ignore_errors=True)
