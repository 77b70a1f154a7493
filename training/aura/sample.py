"""`aura sample`: let a trained model continue a text."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from aura import checkpoint
from aura.config import from_values
from aura.corpus import END_OF_TEXT, TOKENIZER
from aura.errors import DataError, Parser
from aura.model import GPT


@torch.no_grad()
def generate(
    model: GPT, ids: list[int], count: int, vocab_size: int, temperature: float, top_k: int, seed: int
) -> list[int]:
    """`ids` and `count` more token ids, all below `vocab_size`. Temperature 0 takes the likeliest token each time.

    Nothing is cached: every token costs a pass over the last `model.seq_len` tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids = list(ids)
    for _ in range(count):
        logits = model(torch.tensor([ids[-model.seq_len :]], device=device))[0, -1, :vocab_size].float().cpu()
        if temperature == 0:
            ids.append(int(logits.argmax()))
            continue
        if top_k:
            logits[logits < logits.topk(min(top_k, vocab_size)).values[-1]] = -torch.inf
        probabilities = torch.softmax(logits / temperature, dim=0)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return ids


def load(path: Path) -> GPT:
    """The model of a checkpoint, verified, on the best device."""
    try:
        checkpoint.verify(path)
    except checkpoint.Damaged as reason:
        raise DataError(f"{path} cannot be used: {reason}.") from None
    model = GPT(from_values(checkpoint.read_state(path)["config"]))
    checkpoint.load_parameters(path, model)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def main(argv: list[str]) -> int:
    parser = Parser(prog="aura sample", description="Continue a text with a trained model.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run-dir", type=Path, metavar="DIR", help="take the newest checkpoint of this run")
    which.add_argument("--checkpoint", type=Path, metavar="DIR", help="take this checkpoint")
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

    path = arguments.checkpoint
    if arguments.run_dir:
        found = checkpoint.newest_valid(arguments.run_dir / "checkpoints", print)
        if found is None:
            raise DataError(f"There is no checkpoint in {arguments.run_dir / 'checkpoints'} yet.")
        path = found.path
    tokenizer_file = path.absolute().parents[1] / TOKENIZER  # of the run directory
    if not tokenizer_file.is_file():
        raise DataError(
            f"{tokenizer_file} is missing; `aura train` puts a copy of the corpus' tokenizer there."
        )
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    model = load(path)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    start = [] if end_of_text is None else [end_of_text]  # a document begins after the end of another
    ids = generate(
        model,
        start + tokenizer.encode(arguments.prompt).ids,
        arguments.tokens,
        tokenizer.get_vocab_size(),
        arguments.temperature,
        arguments.top_k,
        arguments.seed,
    )
    print(tokenizer.decode(ids))
    return 0
