"""`aura chat` with a model that has learnt one dialogue by heart."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from aura.commands import chat
from aura.corpus.corpus import TOKENIZER_CONFIG, Corpus
from aura.corpus.special_tokens import settings_of
from aura.errors import EXIT_USAGE, ConfigError
from aura.model import export, sample
from by_heart import ANSWERS, QUESTIONS, tuned_run
from conftest import Aura
from services import wait_until
from trainers import Trainer

Talked = Callable[..., list[str]]
GREEDY = ["--temperature", "0"]


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned_run(tmp_path_factory.mktemp("chat") / "runs/answers", corpus)


@pytest.fixture
def talked(monkeypatch: pytest.MonkeyPatch, aura_says: Aura) -> Talked:
    """What is said to these lines."""

    def talked(words: list[str], *lines: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        return aura_says("chat", *words, *GREEDY).splitlines()

    return talked


def test_it_answers_and_remembers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, talked: Talked
) -> None:
    """From a run by its name, a checkpoint, and what was exported."""
    monkeypatch.chdir(run.parents[1])
    export.export_checkpoint(run / "checkpoints/checkpoint-step-80", tmp_path / "exported")
    for place in (["answers"], ["--checkpoint", str(tmp_path / "exported")]):
        assert talked([*place, "--ask", QUESTIONS[0]]) == ANSWERS[:1]
    lines = [*QUESTIONS, "", "/new", *QUESTIONS, "/exit", "¿Qué?"]
    assert talked([str(run)], *lines) == [*ANSWERS, *ANSWERS]
    # Without what was said before, the second question is another one.
    assert talked([str(run)], *QUESTIONS[1:]) != ANSWERS[1:]
    assert talked([str(run), "--tokens", "3"], *QUESTIONS[:1])[0] in ANSWERS[0][:-5]


def test_a_line_that_is_no_utf8_is_said_and_the_next_answered(
    run: Path, monkeypatch: pytest.MonkeyPatch, aura_says: Aura
) -> None:
    lines = io.BytesIO(b"ni\xf1o\n" + QUESTIONS[0].encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(lines, "utf-8"))
    refused, answer = aura_says("chat", str(run), *GREEDY).splitlines()
    assert refused.startswith("'ni\\udcf1o' is not UTF-8: set the terminal to UTF-8") and answer == ANSWERS[0]
    for words in (["chat", str(run), "--system"], ["sample", "--run-dir", str(run), "--prompt"]):
        assert "is not UTF-8" in aura_says(*words, "ni\udcf1o", code=EXIT_USAGE)


def test_what_does_not_fit_any_more_is_left_out(
    run: Path, monkeypatch: pytest.MonkeyPatch, talked: Talked
) -> None:
    seen: list[list[int]] = []
    generate = sample.generate

    def spied(model: object, ids: list[int], *more: object) -> Iterator[int]:
        seen.append(ids)
        return generate(model, ids, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(sample, "generate", spied)
    trained = sample.load(run / "checkpoints/checkpoint-step-80")
    lines = [*QUESTIONS * 4, "¿" + "perro " * 200, QUESTIONS[0]]
    said = talked([str(run), "--system", "Sé breve.", "--tokens", "30"], *lines)
    assert sum(line.startswith("(The conversation is longer than what the model reads") for line in said) == 1
    assert sum("the model reads no more than" in line for line in said) == 1
    assert len(seen) == 9, "the question that is too long ended the conversation"
    texts = [trained.tokenizer.decode(ids, skip_special_tokens=False) for ids in seen]
    assert all(len(ids) + 30 <= trained.model.seq_len for ids in seen)
    for text in texts:
        assert text.startswith("<|im_start|>system\nSé breve.<|im_end|>\n<|im_start|>user\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert any(len(after) < len(before) for before, after in pairwise(seen))
    assert texts[-1].count("<|im_start|>user") > 1, "with the question that is too long all went"
    with pytest.raises(ConfigError, match="ask a shorter one"):
        chat.main([str(run), "--ask", "perro " * 200])


def test_ctrl_c_ends_an_answer_only(run: Path, monkeypatch: pytest.MonkeyPatch, talked: Talked) -> None:
    generate, asked = sample.generate, []

    def interrupted(*all_of_it: object) -> Iterator[int]:
        asked.append(all_of_it[1])
        for place, number in enumerate(generate(*all_of_it)):  # type: ignore[arg-type]
            if len(asked) == 1 and place == 4:
                raise KeyboardInterrupt
            yield number

    monkeypatch.setattr(sample, "generate", interrupted)
    first, *others = talked([str(run)], QUESTIONS[0], "/new", *QUESTIONS)
    assert first and first != ANSWERS[0] and ANSWERS[0].startswith(first)
    assert others == ANSWERS


def test_in_a_terminal(run: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "aura", "chat", str(run), *GREEDY]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = bytearray()

    def says(words: str) -> None:
        """Behind what it has said before."""

        def there() -> bool:
            if words.encode() not in said:
                said.extend(os.read(ours, 1000))
            return words.encode() in said

        wait_until(there, 120, lambda: f"not {words!r}: {said.decode()}")
        del said[: said.index(words.encode()) + len(words.encode())]

    says("> ")
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        os.write(ours, f"{question}\n".encode())
        says(answer)
        says("> ")
    os.write(ours, b"\x04")
    assert process.wait(60) == 0
    os.close(ours)


def test_only_whole_letters_are_shown(run: Path) -> None:
    tokenizer = sample.load(run / "checkpoints/checkpoint-step-80").tokenizer
    ids = tokenizer.encode("ñandú 🙂日本🙂 fin").ids
    shown = list(sample.pieces(tokenizer, ids))
    assert "".join(shown) == "ñandú 🙂日本🙂 fin"
    assert not any("\ufffd" in piece for piece in shown)
    assert len([piece for piece in shown if piece]) > 5, "it came all at once"
    (half,) = {tokenizer.token_to_id("Ã")}  # the first byte of ñ, and no second
    assert "".join(sample.pieces(tokenizer, [half, *ids, half])) == tokenizer.decode([half, *ids, half])
    assert list(sample.pieces(tokenizer, [])) == [""]


def test_who_has_not_learnt_to_answer_is_refused(
    run: Path, reference: list[Trainer], tmp_path: Path, aura_says: Aura
) -> None:
    ask = ["--ask", "¿Qué?"]
    said = aura_says("chat", str(reference[0].run_dir), *ask, code=EXIT_USAGE)
    assert "has never learnt to answer" in said and "aura tune RUN" in said
    assert "is no run with a checkpoint" in aura_says("chat", str(tmp_path), *ask, code=EXIT_USAGE)
    export.export_checkpoint(run / "checkpoints/checkpoint-step-80", other := tmp_path / "other")
    settings = settings_of(other) | {"chat_template": "[INST]{{ messages }}"}
    (other / TOKENIZER_CONFIG).write_text(json.dumps(settings))
    said = aura_says("chat", "--checkpoint", str(other), *ask, code=EXIT_USAGE)
    assert "aura chat speaks ChatML only" in said
