"""The datasets of the Hugging Face hub that have a name here: Spanish, and free for every use.

A licence covers the collection, not the pages in it. Identifiers are the hub's
(https://huggingface.co/docs/hub/repositories-licenses).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dataset:
    path: str  # on the hub
    config: str
    licence: str


DATASETS = {
    "wikipedia": Dataset("wikimedia/wikipedia", "20231101.es", "cc-by-sa-3.0, gfdl"),  # the guides' name
    "fineweb2-es": Dataset("HuggingFaceFW/fineweb-2", "spa_Latn", "odc-by"),
    "fineweb2-hq-es": Dataset("epfml/FineWeb2-HQ", "spa_Latn", "odc-by"),
}
