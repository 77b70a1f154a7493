"""`aura sample`: let a trained model continue a text."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from aura.commands.named import add_model, model_asked
from aura.corpus.special_tokens import count_ids
from aura.errors import ConfigError, Parser
from aura.model import sample
from aura.plan.auto import take_best_gpu
from aura.texts.console import put


def main(argv: list[str]) -> int:
    parser = Parser(prog="aura sample", description="Continue a text with a trained model.")
    add_model(parser, with_flag=True)
    parser.add_argument("--prompt", default="", help="beginning of the text (none)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens to add (100)")
    add_choice(parser)
    arguments = parser.parse_args(argv)
    check_choice(arguments)
    check_typed(arguments.prompt)
    trained = loaded(model_asked(arguments).path)
    begin = trained.id_of("bos_token")
    start = [] if begin is None else [begin]  # a document begins after the end of another
    given = start + trained.tokenizer.encode(arguments.prompt, add_special_tokens=False).ids
    if not given:
        raise ConfigError("prompt_needed")
    ids = continued(trained, given, arguments.tokens, arguments, arguments.seed)
    for piece in sample.pieces(trained.tokenizer, chain(given, ids)):
        put(piece, end="")
    put("")
    return 0


def loaded(path: Path) -> sample.Trained:
    """To be asked beside a training on the same machine. Raises DataError."""
    take_best_gpu(partial(print, file=sys.stderr), beside_others=True)
    return sample.load(path)


def continued(
    trained: sample.Trained, ids: list[int], count: int, asked: Namespace, seed: int
) -> Iterator[int]:
    """Up to `count` more ids, each chosen as is asked for (`add_choice`), but with this seed."""
    rows, choice = count_ids(trained.tokenizer), (asked.temperature, asked.top_k, seed)
    return sample.generate(trained.model, ids, count, rows, *choice, trained.ends)


def add_choice(parser: Parser) -> None:
    """Flags that say how a token is chosen."""
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 always takes the likeliest (0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="choose among the K likeliest (50; 0: all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same text (0)")


def check_typed(words: str) -> None:
    """Python keeps bytes that are no UTF-8 as halves of surrogate pairs, which no tokenizer takes. Raises
    ConfigError."""
    try:
        words.encode()
    except UnicodeEncodeError:
        raise ConfigError("typed_not_utf8", words=words) from None


def check_choice(arguments: Namespace) -> None:
    """Raises ConfigError."""
    for name in ("tokens", "temperature", "top_k"):
        if (value := getattr(arguments, name)) < 0:
            raise ConfigError("at_least", name=name.replace("_", "-"), value=value, least=0)
    # Far beyond these a division by it overflows; long before, it is the likeliest token or any.
    if arguments.temperature and not 1e-3 <= arguments.temperature <= 1e3:
        raise ConfigError("temperature_beyond", value=arguments.temperature)
    if not -(2**63) <= arguments.seed < 2**63:
        raise ConfigError("seed_beyond", value=arguments.seed)
