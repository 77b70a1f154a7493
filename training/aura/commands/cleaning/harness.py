"""Runs in datatrove's own environment, so that nothing of aura is imported here.

Called with a directory; reads from standard input `workers`, `minhash` (numbers of MinhashConfig), and for every wanted
language in `languages` the limits of the two filters, `repetition` and `quality`. In the directory lie
`documents/*.jsonl`, with `id` and `text`; behind it lie `removed/<step>/**/*.jsonl` there. The order of the steps is
FineWeb-2's (fineweb-2-pipeline.py): what is behind the first happens in every language by itself.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

# A document is removed by the first of them that finds something.
STEPS = ("language", "near_duplicate", "repetition", "quality")


class Work:
    """In the directory `folder`, by so many processes at most."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers, self.runs = folder, workers, 0

    def at(self, name: str) -> str:
        return str(self.folder / name)

    def run(self, tasks: int, *steps: Any) -> None:
        from datatrove.executor import LocalPipelineExecutor

        self.runs += 1
        LocalPipelineExecutor(
            list(steps),
            tasks=tasks,
            workers=min(self.workers, tasks),
            logging_dir=self.at(f"logs/{self.runs}"),
            start_method="fork",  # what is imported once is imported for all
        ).run()

    def remover(self, step: str, language: str) -> Any:
        from datatrove.pipeline.writers import JsonlWriter

        return JsonlWriter(self.at(f"removed/{step}/{language}"), compression=None)


def main() -> None:
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from steps import LanguageFilter

    folder, asked = Path(sys.argv[1]), json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    # The signatures of a bucket are open all at once.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    work = Work(folder, asked["workers"])
    work.run(
        len(list((folder / "documents").iterdir())),
        JsonlReader(work.at("documents")),
        LanguageFilter(list(asked["languages"]), work.remover("language", "")),
        JsonlWriter(work.at("wanted"), "${language}/${rank}.jsonl", compression=None),
    )
    shutil.rmtree(folder / "documents")
    for language, limits in asked["languages"].items():
        if (folder / "wanted" / language).is_dir():
            clean(work, language, limits, asked["minhash"])


def clean(work: Work, language: str, limits: dict[str, Any], minhash: dict[str, int]) -> None:
    """What is in wanted/<language>."""
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.utils.hashing import HashConfig
    from steps import words_of

    words = words_of(language)
    words.word_tokenize("")  # loaded before there are other processes
    wanted, signatures, buckets, clusters = (
        work.at(f"{name}/{language}") for name in ("wanted", "signatures", "buckets", "clusters")
    )
    files = len(list(Path(wanted).iterdir()))
    config = MinhashConfig(**minhash, hash_config=HashConfig(hash_fc="xxhash", precision=64))
    near, repetition, quality = (work.remover(step, language) for step in STEPS[1:])
    work.run(files, JsonlReader(wanted), MinhashDedupSignature(signatures, config, words))
    work.run(config.num_buckets, MinhashDedupBuckets(signatures, buckets, config=config))
    work.run(1, MinhashDedupCluster(buckets, clusters, config=config))
    work.run(
        files,
        JsonlReader(wanted),
        MinhashDedupFilter(clusters, exclusion_writer=near),
        GopherRepetitionFilter(**limits["repetition"], language=words, exclusion_writer=repetition),
        GopherQualityFilter(**limits["quality"], language=words, exclusion_writer=quality),
    )


def end_with_the_parent() -> None:
    """Nobody tells this process that who asked was killed, but its end of the pipe is closed then."""
    while os.read(0, 1 << 10):  # not sys.stdin, whose lock this thread would keep from the end of the process
        pass
    os.killpg(0, 9)


if __name__ == "__main__":
    main()
