"""The guide's name for `aura train`: GPT-2, fp32, no accumulation, the corpus in ./Data, the run in ./checkpoints.

What is typed behind it is `aura train`'s, and wins. (docs/guide-commands.md)
"""

import sys
from pathlib import Path

from aura.commands.cli import main

OURS = "--preset gpt2 --precision fp32 --gradient-accumulation-steps 1 --run-dir checkpoints/gpt2".split()


def corpus() -> list[str]:
    """The one that is prepared in ./Data."""
    found = sorted(path.parent for path in Path("Data").glob("*/meta.json"))
    if len(found) == 1:
        return ["--corpus", str(found[0])]
    if found:
        sys.exit(f"Which corpus? Say one of: {', '.join(f'--corpus {path}' for path in found)}.")
    sys.exit(
        "There is no corpus in ./Data. Prepare one, once: docker compose run --rm trainer "
        "aura prepare --dataset-name wikipedia --vocab-size 50257 --output Data/wikipedia"
    )


def says(words: list[str], *flags: str) -> bool:
    return any(word.split("=")[0].replace("_", "-") in flags for word in words)


if __name__ == "__main__":
    typed = sys.argv[1:]
    ready = says(typed, "--corpus", "--dataset-path", "-h", "--help")
    sys.exit(main(["train", *OURS, *([] if ready else corpus()), *typed]))
