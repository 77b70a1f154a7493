"""What has become of a run, from the status.json of the rank that leads it: what of that is worth a message.

`news` is a function of what was seen before and what the file says now; it neither waits nor asks anybody.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from aura.errors import EXIT_TEMPORARY, FOR_GOOD
from aura.texts.console import text
from aura.watch.events import CRITICAL, INFO, WARNING, Event
from aura.watch.kernel_log import boot

ACTIVE = ("joining", "training", "saving")
PATIENCE = 180.0  # seconds in which a run that has broken off is started again, by systemd or by a person

Status = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """Of one run. `phase`: unknown, running, broken (it may begin again) or over."""

    phase: str = "unknown"
    state: str = ""  # the last one in the file
    pid: int = 0
    learned: bool = False  # a step has been reported
    since: float = 0.0  # when it was found broken; 0: it is not, or it has begun again
    leads: bool = False  # the rank that wrote it tells of the run: the lowest of those that train
    away: Sequence[int] = ()  # ranks that the others train without
    leaderless_since: float = (
        0.0  # since when it is broken, of a rank that does not lead; -1: that was said; 0: it is not
    )


def statuses(runs: Path) -> Iterator[tuple[Path, Status]]:
    """Of every rank that is here, in every run or in this one: its directory, and what it says."""
    for file in sorted([*runs.glob("*/rank-*/status.json"), *runs.glob("rank-*/status.json")]):
        with suppress(OSError, ValueError):
            content = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                yield file.parent, content


def is_alive(status: Status) -> bool:
    """Is the process that wrote it still there? It may have been killed, and its number may be another's."""
    try:
        if not runs_on(status["pid"]):
            return False
        return bool(status["begun"] == begun_of(status["pid"]))
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
    except (KeyError, TypeError, OSError, psutil.Error):
        return True  # nobody knows


def begun_of(pid: int) -> str:
    """When a process was started, in words that no setting of the clock changes: the machine's start, and ticks after
    it. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return f"{boot()} {fields[19]}"  # proc(5): field 22, after the name and the number


def runs_on(pid: int) -> bool:
    """One that has ended, and that nobody has asked for its exit code yet, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def news(
    run: str, seen: Seen, status: Status, alive: bool, began: float, now: float
) -> tuple[Seen, list[Event]]:
    """began: since when somebody looks, in seconds since the epoch; what ended before that is no news. now: seconds of
    a clock that nobody sets, and that begins anew with the machine."""
    state, pid = str(status.get("state")), int(status.get("pid") or 0)
    another, before = pid != seen.pid, seen.state
    missed = _last_word(seen.pid, status) if another and before in ACTIVE and seen.phase == "running" else {}
    seen = replace(seen, state=state, pid=pid, leads=_leads(seen, status))
    if state in ACTIVE and alive:
        return _of_active(run, seen, status, missed)
    if seen.phase in ("unknown", "over") and not (another and float(status.get("updated") or 0) >= began):
        return replace(seen, phase="over"), []
    if state == "done":
        return replace(seen, phase="over"), [_finished(run, status)]
    if state == "stopped" and status.get("exit_code") == EXIT_TEMPORARY:
        return seen, []  # one is back, or leaves; this one goes on
    if state == "stopped":
        message = text("run_stopped", run=run, node=status.get("node"), step=status.get("step"))
        return replace(seen, phase="over"), [_event("run.stopped", INFO, message, run, status)]
    if state == "failed" and status.get("exit_code") in FOR_GOOD:
        return replace(seen, phase="over"), [_failed(run, status, str(status.get("message")))]
    # Once until it trains again: a run that is short of ranks ends every few minutes.
    return _of_broken(run, seen, status, now, seen.phase != "broken")


def report_leaderless(run: str, seen: Seen, status: Status, now: float) -> tuple[Seen, list[Event]]:
    """Of a rank that does not lead: the PC that does may be off, and then nobody else tells that the run is broken."""
    if seen.phase != "broken":
        return replace(seen, leaderless_since=0.0), []
    if seen.leaderless_since < 0:
        return seen, []
    if not seen.leaderless_since or now < seen.leaderless_since:
        return replace(seen, leaderless_since=now), []
    if now - seen.leaderless_since < PATIENCE:
        return seen, []
    reason = str(status.get("message") or before_it(status).get("message") or "")
    return replace(seen, leaderless_since=-1.0), [_interrupted(run, status, reason)]


