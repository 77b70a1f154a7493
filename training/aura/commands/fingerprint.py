"""`aura fingerprint`: verify a corpus and print its fingerprint. Standard library only, so that it answers at once; a
corpus in object storage is fetched first."""

from __future__ import annotations

from aura.commands.named import corpus_here
from aura.corpus.corpus import verify
from aura.errors import Parser
from aura.storage.address import place


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura fingerprint",
        description="Verify every checksum of a corpus and print its fingerprint. Equal fingerprints, equal corpora.",
    )
    parser.add_argument("corpus", type=place, metavar="DIR", help="directory of the corpus, or s3://…")
    print(verify(corpus_here(parser.parse_args(argv).corpus)).fingerprint)
    return 0
