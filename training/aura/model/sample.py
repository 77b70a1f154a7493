"""`aura sample`: let a trained model continue a text."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from aura.checkpoint import store as checkpoint
from aura.config import from_values
from aura.corpus.corpus import TOKENIZER
from aura.errors import ConfigError, Parser
from aura.model import export
from aura.model.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    ids: list[int],
    count: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    seed: int,
    end: int | None = None,
) -> list[int]:
    """`ids` and up to `count` more token ids, all below `vocab_size`; the token `end` is the last one.

    Temperature 0 takes the likeliest token each time. Nothing is cached: every token costs a pass over the last
    `model.seq_len` tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids = list(ids)
    for _ in range(count):
        logits = model(torch.tensor([ids[-model.seq_len :]], device=device))[0, -1, :vocab_size].float().cpu()
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            if top_k:
                logits[logits < logits.topk(min(top_k, vocab_size)).values[-1]] = -torch.inf
            probabilities = torch.softmax(logits / temperature, dim=0)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        if ids[-1] == end:
            break
    return ids


def load(path: Path) -> tuple[GPT, Tokenizer]:
    """A verified checkpoint or an exported model, in fp32 on the best device, and its tokenizer. Raises DataError."""
    if export.is_exported(path):
        model, tokenizer = export.load(path), path / TOKENIZER
    else:
        tokenizer = export.tokenizer_of(path)
        model = GPT(from_values(export.verified_state(path)["config"]))
        checkpoint.load_parameters(path, model)
    model = model.float().eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return model, export.read_tokenizer(tokenizer)


def main(argv: list[str]) -> int:
    parser = Parser(prog="aura sample", description="Continue a text with a trained model.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run-dir", type=Path, metavar="DIR", help="take the newest checkpoint of this run")
    which.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="take this checkpoint, or what aura export made of one"
    )
    parser.add_argument("--prompt", default="", help="beginning of the text (none)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens to add (100)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 always takes the likeliest (0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="choose among the K likeliest (50; 0: all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same text (0)")
    arguments = parser.parse_args(argv)
    for name in ("tokens", "temperature", "top_k"):
        if getattr(arguments, name) < 0:
            raise ConfigError("at_least_0", name=name.replace("_", "-"))

    model, tokenizer = load(arguments.checkpoint or export.newest(arguments.run_dir))
    end = export.end_of_text(tokenizer)
    start = [] if end is None else [end]  # a document begins after the end of another
    given = start + tokenizer.encode(arguments.prompt, add_special_tokens=False).ids
    if not given:
        raise ConfigError("prompt_needed")
    ids = generate(
        model,
        given,
        arguments.tokens,
        export.token_ids(tokenizer),
        arguments.temperature,
        arguments.top_k,
        arguments.seed,
        end,
    )
    print(tokenizer.decode(ids))
    return 0
