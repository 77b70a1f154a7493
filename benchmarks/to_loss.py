"""`make bench-gpu CORPUS=DIR`: today's recipe beside GPT-2 of the same size, trained to the same loss.

GPT-2 with AdamW, as its preset has it, learns TOKENS of a corpus of one's own. Qwen3 learns parts of as many, each in a
run of its own that ends with its decay; between two of them lies the loss of GPT-2. Both take the tokens a step of
aura/recipe.py. Losses are of the validation text and one tokenizer; seconds are those behind the first step, which may
compile. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from aura.config import resolve
from aura.recipe import recipe
from measuring import options, ours, part_until, show

TOKENS = 100_000_000
PARTS = (0.15, 0.25, 0.4)


def main() -> int:
    parser = options(__doc__, text=False)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, metavar="DIR", help="of at least so many tokens")
    add("--tokens", type=int, default=TOKENS, metavar="N", help=f"of the first model ({TOKENS:,})")
    add("--presets", nargs=2, default=["gpt2", "qwen3-125m"], metavar="PRESET", help="the two")
    given = parser.parse_args()
    rows, losses, seconds = [], {}, {}
    for preset, part in [(given.presets[0], 1.0), *((given.presets[1], part) for part in PARTS)]:
        tokens = round(part * given.tokens)
        batch = recipe(resolve(preset).d_model, tokens).global_batch_tokens
        settings = {"tokens": tokens, "global_batch_tokens": batch, "validate_every": 10**6}
        print(f"{preset}, {tokens:,} tokens …", flush=True)
        done = ours(preset, given.corpus, {**settings, "save_every": 10**6})
        assert done.validation_loss is not None
        losses[part], seconds[part] = done.validation_loss, done.seconds[-1] - done.seconds[0]
        print(f"  {losses[part]:.3f} nats per token in {seconds[part]:,.0f} s", flush=True)
        rows.append([preset, f"{tokens:,}", f"{batch:,}", f"{losses[part]:.3f}", f"{seconds[part]:,.0f}"])
    show("To one loss", ("preset", "tokens", "a step", "validation loss", "seconds"), rows, left=("preset",))
    target, whole = losses.pop(1.0), seconds.pop(1.0)
    part = part_until(target, losses)
    time = sum(seconds.values()) / sum(PARTS) * part / whole
    one, other = given.presets
    print(f"{other} has the loss of {one} after {part:.3f} of its tokens, {time:.3f} of its time")
    print(
        json.dumps({"bench": "to_loss", "losses": {1.0: target, **losses}, "tokens": part, "seconds": time})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
