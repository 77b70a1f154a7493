"""`aura tune`: from a trained model and dialogues to one that answers."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from aura.commands import cli
from aura.config import resolve
from aura.corpus import chatml
from aura.corpus.corpus import INITIAL, Corpus
from aura.corpus.text_bytes import bits_per_byte
from aura.corpus.windows import IGNORED, Windows, check_corpus
from aura.errors import EXIT_DATA, ConfigError, DataError
from aura.model import export, sample, tuning
from aura.model.family import model_of
from aura.model.loss import LinearCrossEntropy
from aura.plan.auto import tuned
from dialogue_files import BASE, SEQ_LEN, prepared, twenty
from safetensors.torch import load_file
from test_prepare import refuse
from test_validation_by_part import of_earlier_release
from torch.nn import functional
from trainers import Trainer, at_step, complete, send_self, start

# Whatever follows trainers.TINY; two ids more than the base has.
TUNED = f"--preset tune --seq-len {SEQ_LEN} --vocab-size 302 --lr 1e-2 --validate-every 50"
WHOLE = f"{TUNED} --batch-size 5 --gradient-accumulation-steps 4"  # all twenty in every step


def test_it_begins_as_the_model_was(base: Path, tmp_path: Path) -> None:
    corpus = prepared(base, tmp_path, twenty())
    before = load_file(export.newest(base, print) / "model.safetensors")
    after = load_file(corpus.path / INITIAL)
    assert before.keys() == after.keys()
    for name, old in before.items():
        new = after[name][: len(old)] if name == "wte.weight" else after[name]
        assert torch.equal(new, old)
    assert torch.equal(after["wte.weight"][300:302], before["wte.weight"][:1].expand(2, -1))
    (trainer,) = complete(start(tmp_path / "run", corpus, 1, f"{TUNED} --steps 1"))
    model = model_of(tuned(corpus.path, {}))
    model.load_state_dict(after)
    inputs, targets = Windows(corpus, "validation", SEQ_LEN).read(np.arange(20))
    with torch.no_grad():
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert trainer.done["first_validation_loss"] == pytest.approx(loss.item(), rel=1e-4)
    config = tuned(corpus.path, {"steps": "7"})
    assert (config.vocab_size, config.steps, config.epochs) == (302, 7, 0)
    assert config.lr == pytest.approx(0.1 * resolve("gpt2-nano").lr)
    assert tuned(corpus.path, {"strategy": "auto"}).wire == "fp32"


def test_only_targets_that_count_are_in_the_loss() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 48, (40,))
    targets[::3], targets[1] = IGNORED, 0
    wanted = functional.cross_entropy((hidden @ weight.T)[:, :48], targets, reduction="sum")
    gradients = torch.autograd.grad(wanted, (hidden, weight))
    for chunk in (7, 40):
        for compiled in (False, True):
            got = LinearCrossEntropy.apply(hidden, weight, targets, 48, chunk, None, compiled, True)
            torch.testing.assert_close(got, wanted)
            found = torch.autograd.grad(got, (hidden, weight))
            torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def by_heart(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Trainer]:
    folder = tmp_path_factory.mktemp("heart")
    corpus = prepared(base, folder, twenty(), "--validation-fraction", "0")
    return corpus, complete(start(folder / "one", corpus, 1, f"{WHOLE} --steps 120 --save-every 120"))[0]


def test_what_was_learnt_by_heart_comes_back(
    by_heart: tuple[Corpus, Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    _, trainer = by_heart
    trained = sample.load(trainer.run_dir / "checkpoints/checkpoint-step-120")
    model, tokenizer = trained.model, trained.tokenizer
    for record in twenty():
        question = chatml.question([{"role": "user", "content": record["prompt"]}])
        ids = tokenizer.encode(question, add_special_tokens=False).ids
        end = tokenizer.token_to_id(chatml.END)
        answer = list(sample.generate(model, ids, 30, 302, 0, 0, 0, [end]))
        assert answer[-1] == end
        assert tokenizer.decode(answer) == record["completion"]
    assert cli.main(["chat", str(trainer.run_dir), "--ask", record["prompt"], "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{record['completion']}\n"


def test_its_loss_is_the_mean_over_what_is_learnt(by_heart: tuple[Corpus, Trainer]) -> None:
    corpus, trainer = by_heart
    done, windows = trainer.done, Windows(corpus, "train", SEQ_LEN)
    learnt_tokens = json.loads((corpus.path / "meta.json").read_text())["learnt_tokens"]
    assert done["tokens_seen"] == 120 * learnt_tokens  # all windows in every step
    model = sample.load(trainer.run_dir / "checkpoints/checkpoint-step-120").model
    inputs, targets = windows.read(np.arange(len(windows)))
    with torch.no_grad():
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert done["validation_loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_ranks_learn_the_same_however_unlike_their_answers(base: Path, tmp_path: Path) -> None:
    """Each counts what it has learnt from: a mean of means would not be the mean."""
    lengths = [5, 1] * 10
    records = [one | {"completion": "sí " * length} for one, length in zip(twenty(), lengths, strict=True)]
    corpus = prepared(base, tmp_path, records, "--validation-fraction", "0")
    settings = f"{TUNED} --steps 8 --batch-size 2 --wire fp32 --log-every 1"
    one, two = (
        complete(start(tmp_path / f"{ranks}", corpus, ranks, f"{settings} {more}"))[0].done
        for ranks, more in ((1, "--gradient-accumulation-steps 4"), (2, "--gradient-accumulation-steps 2"))
    )
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-4)
    assert two["tokens_seen"] == one["tokens_seen"]


def test_it_goes_on_to_the_bit(by_heart: tuple[Corpus, Trainer], tmp_path: Path) -> None:
    corpus, settings = by_heart[0], f"{WHOLE} --steps 20 --save-every 10"
    (straight,) = complete(start(tmp_path / "straight", corpus, 1, settings))
    fault = {0: at_step(20, send_self(signal.SIGKILL))}
    (broken,) = start(tmp_path / "broken", corpus, 1, settings, fault)
    assert broken.end() == -signal.SIGKILL
    (again,) = complete(start(tmp_path / "broken", corpus, 1, settings))
    assert "after step 10." in again.text
    assert again.files("checkpoint-step-20") == straight.files("checkpoint-step-20")


def test_the_same_command_goes_on_and_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    first = prepared(base, tmp_path, twenty())
    assert prepared(base, tmp_path, twenty()).fingerprint == first.fingerprint
    for records, *words in ((twenty(), "--validation-fraction", "0.5"), (twenty()[1:],)):
        refused = prepared(base, tmp_path, records, *words, code=EXIT_DATA)
        assert refused.fingerprint == first.fingerprint


def test_dialogues_of_an_earlier_release_are_the_same(base: Path, tmp_path: Path) -> None:
    now = prepared(base, tmp_path, twenty())
    old = of_earlier_release(now, tmp_path / "old")
    assert old.fingerprint == now.fingerprint and "learnt_tokens" not in old.files["validation"][0]
    assert bits_per_byte(old, refuse).whole == pytest.approx(bits_per_byte(now, refuse).whole)


def test_what_has_begun_goes_on_whatever_its_model_has_learnt_since(
    corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = complete(start(tmp_path / "base", corpus, 1, BASE))[0].run_dir
    first = prepared(base, tmp_path, twenty())
    complete(start(tmp_path / "base", corpus, 1, BASE.replace("20", "25")))
    assert prepared(base, tmp_path, twenty()).fingerprint == first.fingerprint
    assert "has learnt more since" in capfd.readouterr().out


def test_tuned_again_it_keeps_its_rates(by_heart: tuple[Corpus, Trainer], tmp_path: Path) -> None:
    again = prepared(by_heart[1].run_dir, tmp_path, twenty())
    assert tuned(again.path, {}).lr == 1e-2
    assert again.vocab_size == 302


def test_other_corpora_and_lengths_are_refused(
    base: Path, corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="aura tune RUN"):
        resolve("tune")
    words = ["--preset", "tune", "--corpus", str(corpus.path), "--run-dir", str(tmp_path / "r")]
    assert cli.main(["train", *words]) == 64
    assert "no corpus of dialogues" in capfd.readouterr().err
    own = prepared(base, tmp_path, twenty())
    (short,) = start(tmp_path / "short", own, 1, "--preset tune --seq-len 32 --vocab-size 302")
    assert short.end() == 64
    assert f"laid out for seq_len={SEQ_LEN}" in short.text
    # As many weights, so that nothing else would tell.
    with pytest.raises(ConfigError, match="has heads=2, which tuning cannot change to 4"):
        tuned(own.path, {"heads": "4"})
    assert cli.main(["tune", str(tmp_path), "--data", str(tmp_path / "dialogues.jsonl")]) == 64
    assert "is no run" in capfd.readouterr().err


def test_fewer_windows_than_ranks_are_refused(base: Path, tmp_path: Path) -> None:
    own = prepared(base, tmp_path, twenty()[:2], "--validation-fraction", "0", "--pack")
    config = tuned(own.path, {})
    with pytest.raises(DataError, match="fewer than the 2 ranks: leave out --pack"):
        check_corpus(own, config, 2)


def test_how_long_it_trains_follows_from_the_windows() -> None:
    settings = tuning.settings_of(resolve("gpt2"), 50259, 1000)
    assert (settings["steps"], settings["global_batch_tokens"]) == (math.ceil(3 * 1000 / 32), 32 * 1024)
    assert settings["vocab_size"] == 50259
