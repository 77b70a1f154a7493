"""What a rank that cannot take part says, before it has met the others: to them, and in its status."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from aura.cluster.dist_env import DistEnv, dist_env_from_environment
from aura.cluster.rendezvous_handler import join
from aura.cluster.rendezvous_store import NoProcessGroup
from aura.errors import FOR_GOOD, AuraError
from aura.run.status import Status
from aura.run.stop import StoppedWhileWaiting


def refuse(error: AuraError, run_dir: Path, join_timeout: float) -> int:
    """This rank cannot take part, whatever the process group does; its exit code, once the others know it.

    Nothing starts it again, so they would wait for it, be started again, and wait again, for ever.
    """
    print(error, file=sys.stderr, flush=True)
    tell_the_others(error, run_dir, join_timeout)
    return error.exit_code


def tell_the_others(error: AuraError, run_dir: Path, join_timeout: float) -> None:
    if error.exit_code not in FOR_GOOD:
        return
    # What goes wrong from here on hides nothing: the sentence has been said.
    with suppress(AuraError, NoProcessGroup, StoppedWhileWaiting):
        if (place := dist_env_from_environment()).world_size > 1:
            own = run_dir / f"rank-{place.rank}"
            join(place, run_dir.absolute().name, join_timeout, refusal=error, directory=own)


def write_down(error: AuraError, run_dir: Path, place: DistEnv) -> None:
    """In a status that nothing else of this start has written."""
    known = {"rank": place.rank, "world_size": place.world_size, "node": place.node}
    status = Status(run_dir / f"rank-{place.rank}" / "status.json", **known)
    status.set(state="failed", message=str(error), exit_code=error.exit_code)
