"""What runs have finished, in another place too: checkpoints, `final/`, and what both need to be used.

    <target>/<run>/checkpoints/checkpoint-step-200/    with the same bytes, as its manifest says
    <target>/<run>/final/
    <target>/<run>/tokenizer.json …                    small files of the run

Made for a place that may go away at any moment (NFS, SMB, object storage) and for a unit that runs every few minutes:
what is there is left alone, what was interrupted goes on where it stopped, and a checkpoint counts only when everything
of it has arrived. Whoever trains waits for none of it. How a place takes files say on_disk.py and in_bucket.py; this
module is what is copied when, and what stays. Standard library only: it starts at once and takes little memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from aura.checkpoint import manifest
from aura.corpus.corpus import TOKENIZER, TOKENIZER_CONFIG
from aura.durable import LOST
from aura.errors import ConfigError
from aura.storage.address import Address
from aura.storage.bucket import Refused, Unreachable
from aura.texts import console
from aura.watch.lead import Lead, lead_in, lead_of

FINAL = "final"
LAUNCH = "launch.json"  # of a run's directory there: as whom the node that copied last knew those that train
SMALL = (TOKENIZER, TOKENIZER_CONFIG, "config.json", "model_config.json", "done.json", "training_log.csv")


class Later(Exception):
    """Nothing can be written there for now; the text says why."""


@dataclass
class Pace:
    """Lets through `rate` bytes per second at most; 0 for as many as come."""

    rate: float
    _free_at: float = field(default_factory=time.monotonic)

    def passed(self, count: int) -> None:
        """Wait until the next bytes may go."""
        if self.rate:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self.rate
            time.sleep(max(0.0, self._free_at - now))


class Target(Protocol):
    """Where copies go; a `name` is like first/checkpoints/checkpoint-step-200. Everything raises OSError, Refused and
    Unreachable."""

    @property
    def where(self) -> Path | Address: ...

    def no_room_for(self, path: Path, name: str, size: int) -> str:
        """Why these bytes do not fit, as a sentence; '' where they do."""

    def has_checkpoint(self, name: str, files: dict[str, Any], content: bytes) -> bool:
        """Is a whole one there, with this manifest, and files of the sizes that it says?"""

    def put_checkpoint(self, path: Path, name: str, files: dict[str, Any], content: bytes) -> None:
        """`files` and `content` of its manifest. It is there whole or not at all. Raises manifest.Damaged where the
        files are not what the manifest says."""

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None where there is none."""

    def write(self, name: str, content: bytes) -> None: ...

    def has_file(self, path: Path, name: str) -> bool: ...

    def put_file(self, path: Path, name: str) -> None: ...

    def put_model(self, files: list[Path], name: str) -> None:
        """An exported model, which has no manifest."""

    def tidy(self, name: str, local: set[str]) -> None:
        """What was begun below `name`, and is not in `local` any more, goes: nobody completes it."""

    def rotate(self, name: str, keep: int, local: set[str], newest: manifest.Writer) -> None:
        """Of the checkpoints below `name`, those in `local` stay, the `keep` that came last, and what the attempt that
        wrote the newest here knew nothing of."""


def may_go(content: bytes | None, newest: manifest.Writer) -> bool:
    """A checkpoint there, with this manifest, for newer ones. One that they knew nothing of is of a run of this name
    that was begun anew since."""
    try:
        writer = manifest.writer_of(json.loads(content or b""))
    except (ValueError, TypeError, AttributeError):
        return False
    return writer == newest or manifest.follows(newest, writer)


