"""`aura fingerprint`: verify a corpus and print its fingerprint. Standard library only, so that it answers at once."""

from __future__ import annotations

from pathlib import Path

from aura.corpus.corpus import verify
from aura.errors import Parser


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura fingerprint",
        description="Verify every checksum of a corpus and print its fingerprint. Equal fingerprints, equal corpora.",
    )
    parser.add_argument("corpus", type=Path, metavar="DIR", help="directory of the corpus")
    print(verify(parser.parse_args(argv).corpus).fingerprint)
    return 0
