"""Dialogues as a corpus: what is read, how it is laid out, and what of it is learnt."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aura.corpus import chatml, dialogues, remote
from aura.corpus.corpus import INITIAL, NOT_LEARNT, checksums
from aura.corpus.listener import NOBODY
from aura.corpus.windows import IGNORED, Windows, inputs_and_targets
from aura.errors import EXIT_DATA, EXIT_USAGE, AuraError
from conftest import Aura
from dialogue_files import SEQ_LEN, prepared, twenty, written
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

IGNORING = NOBODY.start("", None)
# Of Qwen3's template, what transformers reads the mask from.
MARKED = chatml.TEMPLATE.replace(
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
)


def random_dialogues(count: int) -> list[dict[str, Any]]:
    """With spaces, line breaks and tokens of more than a letter at the borders of what is learnt."""
    rng = random.Random(3)
    pieces = ["hola", " casa", "¿qué?", "ñandú", "🦆", "\n\n- uno", "12 345", "el perro"]
    pieces += ["\n", "  ", "\t", "…", "."]

    def some() -> str:
        return "".join(rng.choices(pieces, k=rng.randrange(12)))

    made = []
    for _ in range(count):
        said = [{"role": "system", "content": some()}] if rng.random() < 0.3 else []
        for _ in range(rng.randrange(1, 4)):
            said += [{"role": "user", "content": some()}, {"role": "assistant", "content": some() + "!"}]
        made.append({"messages": said})
    return made


def test_ids_and_what_is_learnt_are_those_of_transformers(base: Path) -> None:
    """And so TRL's, whose assistant_only_loss asks transformers."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens([chatml.BEGIN, chatml.END])
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    for record in random_dialogues(100):
        messages = dialogues.messages_of(record)
        encoding = tokenizer.encode(chatml.written(messages), add_special_tokens=False)
        learnt, ends = dialogues.learnt_of(messages, encoding)
        wanted = theirs.apply_chat_template(
            messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        assert encoding.ids == wanted["input_ids"]
        assert learnt.tolist() == [bool(one) for one in wanted["assistant_masks"]]
        assert ends[-1] == len(encoding.ids)
        assert theirs.apply_chat_template(
            messages, chat_template=chatml.TEMPLATE, tokenize=False
        ) == chatml.written(messages)


def test_a_window_holds_whole_dialogues_and_says_what_is_learnt(base: Path, tmp_path: Path) -> None:
    long = {"prompt": "cuenta", "completion": "uno dos tres cuatro cinco seis " * 40}
    turns = [{"from": "human", "value": "hola"}, {"from": "gpt", "value": "hola"}] * 30
    records = [*twenty(), twenty()[0], long, {"conversations": turns}]
    own = prepared(base, tmp_path / "own", records, "--validation-fraction", "0")
    packed = prepared(base, tmp_path / "packed", records, "--validation-fraction", "0", "--pack")
    assert len(Windows(own, "train", SEQ_LEN)) == 21
    assert len(Windows(packed, "train", SEQ_LEN)) < 21
    tokenizer = Tokenizer.from_file(str(own.path / "tokenizer.json"))
    for corpus in (own, packed):
        meta = json.loads((corpus.path / "meta.json").read_text())
        assert meta["left_out"] == {"twice": 1, "long": 1, "shortened": 1}
        assert meta["documents"] == {"train": 21, "validation": 0}
        windows = Windows(corpus, "train", SEQ_LEN)
        answers, texts = [], []
        for index in range(len(windows)):
            batch = windows.batch(np.array([index]))
            inputs, targets = windows.read(np.array([index]))
            assert inputs[0, 0] == tokenizer.token_to_id(chatml.BEGIN)
            assert int((targets != IGNORED).sum()) == int((batch[:, 1:] < NOT_LEARNT).sum()) > 0
            texts.append(tokenizer.decode(inputs[0].tolist(), skip_special_tokens=False))
            learnt = targets[targets != IGNORED].tolist()
            answers += tokenizer.decode(learnt, skip_special_tokens=False).split(chatml.END)[:-1]
        assert answers[:20] == [record["completion"] for record in twenty()]
        assert set(answers[20:]) == {"hola"}
        assert "".join(texts).count("¿Qué tiene Ana?") == 1


def test_a_dialogue_as_long_as_a_window_has_room(base: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens([chatml.BEGIN, chatml.END])
    exact = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    while (length := len(tokenizer.encode(chatml.written(exact)).ids)) < SEQ_LEN:
        exact[1]["content"] += "1"
    assert length == SEQ_LEN
    longer = [exact[0], {"role": "assistant", "content": f"{exact[1]['content']}1"}]
    corpus = prepared(base, tmp_path, [{"messages": exact}, {"messages": longer}])
    assert json.loads((corpus.path / "meta.json").read_text())["left_out"]["long"] == 1
    assert len(Windows(corpus, "train", SEQ_LEN)) == 1


def test_a_target_is_the_next_token_or_none() -> None:
    batch = torch.tensor([[5, 6 + NOT_LEARNT, 7, 8 + NOT_LEARNT]])
    inputs, targets = inputs_and_targets(batch, has_unlearnt=True)
    assert inputs.tolist() == [[5, 6, 7]]
    assert targets.tolist() == [[IGNORED, 7, IGNORED]]


def test_a_dataset_is_taken_but_for_what_is_no_dialogue(base: Path, tmp_path: Path, aura_says: Aura) -> None:
    """A directory that is one; of the hub it would be a name."""
    written(tmp_path / "set", [*twenty(), {"prompt": None, "completion": "hola"}], "train.jsonl")
    words = ["tune", str(base), "--dataset", str(tmp_path / "set"), "--corpus", str(tmp_path / "corpus")]
    assert "Row 21 is left out: it is no dialogue" in aura_says(*words, "--only-prepare")
    meta = json.loads((tmp_path / "corpus/meta.json").read_text())
    assert sum(meta["documents"].values()) == 20
    assert meta["provenance"]["no_dialogues"] == 1
    assert "up to date" in aura_says(*words, "--only-prepare")
    written(tmp_path / "set", twenty()[1:], "train.jsonl")
    aura_says(*words, "--only-prepare", code=EXIT_DATA)
    assert "cc-by-nc-4.0" in aura_says(*words[:2], "--dataset", "nvidia/ClimbMix", code=EXIT_USAGE)


def test_validation_has_dialogues_of_its_own(base: Path, tmp_path: Path) -> None:
    corpus = prepared(base, tmp_path, twenty(), "--validation-fraction", "0.3")
    counts = json.loads((corpus.path / "meta.json").read_text())["documents"]
    assert counts["validation"] > 0
    assert sum(counts.values()) == 20
    train, validation = (
        {tuple(row) for row in Windows(corpus, split, SEQ_LEN).batch(np.arange(count))[:, :-1].tolist()}
        for split, count in counts.items()
    )
    assert not train & validation


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ("hola", "no object with messages"),
        ({"text": "hola"}, "none of messages, conversations, conversation"),
        ({"messages": [{"role": "user", "content": "hola"}]}, "the assistant says nothing"),
        ({"messages": [{"role": "judge", "content": "hola"}]}, "the role judge, which is none of"),
        ({"messages": [{"role": "assistant", "content": None}]}, "a message of assistant has no text"),
        ({"messages": ["hola"]}, "no object with role and content"),
        ({"prompt": "hola", "completion": "\ud800"}, "half of a surrogate pair"),
        ({"prompt": "hola", "completion": " \n"}, "the assistant says nothing"),
        ({"instruction": None, "input": "x", "output": "y"}, "a message of user has no text"),
        ({"instruction": "x", "input": ["y"], "output": "z"}, "a message of user has no text"),
    ],
)
def test_what_is_no_dialogue_is_refused_with_its_line(record: Any, sentence: str, tmp_path: Path) -> None:
    data = written(tmp_path, [twenty()[0], record])
    with pytest.raises(AuraError, match="element\\) 2") as refused:
        list(dialogues.read([data], IGNORING))
    assert sentence in str(refused.value)


