"""The datasets with a name, and the licences of those that are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pytest
from aura.commands.prepare_sources import usual_vocabulary
from aura.corpus.catalogue import DATASETS
from aura.corpus.listener import Silence
from aura.corpus.mixture import Mixture, Part
from aura.corpus.prepare import build, read_request
from aura.corpus.sources import HubDataset, Problems
from aura.corpus.work import Settings
from aura.errors import AuraError
from pyarrow import parquet
from test_sources import nothing


def test_the_usual_vocabulary_follows_from_the_languages() -> None:
    one = (["wikipedia"], ["acme/es"], [], ["fineweb2-es=0.5", "wikipedia:20231101.es@ab=0.5"])
    more = (["fineweb2-es=0.7", "acme/en=0.3"], ["spanish=0.7", "english=0.3"])
    assert {usual_vocabulary(names) for names in one} == {32_768}
    assert {usual_vocabulary(names) for names in more} == {49_152}


class Hub:
    """In place of the hub's interface: every dataset has this card."""

    def __init__(self, licence: str | list[str] | None) -> None:
        self.licence = licence

    def __call__(self) -> Hub:
        return self

    def dataset_info(self, path: str, revision: str | None) -> SimpleNamespace:
        card = {"license": self.licence} if self.licence else None
        return SimpleNamespace(sha=revision or "newest", card_data=card)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_name_says_licence_and_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub("mit"))
    source, known = HubDataset(name, None, "train", "text"), DATASETS[name]
    identity = {"dataset": known.path, "revision": "newest", "config": known.config}
    assert source.identity(nothing) == identity | {"split": "train", "column": "text"}
    page = f"https://huggingface.co/datasets/{known.path}"
    assert source.provenance() == {"licence": known.licence, "url": page}


@pytest.mark.parametrize(
    ("card", "licence"),
    [(["mit", "gfdl"], "mit, gfdl"), (None, "unknown"), ("CC-BY-NC-SA-4.0", "CC-BY-NC-SA-4.0")],
)
def test_what_the_card_says_of_the_licence_is_said_before_the_work(
    card: str | list[str] | None, licence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(card))
    said: list[str] = []
    listener = Silence()
    monkeypatch.setattr(listener, "say", said.append)
    mixed = Mixture(
        [Part(name, 1, HubDataset(name, None, "train", "text")) for name in ("acme/es", "wikipedia")]
    )
    read_request(mixed, Settings(300), listener)
    page = "https://huggingface.co/datasets"
    assert said == [
        f"Licence of {page}/acme/es: {licence}.",
        f"Licence of {page}/wikimedia/wikipedia: cc-by-sa-3.0, gfdl.",
    ]
    assert [part["licence"] for part in mixed.provenance()["parts"]] == [licence, "cc-by-sa-3.0, gfdl"]


def test_a_corpus_that_says_nothing_of_its_licence_is_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those are that were made before, and one whose dataset has another licence now."""
    (tmp_path / "hub").mkdir()
    texts = [f"documento {number} " * 9 for number in range(300)]
    parquet.write_table(pa.table({"text": texts}), tmp_path / "hub/train-0.parquet")

    def source() -> HubDataset:
        return HubDataset(str(tmp_path / "hub"), None, "train", "text")

    before = build(source(), tmp_path / "c", Settings(300))
    assert "licence" not in before.source
    monkeypatch.setattr(HubDataset, "provenance", lambda self: {"licence": "odc-by", "url": "page"})
    assert build(source(), tmp_path / "c", Settings(300)) == before
    new = build(source(), tmp_path / "new", Settings(300))
    assert (new.source["licence"], new.source["url"]) == ("odc-by", "page")
    assert build(source(), tmp_path / "new", Settings(300)) == new
    with pytest.raises(AuraError, match="other text or settings"):
        build(source(), tmp_path / "new", Settings(301))


def test_columns_that_are_heavier_than_the_text_are_not_read(tmp_path: Path) -> None:
    """As the embeddings of FineWeb2-HQ."""
    texts = [f"documento {number}" for number in range(20)]
    table = pa.table({"embeddings": [[0.5] * 9] * 20, "text": texts})
    parquet.write_table(table, tmp_path / "train-0.parquet")
    assert HubDataset("fineweb2-hq-es", None, "train", "text").options == {"columns": ["text"]}
    assert HubDataset("acme/es", None, "train", "text").options == {}
    source = HubDataset(str(tmp_path), None, "train", "text")
    source.options = {"columns": ["text"]}
    assert len(list(source.documents(None, Problems(0, print), nothing))) == 20
    assert set(next(iter(source._stream))) == {"text"}
