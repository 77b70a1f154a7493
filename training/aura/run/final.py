"""The trained model of a run that is complete, for `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from aura.errors import AuraError
from aura.model.export import CONFIG, export_checkpoint
from aura.run.directory import DONE, FINAL
from aura.texts import console


def export_final(run_dir: Path, say: Callable[[str], None]) -> None:
    """The trained model for `transformers`; the run is complete also where this cannot be written.

    From the last checkpoint, and when the ranks have parted: the others must not wait for this disk.
    """
    try:
        steps = json.loads((run_dir / DONE).read_text(encoding="utf-8"))["step"]
        export_checkpoint(run_dir / "checkpoints" / f"checkpoint-step-{steps}", run_dir / FINAL)
    except (AuraError, OSError) as error:
        say(console.text("export_later", error=error, path=run_dir))
    else:
        say(console.text("final", path=run_dir / FINAL))


def is_exported_since_done(run_dir: Path) -> bool:
    """Else `final/` is of fewer steps: the run was done before, and went on."""
    try:
        return (run_dir / FINAL / CONFIG).stat().st_mtime >= (run_dir / DONE).stat().st_mtime
    except OSError:
        return False