def test_a_list_and_other_forms_are_read(tmp_path: Path) -> None:
    said = [{"from": who, "value": "hola"} for who in ("system", "human", "gpt")]
    forms = [{"instruction": "suma", "input": "1 y 2", "output": "3"}, {"conversations": said}]
    (tmp_path / "all.json").write_text("\n " + json.dumps(forms))
    read = list(dialogues.read([tmp_path / "all.json"], IGNORING))
    assert read[0] == [{"role": "user", "content": "suma\n\n1 y 2"}, {"role": "assistant", "content": "3"}]
    assert [each["role"] for each in read[1]] == ["system", "user", "assistant"]
    unanswered = [*read[1], {"role": "user", "content": "and?"}]
    assert dialogues.messages_of({"messages": unanswered}) == read[1]
    (tmp_path / "all.json").write_text(json.dumps(forms), encoding="utf-8-sig")
    assert list(dialogues.read([tmp_path / "all.json"], IGNORING)) == read
    (tmp_path / "latin.jsonl").write_text('{"prompt": "niño", "completion": "sí"}\n', encoding="latin-1")
    with pytest.raises(AuraError, match="it is not UTF-8; if it is Windows-1252, `iconv -f windows-1252"):
        list(dialogues.read([tmp_path / "latin.jsonl"], IGNORING))
    packed = tmp_path / "latin.jsonl.gz"
    packed.write_bytes(gzip.compress('{"prompt": "niño", "completion": "sí"}\n'.encode("utf-16")))
    with pytest.raises(AuraError, match="if it is UTF-16, `gzip -dc") as caught:
        list(dialogues.read([packed], IGNORING))
    subprocess.run(["sh", "-c", str(caught.value).split("`")[1]], check=True)
    assert len(list(dialogues.read([tmp_path / "latin-utf8.jsonl.gz"], IGNORING))) == 1
    with pytest.raises(AuraError, match="JSON lines"):
        list(dialogues.read([written(tmp_path, [], "a.txt")], IGNORING))


def test_it_can_be_fetched_from_object_storage(base: Path, tmp_path: Path, aura_says: Aura) -> None:
    own = prepared(base, tmp_path, twenty())
    names = checksums(json.loads((own.path / "meta.json").read_text()))
    assert all(remote.FILE.fullmatch(name) for name in names)
    assert (own.path / INITIAL).stat().st_mode & 0o777 == 0o644
    aura_says("tune", str(base), "--data", "a", "--corpus", "s3://bucket/a", code=EXIT_USAGE)
