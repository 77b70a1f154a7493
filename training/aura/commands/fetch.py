"""`aura fetch`: a corpus behind an URL, into a directory of one's own."""

from __future__ import annotations

from pathlib import Path

from aura.commands.bars import Bars
from aura.corpus.remote import fetch_to
from aura.errors import ConfigError, Parser
from aura.storage.address import Address, place
from aura.texts.console import put


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura fetch",
        description="Fetch a corpus from object storage or a web server into a directory: whole, with every checksum "
        "right, or not at all. After an interruption the same command goes on; a corpus that is there already is left "
        "alone, and what is damaged of it fetched again. (aura train --corpus s3://… does this by itself, into the "
        "cache.)",
    )
    parser.add_argument("address", type=place, metavar="URL", help="where the corpus is: s3://… or https://…")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="the directory that it gets"
    )
    arguments = parser.parse_args(argv)
    if not isinstance(arguments.address, Address):
        raise ConfigError("no_address", word=arguments.address)
    with Bars() as bars:
        corpus = fetch_to(arguments.address, arguments.output, bars)
    put(corpus.fingerprint)
    return 0