@dataclass(frozen=True)
class Copier:
    """`keep`: checkpoints that stay on the target when the run itself has let them go."""

    target: Target
    keep: int
    say: Callable[[str], None]
    troubles: list[str] = field(default_factory=list)  # sentences: what is not copied for now

    def copy_all(self, runs: Path) -> None:
        """Every run that a rank leads which is here: the others' checkpoints are the same. What is wrong with one of
        them holds up no other one. Raises Later, and ConfigError where `runs` is something else."""
        if not runs.is_dir():
            raise ConfigError("runs_not_there", path=runs)
        if any(runs.glob("rank-*/status.json")):
            raise ConfigError("runs_is_a_run", path=runs, parent=runs.absolute().parent)
        there = [path for path in sorted(runs.iterdir()) if path.name != LOST and not path.is_symlink()]
        if there and not any(any(path.glob("rank-*")) for path in there):
            raise Later(console.text("no_run_has_begun", path=runs))
        for run in there:
            try:
                lead = lead_of(run)
                if (run / f"rank-{lead.rank}/status.json").is_file():
                    self._copy_run(run, lead)
            except OSError as error:
                self.troubles.append(console.text("not_copied_now", run=run.name, error=error))
            except Refused as error:  # it may be one object of this run that the key must not delete
                self.troubles.append(str(error))
            except Unreachable as error:  # of all runs the same would be said
                self.troubles.append(str(error))
                break
        if self.troubles:
            raise Later(" ".join(dict.fromkeys(self.troubles)))

    def _copy_run(self, run: Path, lead: Lead) -> None:
        """Not where another node leads it by now, and this one heard nothing of it: two would copy over each other for
        ever."""
        if lead.launch:
            file = f"{run.name}/{LAUNCH}"
            there = lead_in(self.target.read(file) or b"")
            if lead.age < there.age:
                values = {"launch": there.launch, "record": there.record, "file": file}
                self.say(console.text("copied_from_another_node", run=run.name, **values))
                return
            if lead.age > there.age:
                self.target.write(file, json.dumps(lead.as_json()).encode())
        local = sorted(manifest.checkpoints(run / "checkpoints"), key=manifest.step_of, reverse=True)
        names, directory = {path.name for path in local}, f"{run.name}/checkpoints"
        if local:
            try:
                self.target.tidy(directory, names)
            except Refused as error:  # a key that may write and not delete holds up no copy
                self.troubles.append(str(error))
        copied = [self._copy_checkpoint(path, f"{directory}/{path.name}") for path in local]
        writers = [writer for writer in copied if writer is not None]
        for path in run.iterdir():
            if path.name in SMALL and not self.target.has_file(path, f"{run.name}/{path.name}"):
                self.target.put_file(path, f"{run.name}/{path.name}")
        if (run / FINAL).is_dir():
            self._copy_final(run / FINAL, f"{run.name}/{FINAL}")
        # What the run has let go meanwhile holds up nothing: it may save faster than it can be copied.
        lacks = any(writer is None and path.is_dir() for path, writer in zip(local, copied, strict=True))
        if writers and not lacks:
            newest = max(writers, key=lambda writer: writer.number)
            self.target.rotate(directory, self.keep, names, newest)

    def _copy_checkpoint(self, path: Path, name: str) -> manifest.Writer | None:
        """Who wrote it, if it is there now."""
        try:
            said = manifest.read(path)
            files, writer = said["files"], manifest.writer_of(said)
            content = (path / manifest.MANIFEST).read_bytes()
        except (OSError, manifest.Damaged) as reason:
            if path.is_dir():  # else the run has let it go meanwhile
                self.say(console.text("damaged_not_copied", path=path, reason=reason))
            return None
        if self.target.has_checkpoint(name, files, content):
            return writer
        size, began = sum(entry["bytes"] for entry in files.values()), time.monotonic()
        if sentence := self.target.no_room_for(path, name, size):
            self.troubles.append(sentence)
            return None
        try:
            self.target.put_checkpoint(path, name, files, content)
        except FileNotFoundError:
            if all((path / file).exists() for file in files):
                raise
            return None  # the run has let it go meanwhile
        except manifest.Damaged as reason:
            self.say(console.text("damaged_not_copied", path=path, reason=reason))
            return None
        seconds = time.monotonic() - began
        self.say(
            console.text("copied_in", path=self.target.where / name, megabytes=size / 1e6, seconds=seconds)
        )
        return writer

    def _copy_final(self, path: Path, name: str) -> None:
        """Names, sizes and times say whether it is the same."""
        files = [file for file in path.iterdir() if file.is_file()]
        if all(self.target.has_file(file, f"{name}/{file.name}") for file in files):
            return
        if sentence := self.target.no_room_for(path, name, sum(file.stat().st_size for file in files)):
            self.troubles.append(sentence)
            return
        self.target.put_model(files, name)
        self.say(console.text("copied", path=self.target.where / name))