def _leads(seen: Seen, status: Status) -> bool:
    """While it has not met the others yet: as before, and rank 0 in a new launch."""
    said = status.get("leads")
    known = seen.leads if seen.phase in ("running", "broken") else status.get("rank") == 0
    return bool(known if said is None else said)


def before_it(status: Status) -> Status:
    """What the process before this one said last: another may have followed it before anybody looked."""
    said = status.get("before")
    return {**status, **said} if isinstance(said, dict) else {}


def _last_word(pid: int, status: Status) -> Status:
    """Of the process that was seen training, and that another has followed; {} where it ended in good order, so that
    one that is back takes part."""
    said = before_it(status)
    if said.get("pid") != pid or said.get("exit_code") is None:
        return {**status, "message": _killed(status)}
    return {} if said.get("state") in ("stopped", "done") else said


def _of_active(run: str, seen: Seen, status: Status, missed: Status) -> tuple[Seen, list[Event]]:
    events = []
    if missed:
        seen = replace(seen, phase="broken", since=0.0)
        events.append(_interrupted(run, missed, str(missed.get("message"))))
    if seen.phase in ("unknown", "over"):
        seen = replace(seen, phase="running", learned=False)
        message = text("run_started", run=run, ranks=status.get("world_size"))
        events.append(_event("run.started", INFO, message, run, status))
    seen = replace(seen, since=0.0)
    if status.get("loss") is None:
        return seen, events
    if not seen.learned:
        values = {key: status.get(key) for key in ("step", "max_steps", "loss")}
        message = text("run_learns", run=run, **values)
        events.append(_event("run.first_step", INFO, message, run, status, facts=values))
    away = list(status.get("away") or ())
    changes = _came_and_went(run, status, set(seen.away), set(away)) if seen.learned else []
    if seen.learned and seen.phase == "broken" and not changes:
        message = text("run_resumed", run=run, step=status.get("step"))
        events.append(_event("run.resumed", INFO, message, run, status))
    return replace(seen, phase="running", learned=True, away=away), [*events, *changes]


def _came_and_went(run: str, status: Status, before: set[int], now: set[int]) -> list[Event]:
    """The others have met without some, or with some that were away."""
    events, step = [], status.get("step")
    if left := ", ".join(map(str, sorted(now - before))):
        message = text("rank_left", run=run, ranks=left, step=step)
        events.append(_event("rank.left", WARNING, message, run, status, text("rank_left_remedy")))
    if back := ", ".join(map(str, sorted(before - now))):
        events.append(
            _event("rank.back", INFO, text("rank_back", run=run, ranks=back, step=step), run, status)
        )
    return events


def _of_broken(run: str, seen: Seen, status: Status, now: float, is_new: bool) -> tuple[Seen, list[Event]]:
    """It has ended as one that is started again, or was killed. Where nobody does that, it has failed."""
    events = []
    reason = str(status.get("message")) if seen.state == "failed" else _killed(status)
    if is_new:
        events.append(_interrupted(run, status, reason))
    if not seen.since or now < seen.since:
        return replace(seen, phase="broken", since=now), events
    if now - seen.since > PATIENCE:
        message = text("run_not_started_again", reason=reason, minutes=PATIENCE / 60)
        return replace(seen, phase="over"), [*events, _failed(run, status, message)]
    return seen, events


def _finished(run: str, status: Status) -> Event:
    loss = status.get("validation_loss")
    shown = text("unknown") if loss is None else f"{loss:.4f}"
    message = text("run_finished", run=run, steps=status.get("step"), loss=shown)
    return _event(
        "run.finished", INFO, message, run, status, str(status.get("outcome") or ""), {"loss": loss}
    )


def _killed(status: Status) -> str:
    return text("run_killed", rank=status.get("rank"))


def _interrupted(run: str, status: Status, reason: str) -> Event:
    message = text("run_interrupted", run=run, step=status.get("step"), reason=reason)
    return _event("run.interrupted", WARNING, message, run, status)


def _failed(run: str, status: Status, reason: str) -> Event:
    message = text("run_failed", run=run, step=status.get("step"), reason=reason)
    return _event("run.failed", CRITICAL, message, run, status, text("run_failed_remedy"))


def _event(
    kind: str,
    severity: str,
    message: str,
    run: str,
    status: Status,
    remedy: str = "",
    facts: Status | None = None,
) -> Event:
    return Event(
        kind,
        severity,
        message,
        remedy,
        host=str(status.get("node") or ""),
        run=run,
        rank=status.get("rank"),
        attempt=str(status.get("attempt") or ""),
        step=status.get("step"),
        facts=facts or {},
    )
