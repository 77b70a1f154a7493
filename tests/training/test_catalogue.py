"""The datasets with a name, and the licences of those that are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pytest
from aura.commands.prepare import main
from aura.commands.prepare_sources import usual_vocabulary
from aura.corpus.catalogue import DATASETS
from aura.corpus.prepare import build
from aura.corpus.sources import HubDataset, Problems
from aura.corpus.work import Settings
from aura.errors import AuraError, ConfigError
from pyarrow import parquet
from test_sources import nothing


def test_the_usual_vocabulary_follows_from_the_languages() -> None:
    one = (["c4"], ["acme/es"], [], ["c4=0.5", "wikipedia-es=0.5"], ["fineweb-edu:sample-100BT@ab=1"])
    more = (["fineweb2-es=0.7", "fineweb-edu=0.3"], ["c4=0.5", "books=0.5"], ["spanish=0.7", "english=0.3"])
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
    assert source.provenance(None) == {"licence": known.licence, "url": page}


@pytest.mark.parametrize(
    ("name", "licence"),
    [
        ("nvidia/ClimbMix", "cc-by-nc-4.0"),
        ("optimalscale/climbmix", "cc-by-nc-4.0"),
        ("LHF/escorpius", "cc-by-nc-nd-4.0"),
        ("uonlp/CulturaX", "gated"),
    ],
)
def test_what_is_not_for_every_use_is_taken_only_under_its_licence(
    name: str, licence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise AssertionError("The hub was asked.")

    monkeypatch.setattr(huggingface_hub, "HfApi", none)
    command = ["--output", str(tmp_path / "c"), "--dataset"]
    for words in ([name], [f"{name}=0.5", "c4=0.5"], [name, "--accept-licence", "cc-by-nc-2.0"]):
        with pytest.raises(ConfigError, match=rf"{name} .*--accept-licence {licence}"):
            main([*command, *words])
    source = HubDataset(name, None, "train", "text", accepted=[licence])
    assert source.provenance(None)["licence"] == licence


def test_what_the_card_says_of_the_licence_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def source(licence: str | list[str] | None, *accepted: str) -> HubDataset:
        monkeypatch.setattr(huggingface_hub, "HfApi", Hub(licence))
        dataset = HubDataset("acme/es", None, "train", "text", accepted=accepted)
        dataset.identity(nothing)
        return dataset

    assert source(["mit", "gfdl"]).provenance(None)["licence"] == "mit, gfdl"
    assert source(None).provenance(None)["licence"] == "unknown"
    assert source("CC-BY-NC-SA-4.0", "cc-by-nc-sa-4.0").provenance(None)["licence"] == "CC-BY-NC-SA-4.0"
    assert source(["cc-by-nc-4.0", "mit"], "CC-BY-NC-4.0,").provenance(None)["licence"] == "cc-by-nc-4.0, mit"
    for licence, said in (
        ("fair-noncommercial-research-license", "fair-noncommercial"),
        (["cc-by-nc-4.0", "mit"], "cc-by-nc-4"),
        ("cc-by-nc-4.0", r"cc-by-nc-4\.0, which"),
    ):
        with pytest.raises(ConfigError, match=f"acme/es comes under the licence {said}"):
            source(licence)


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
    monkeypatch.setattr(HubDataset, "provenance", lambda self, position: {"licence": "odc-by", "url": "page"})
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
    assert HubDataset("c4", None, "train", "text").options == {}
    source = HubDataset(str(tmp_path), None, "train", "text")
    source.options = {"columns": ["text"]}
    assert len(list(source.documents(None, Problems(0, print), nothing))) == 20
    assert set(next(iter(source._stream))) == {"text"}
