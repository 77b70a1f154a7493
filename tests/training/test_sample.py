from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aura.commands import export, sample
from aura.config import resolve
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError, DataError
from aura.model.gpt import GPT
from aura.model.sample import generate, load
from trainers import complete, start


def test_a_trained_model_continues_a_text(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (trainer,) = complete(start(tmp_path, corpus, 1, "--batch-size 8 --steps 60 --lr 1e-2 --save-every 60"))
    words = ["--run-dir", str(trainer.run_dir), "--prompt", "el perro", "--tokens", "30"]
    texts = []
    for more in ([], [], ["--seed", "1"], ["--temperature", "0"], ["--top-k", "1"]):
        assert sample.main(words + more) == 0
        texts.append(capsys.readouterr().out)
        assert texts[-1].startswith("el perro")
        assert len(texts[-1]) > 30
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]  # the likeliest token each time
    trained = load(trainer.run_dir / "checkpoints/checkpoint-step-60")
    model = trained.model.cpu()
    ids = [trained.tokenizer.token_to_id("<|endoftext|>"), *trained.tokenizer.encode("el perro").ids]
    with torch.no_grad():
        for _ in range(30):
            ids.append(int(model(torch.tensor([ids[-16:]]))[0, -1, :300].argmax()))
    assert texts[3] == trained.tokenizer.decode(ids) + "\n"
    said = []
    with monkeypatch.context() as spied:
        spied.setattr(sample, "put", lambda piece, end="\n": said.append(piece + end))
        assert sample.main(words) == 0
    assert len(said) > 10 and "".join(said) == texts[0]  # while it is made
    path = trainer.run_dir / "checkpoints" / "checkpoint-step-60"
    assert sample.main(["--checkpoint", str(path), *words[2:]]) == 0
    assert capsys.readouterr().out == texts[0]
    (path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(DataError, match=r"cannot be used: model\.safetensors has 1 bytes"):
        sample.main(["--checkpoint", str(path)])


def test_what_is_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = "mine is no run with a checkpoint, no checkpoint and no exported"
    for flag in ("--run-dir", "--checkpoint"):
        with pytest.raises(ConfigError, match=sentence):
            sample.main([flag, "mine"])
    (tmp_path / "runs/mine/checkpoints").mkdir(parents=True)
    for command in (sample, export):
        with pytest.raises(DataError, match="There is no checkpoint in runs/mine/checkpoints yet"):
            command.main(["--run-dir", "mine", *(["--output", "out"] if command is export else [])])


def test_longer_than_the_context_and_never_outside_the_vocabulary() -> None:
    torch.manual_seed(0)
    settings = {"layers": 1, "heads": 2, "d_model": 32, "seq_len": 8, "vocab_size": 100}
    model = GPT(resolve("gpt2-nano", settings)).eval()
    ids = list(generate(model, [1, 2], 50, vocab_size=7, temperature=5.0, top_k=0, seed=0))
    assert len(ids) == 50
    assert set(ids) <= set(range(7))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--temperature nan", "--temperature is nan: 0 takes the likeliest"),
        ("--temperature 1e-9", "--temperature is 1e-09: "),
        ("--temperature inf", "--temperature is inf: "),
        ("--seed 9223372036854775808", "--seed is 9223372036854775808: it has to be a whole number"),
    ],
)
def test_what_cannot_be_drawn_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        sample.main(["--run-dir", "mine", *words.split()])
    assert sentence in str(refused.value)
