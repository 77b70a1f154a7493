"""The host keys that nodes show and that were never seen here: read, shown, recorded."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import filter_loader

PUBLIC = "/etc/ssh/ssh_host_ed25519_key.pub"
ssh_fingerprint, ssh_host_key = (
    filter_loader.get(name).j2_function for name in ("ssh_fingerprint", "ssh_host_key")
)


class Key(NamedTuple):
    name: str
    address: str
    kind: str
    public: str  # in base64

    @property
    def fingerprint(self) -> str:
        return str(ssh_fingerprint(self.public))

    @property
    def line(self) -> str:
        return f"{self.name} {self.kind} {self.public}\n"


def known(text: str) -> dict[str, list[str]]:
    """Names by public key, of a known_hosts."""
    found: dict[str, list[str]] = {}
    for words in (line.split() for line in text.splitlines()):
        if len(words) >= 3 and not words[0].startswith("#"):
            found.setdefault(words[2], []).extend(words[0].split(","))
    return found


def problems(
    keys: list[Key], recorded: str, told: str | None, nodes: Collection[str], file: Path
) -> list[str]:
    """recorded: what is in `file`, a known_hosts. told: what the person's file says, where there is one. nodes: the
    names of all that there are."""
    said = []
    names = known(recorded)
    for key in keys:
        others = names.setdefault(key.public, [])
        if others and not set(others) & set(nodes):
            said.append(
                f"{key.name} ({key.address}) shows the host key of {others[0]}, which is no node any more. If you have "
                f"renamed it: ssh-keygen -R {others[0]} -f {file}, and this again. If {others[0]} was another "
                "PC, one disk was copied from the other."
            )
        elif others:
            said.append(
                f"{key.name} ({key.address}) shows the same host key as {others[0]}: one disk was copied from the "
                "other, or both addresses lead to the same PC. On one of them: sudo rm /etc/ssh/ssh_host_*; "
                "sudo ssh-keygen -A; sudo systemctl restart ssh"
            )
        others.append(key.name)
    words = set((told or "").split())
    strange = [key for key in keys if told is not None and not {key.fingerprint, key.public} & words]
    said += [
        f"{key.name} ({key.address}) shows {key.fingerprint}, which is not in host_keys." for key in strange
    ]
    if strange:
        said.append(
            f"What is a PC's own says, at its own keyboard: ssh-keygen -lf {PUBLIC}. Where that is another one, "
            "something else has its address."
        )
    return said


def table(keys: list[Key]) -> str:
    rows = [(key.name, key.address, key.kind.removeprefix("ssh-"), key.fingerprint) for key in keys]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join(["Host keys that were never seen here:", *lines])


class ActionModule(ActionBase):
    """`nodes` ({name: [address, port]}): reads the keys of those that are not in `known_hosts`; `new` are their lines,
    `table` shows them. `told` is `ask`, `accept` or a file with fingerprints or public keys, in which each has to be.
    `record`: writes these lines there."""

    _VALID_ARGS = frozenset(("nodes", "known_hosts", "told", "record"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        path = Path(self._task.args["known_hosts"])
        recorded = path.read_text(encoding="utf-8") if path.exists() else ""
        if "record" in self._task.args:
            if not self._task.check_mode:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                new = path.with_suffix(".new")  # all keys or the old ones, whatever happens here
                new.write_text(recorded + self._task.args["record"], encoding="utf-8")
                new.chmod(0o600)
                new.replace(path)
            return {"changed": True}
        told = self._told(str(self._task.args["told"]))
        names = {name for names in known(recorded).values() for name in names}
        new = {name: place for name, place in self._task.args["nodes"].items() if name not in names}
        with ThreadPoolExecutor(16) as pool:
            read = pool.map(lambda place: ssh_host_key(str(place[0]), int(place[1])), new.values())
        keys = [Key(name, new[name][0], *key) for name, key in zip(new, read, strict=True)]
        shown = [key for key in keys if key.public]
        said = [
            f"{key.name} ({key.address}) does not say its host key within 20 s."
            for key in keys
            if not key.public
        ]
        said += problems(shown, recorded, told, (task_vars or {})["groups"]["all"], path)
        if said:
            raise AnsibleActionFail(
                "\n".join([*said, "No password has been sent, nothing has been changed."])
            )
        return {
            "changed": False, "new": "".join(key.line for key in shown), "table": table(shown) if shown else "",
        }  # fmt: skip

    def _told(self, told: str) -> str | None:
        if told in ("ask", "accept"):
            return None
        try:
            return Path(told).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise AnsibleActionFail(
                f"host_keys={told} is neither ask nor accept nor a file that can be read ({problem}): a file with what "
                f"ssh-keygen -lf {PUBLIC} says on each PC. No password has been sent."
            ) from None
