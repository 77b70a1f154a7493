"""Runs in datatrove's own environment, so that nothing of aura is imported here.

Called with a directory; reads from standard input `language`, `workers`, `minhash` (numbers of MinhashConfig),
`repetition` and `quality` (limits of the two filters). In the directory lie `documents/*.jsonl`, with `id` and `text`;
behind it lie `removed/<step>/*.jsonl` there. The order of the steps is FineWeb-2's (fineweb-2-pipeline.py).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

# A document is removed by the first of them that finds something.
STEPS = ("near_duplicate", "repetition", "quality")


def main() -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig

    folder, asked = Path(sys.argv[1]), json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    files = len(list((folder / "documents").iterdir()))
    language = asked["language"]
    minhash = MinhashConfig(**asked["minhash"], hash_config=HashConfig(hash_fc="xxhash", precision=64))

    def at(name: str) -> str:
        return str(folder / name)

    def run(tasks: int, *steps: Any) -> None:
        name = at(f"logs/{steps[-1].__class__.__name__}")
        workers = min(asked["workers"], files)
        LocalPipelineExecutor(list(steps), tasks=tasks, workers=workers, logging_dir=name).run()

    near, repetition, quality = (JsonlWriter(at(f"removed/{step}"), compression=None) for step in STEPS)
    run(files, JsonlReader(at("documents")), MinhashDedupSignature(at("signatures"), minhash, language))
    run(minhash.num_buckets, MinhashDedupBuckets(at("signatures"), at("buckets"), config=minhash))
    run(1, MinhashDedupCluster(at("buckets"), at("clusters"), config=minhash))
    run(
        files,
        JsonlReader(at("documents")),
        MinhashDedupFilter(at("clusters"), exclusion_writer=near),
        GopherRepetitionFilter(**asked["repetition"], language=language, exclusion_writer=repetition),
        GopherQualityFilter(**asked["quality"], language=language, exclusion_writer=quality),
    )


def end_with_the_parent() -> None:
    """Nobody tells this process that who asked was killed, but its end of the pipe is closed then."""
    while os.read(0, 1 << 10):  # not sys.stdin, whose lock this thread would keep from the end of the process
        pass
    os.killpg(0, 9)


if __name__ == "__main__":
    main()
