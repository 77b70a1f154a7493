"""An exported model is the same model in `transformers`. The only tests that import it: it takes seconds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from aura import durable
from aura.checkpoint import manifest
from aura.commands import export as export_command
from aura.config import TrainConfig, resolve
from aura.corpus.corpus import END_OF_TEXT, TOKENIZER, TOKENIZER_CONFIG, Corpus, special_of
from aura.errors import ConfigError, DataError
from aura.model import export, sample
from aura.model.gpt import GPT
from aura.run.directory import describe
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from trainers import complete, start

TEXT = "El perro lee rápido en la red: ¡cinco nodos, ñandú!\n\n  dos  espacios"
SMALL = {"layers": 2, "heads": 4, "d_model": 32, "seq_len": 32}


@pytest.fixture(scope="module")
def run_dir(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose embedding has rows that the tokenizer has no token for."""
    folder = tmp_path_factory.mktemp("export")
    settings = "--vocab-size 320 --batch-size 8 --steps 40 --lr 1e-2 --save-every 40"
    return complete(start(folder, corpus, 1, settings))[0].run_dir


def random_model(vocab_size: int, **settings: object) -> tuple[TrainConfig, GPT]:
    """Every parameter is random, also those that begin as 0 or 1, so that a mixed-up name shows."""
    config = resolve("gpt2-nano", {**SMALL, "vocab_size": vocab_size, **settings})
    torch.manual_seed(0)
    model = GPT(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return config, model


def test_transformers_computes_the_same_logits(corpus: Corpus, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    rows = corpus.vocab_size
    config, model = random_model(rows + 20)
    output = tmp_path / "final"
    export.export(config, model.state_dict(), corpus.path / TOKENIZER, output)
    theirs, report = GPT2LMHeadModel.from_pretrained(output, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    tokens = torch.randint(rows, (3, 32))
    with torch.no_grad():
        expected, logits = model(tokens)[..., :rows], theirs.eval()(tokens).logits
    assert logits.shape == (3, 32, rows)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    assert type(AutoModelForCausalLM.from_pretrained(output)) is GPT2LMHeadModel
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (0, 0)

    back = export.load(output)
    with torch.no_grad():
        assert torch.equal(back(tokens), expected)

    # Parameters in bf16 stay in bf16.
    brain = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    export.export(config, brain, corpus.path / TOKENIZER, output)
    theirs = GPT2LMHeadModel.from_pretrained(output)
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.transformer.wte.weight, brain["wte.weight"][:rows])
    assert list(tmp_path.iterdir()) == [output]


def test_transformers_reads_and_writes_text_alike(corpus: Corpus, run_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    export_command.main(["--run-dir", str(run_dir), "--output", str(tmp_path / "final")])
    ours = Tokenizer.from_file(str(corpus.path / TOKENIZER))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "final")
    for text in (TEXT, "", f"uno{END_OF_TEXT}dos", "🙂 日本"):
        ids = ours.encode(text).ids
        assert theirs.encode(text) == ids
        assert theirs.decode(ids) == ours.decode(ids, skip_special_tokens=False)
    assert (theirs.eos_token, theirs.pad_token, theirs.model_max_length) == (END_OF_TEXT, END_OF_TEXT, 16)
    assert theirs.padding_side  # a batch can be made
    assert theirs(["el", TEXT], padding=True)["input_ids"][0][-1] == ours.token_to_id(END_OF_TEXT)


def test_a_tokenizer_with_a_padding_token(corpus: Corpus, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(corpus.path / TOKENIZER))
    tokenizer.add_special_tokens(["<|pad|>"])
    tokenizer.save(str(tmp_path / TOKENIZER))
    config, model = random_model(400)
    export.export(config, model.state_dict(), tmp_path / TOKENIZER, tmp_path / "final")
    values = json.loads((tmp_path / "final" / "config.json").read_text())
    assert (values["pad_token_id"], values["vocab_size"]) == (corpus.vocab_size, corpus.vocab_size + 1)
    special = json.loads((tmp_path / "final" / export.SPECIAL_TOKENS).read_text())
    assert special == {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": "<|pad|>"}


def test_a_tokenizer_that_puts_tokens_around_a_text_puts_none_for_a_model_that_has_seen_none(
    corpus: Corpus, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_file(str(corpus.path / TOKENIZER))
    plain = tokenizer.encode(TEXT).ids
    end = (END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))
    tokenizer.post_processor = TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[end])
    tokenizer.save(str(tmp_path / TOKENIZER))
    assert tokenizer.encode(TEXT).ids == [end[1], *plain]
    config, model = random_model(corpus.vocab_size)
    export.export(config, model.state_dict(), tmp_path / TOKENIZER, tmp_path / "final")
    assert Tokenizer.from_file(str(tmp_path / "final" / TOKENIZER)).encode(TEXT).ids == plain
    assert AutoTokenizer.from_pretrained(tmp_path / "final").encode(TEXT) == plain


def test_a_run_says_which_tokens_are_special(corpus: Corpus, run_dir: Path, tmp_path: Path) -> None:
    """Whatever they are called; those of a run that an earlier release has made are known by their names."""

    def ids(run: Path) -> dict[str, int]:
        export_command.main(["--run-dir", str(run), "--output", str(tmp_path / "final")])
        values = json.loads((tmp_path / "final" / export.CONFIG).read_text())
        assert values.items() >= json.loads((tmp_path / "final" / export.GENERATION).read_text()).items()
        return {name: number for name, number in values.items() if name.endswith("_token_id")}

    assert json.loads((run_dir / TOKENIZER_CONFIG).read_text()) == corpus.special
    assert not export.is_exported(run_dir)  # though the names of its files could be those of one
    other = shutil.copytree(run_dir, tmp_path / "other")
    (other / TOKENIZER_CONFIG).unlink()
    all_of_them = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    assert ids(run_dir) == ids(other) == all_of_them

    fin = shutil.copytree(corpus.path, tmp_path / "fin")
    for folder in (other, fin):
        (folder / TOKENIZER).write_text((run_dir / TOKENIZER).read_text().replace(END_OF_TEXT, "<fin>"))
    assert ids(other) == {}
    named = replace(corpus, path=fin, special=special_of({"end_of_text": "<fin>"}))
    describe(other, resolve("gpt2-nano", {}), named, 0, 0)
    assert ids(other) == all_of_them
    assert "<fin>" in (other / TOKENIZER).read_text()


def test_the_tokenizer_of_a_run_is_on_the_disk_before_it_has_its_name(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut left empty would be a run without one."""
    flushed: dict[str, str] = {}

    def flush(path: Path) -> None:
        name = path.name.partition(".tmp-")[0]
        if path.is_file() and not (tmp_path / name).exists():
            flushed[name] = path.read_text()

    monkeypatch.setattr(durable, "flush", flush)
    describe(tmp_path, resolve("gpt2-nano", {}), corpus, 0, 0)
    written = {name: (tmp_path / name).read_text() for name in (TOKENIZER, TOKENIZER_CONFIG)}
    assert flushed == written
    assert written[TOKENIZER] == (corpus.path / TOKENIZER).read_text()


def test_nothing_foreign_is_replaced_and_nothing_half_is_left(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = random_model(corpus.vocab_size)
    tokenizer, output = corpus.path / TOKENIZER, tmp_path / "final"
    output.mkdir()
    (output / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is no exported model"):
        export.export(config, model.state_dict(), tokenizer, output)
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]

    (output / "thesis.txt").unlink()
    # A tokenizer alone, and a model that was trained further.
    (output / TOKENIZER).write_text("mine")
    for foreign in ({}, {export.CONFIG: '{"model_type": "gpt2", "transformers_version": "5.0"}'}):
        for name, content in foreign.items():
            (output / name).write_text(content)
        with pytest.raises(ConfigError, match="exists and is no exported model"):
            export.export(config, model.state_dict(), tokenizer, output)
        assert (output / TOKENIZER).read_text() == "mine"

    monkeypatch.chdir(output)
    with pytest.raises(ConfigError, match="the directory in which you are"):
        export.export(config, model.state_dict(), tokenizer, Path())
    assert [path.name for path in tmp_path.iterdir()] == ["final"]

    output = tmp_path / "other"
    for left in ("other.tmp-123", ".old-other.tmp-123"):  # by one that was killed
        (tmp_path / left).mkdir()
    export.export(config, model.state_dict(), tokenizer, output)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    assert set(before) == export.FILES
    with pytest.raises(DataError, match="only 200: it is not this model's tokenizer"):
        export.export(replace(config, vocab_size=200), model.state_dict(), tokenizer, output)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(DataError, match=r"No space left on device\. What was there is untouched"):
        export.export(config, model.state_dict(), tokenizer, output)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "other"]


def test_the_tokenizer_of_a_checkpoint_is_found_whatever_it_is_called(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = max((run_dir / "checkpoints").iterdir())
    (tmp_path / "newest").symlink_to(newest)
    monkeypatch.chdir(newest)
    for path in (newest, tmp_path / "newest", Path("../") / newest.name, Path()):
        assert export.tokenizer_of(path) == run_dir.resolve() / TOKENIZER
    with pytest.raises(DataError, match=r"/tokenizer\.json is missing"):
        export.tokenizer_of(Path("/checkpoint"))


def test_what_cannot_be_read_is_named(corpus: Corpus, run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run with a checkpoint"):
        export_command.main(["--run-dir", str(tmp_path), "--output", str(tmp_path / "x")])
    with pytest.raises(DataError, match="cannot be used"):
        export.export_checkpoint(tmp_path / "checkpoint-step-3", tmp_path / "x")
    config, model = random_model(corpus.vocab_size)
    export.export(config, model.state_dict(), corpus.path / TOKENIZER, tmp_path / "final")
    (tmp_path / "final" / export.MODEL).write_bytes(b"x")
    with pytest.raises(DataError, match="no model that aura export has written"):
        sample.load(tmp_path / "final")
    (tmp_path / TOKENIZER).write_text("{}")
    with pytest.raises(DataError, match="no tokenizer that can be read"):
        export.export(config, model.state_dict(), tmp_path / TOKENIZER, tmp_path / "y")
    assert manifest.verify(run_dir / "checkpoints" / "checkpoint-step-40")
