"""Dialogues in, a corpus out that answers can be learnt from (see aura/corpus/corpus.py).

A dialogue is written down as ChatML (chatml.py). What is learnt of it is what the assistant says, with the token that
ends its answer; the rest is read only. Each dialogue has a window of its own, which padding fills: so it is read as
later, with nothing before it. Packed, a window holds as many as there is room for, in the order of the files: fewer
windows, but each dialogue is read behind those before it. Of one that is longer than a window the last turns are left
out; where not even the first answer has room, all of it.

What a dialogue may be in a file (.jsonl, .ndjson, or a .json that is a list):

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
    {"prompt": "…", "completion": "…"}
    {"instruction": "…", "input": "…", "output": "…"}
"""

from __future__ import annotations

import hashlib
import json
import shutil
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from aura.corpus import chatml
from aura.corpus.corpus import NOT_LEARNT
from aura.corpus.encode import document_hash
from aura.corpus.files import JSON_LINES, Advance, kind_of, open_file, reading
from aura.corpus.running_text import conversion, encoding_of
from aura.corpus.special_tokens import count_ids
from aura.errors import DataError
from aura.texts.console import text

LISTS = ("messages", "conversations", "conversation")
SPEAKERS = {"human": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
# Question, what is added to it, answer
PAIRS = (
    *(("prompt", "", "completion"), ("prompt", "", "response"), ("question", "", "answer")),
    *(("instruction", "input", "output"), ("instruction", "context", "response")),
)
AT_ONCE = 256

Dialogue = list[dict[str, str]]
Ids = NDArray[np.uint32]


def read(files: Sequence[Path], advance: Advance) -> Iterator[Dialogue]:
    """In the order of the files. Raises DataError at the first place that holds no dialogue."""
    for path in files:
        for number, record in _records(path, advance):
            try:
                yield messages_of(record)
            except ValueError as error:
                raise DataError("no_dialogue", path=path, number=number, error=error) from None


def read_dataset(rows: Iterator[Any], left_out: Callable[[str], None]) -> Iterator[Dialogue]:
    """Of a dataset that others have made; `left_out` hears of each row that is no dialogue, which nobody here can
    mend."""
    for number, row in enumerate(rows, 1):
        try:
            yield messages_of(row)
        except ValueError as error:
            left_out(text("row_is_no_dialogue", number=number, error=error))


def _records(path: Path, advance: Advance) -> Iterator[tuple[int, Any]]:
    """With the number of its line, or of its place in the list."""
    if kind_of(path) not in JSON_LINES:
        raise DataError("dialogues_of_other_kind", path=path, kinds=", ".join(JSON_LINES))
    number = 1
    try:
        with reading(path), open_file(path, advance) as stream:
            begin = stream.peek(64).removeprefix(BOM_UTF8)  # type: ignore[attr-defined]
            if begin.lstrip()[:1] == b"[":
                yield from enumerate(json.load(stream), 1)
                return
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        kind = encoding_of(error.object)
        why = text("dialogue_not_utf8", kind=kind, command=conversion(path, kind))
        raise DataError("no_dialogue", path=path, number=number, error=why) from None
    except ValueError as error:
        raise DataError("no_dialogue", path=path, number=number, error=error) from None


def messages_of(record: Any) -> Dialogue:
    """Up to the last answer. Raises ValueError, whose text says what is wrong."""
    if not isinstance(record, dict):
        raise ValueError(text("dialogue_is_no_object"))
    said = next((record[name] for name in LISTS if name in record), None)
    if said is None:
        said = _pair(record)
    if not isinstance(said, list) or not said:
        raise ValueError(text("dialogue_has_no_messages", names=", ".join(LISTS)))
    messages = [_message(each) for each in said]
    said_by = [each["role"] if each["content"].strip() else "" for each in messages]
    answers = [place for place, role in enumerate(said_by) if role == "assistant"]
    if not answers:
        raise ValueError(text("dialogue_has_no_answer"))
    return messages[: answers[-1] + 1]


def _pair(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    for asked, more, answered in PAIRS:
        if asked in record and answered in record:
            said = [record[asked], *filter(None, [record.get(more)])]
            question = "\n\n".join(said) if all(isinstance(each, str) for each in said) else None
            return [{"role": "user", "content": question}, {"role": "assistant", "content": record[answered]}]
    return None


def _message(said: Any) -> dict[str, str]:
    if not isinstance(said, dict):
        raise ValueError(text("message_is_no_object"))
    role, content = said.get("role", said.get("from")), said.get("content", said.get("value"))
    role = SPEAKERS.get(str(role), role)
    if role not in chatml.ROLES:
        raise ValueError(text("message_of_nobody", role=role, roles=", ".join(chatml.ROLES)))
    if not isinstance(content, str):
        raise ValueError(text("message_without_text", role=role))
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ValueError(text("half_a_surrogate_pair", column="content")) from None
    return {"role": role, "content": content}


def learnt_of(messages: Dialogue, encoding: Encoding) -> tuple[NDArray[np.bool_], list[int]]:
    """Of every token of the dialogue whether it is learnt; how many tokens there are up to the end of each answer.

    As transformers' return_assistant_tokens_mask with the template of Qwen: content, and the token that ends it.
    """
    spans, place = [], 0
    for each in messages:
        begin = place + len(chatml.opened(each["role"]))
        end = begin + len(each["content"]) + len(chatml.END)
        if each["role"] == "assistant":
            spans.append((begin, end))
        place = end + 1  # the line's end
    offsets = np.array(encoding.offsets)
    learnt, ends = np.zeros(len(offsets), bool), []
    for begin, end in spans:
        learnt |= (offsets[:, 1] > begin) & (offsets[:, 0] < end)
        ends.append(int((offsets[:, 1] <= end + 1).sum()))
    return learnt, ends


class Pages:
    """A split in windows, written to a file."""

    def __init__(self, path: Path, window: int, pad: int, packed: bool) -> None:
        self.path, self.window, self.packed = path, window, packed
        self.padding = np.uint32(pad + NOT_LEARNT)
        self.file, self.tokens, self.dialogues = path.open("wb"), 0, 0
        self.learnt_tokens = self.text_bytes = 0
        self.digest = hashlib.sha256()

    def add(self, ids: Ids, text_bytes: int) -> None:
        """text_bytes: of what is learnt."""
        room = -self.tokens % self.window
        if len(ids) > room or not self.packed:
            self._write(np.full(room, self.padding))
        self._write(ids)
        self.dialogues += 1
        self.learnt_tokens += int((ids < NOT_LEARNT).sum())
        self.text_bytes += text_bytes

    def _write(self, ids: Ids) -> None:
        data = ids.astype("<u4").tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.tokens += len(ids)

    def close(self) -> dict[str, Any]:
        """Its entry in meta.json. The last window has a token behind it, as all others have."""
        if self.tokens:
            self._write(np.full(-self.tokens % self.window + 1, self.padding))
        self.file.close()
        return {
            "name": self.path.name,
            "tokens": self.tokens,
            "bytes": 4 * self.tokens,
            "learnt_tokens": self.learnt_tokens,
            "text_bytes": self.text_bytes,
            "sha256": self.digest.hexdigest(),
        }


@dataclass
class Dialogues:
    """On their way from files into a directory."""

    tokenizer: Tokenizer  # that has chatml's tokens
    directory: Path
    window: int
    pad: int
    validation_fraction: float
    packed: bool
    left_out: dict[str, int] = field(default_factory=lambda: {"twice": 0, "long": 0, "shortened": 0})
    text_bytes: int = 0

    def __post_init__(self) -> None:
        self.seen: set[int] = set()
        self.splits = {
            split: Pages(self.directory / f"{split}-00000.bin", self.window, self.pad, self.packed)
            for split in ("train", "validation")
        }
        self.counts = np.zeros(count_ids(self.tokenizer), np.int64)  # of what is learnt

    def add(self, dialogues: Iterator[Dialogue]) -> None:
        while some := list(islice(dialogues, AT_ONCE)):
            texts = [chatml.written(each) for each in some]
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
            for messages, written, encoding in zip(some, texts, encodings, strict=True):
                self._add(messages, written, encoding)

    def _add(self, messages: Dialogue, written: str, encoding: Encoding) -> None:
        which = document_hash(written.encode())
        if which in self.seen:
            self.left_out["twice"] += 1
            return
        self.seen.add(which)
        learnt, ends = learnt_of(messages, encoding)
        fitting = [end for end in ends if end <= self.window]
        if not fitting:
            self.left_out["long"] += 1
            return
        self.left_out["shortened"] += len(fitting) < len(ends)
        ids, learnt = np.array(encoding.ids, np.uint32)[: fitting[-1]], learnt[: fitting[-1]]
        self.counts += np.bincount(ids[learnt], minlength=len(self.counts))
        self.text_bytes += len(written.encode())
        split = "validation" if which < int(self.validation_fraction * 2**64) else "train"
        answers = [each["content"] for each in messages if each["role"] == "assistant"][: len(fitting)]
        text_bytes = sum(len(answer.encode()) for answer in answers)
        self.splits[split].add(np.where(learnt, ids, ids + np.uint32(NOT_LEARNT)), text_bytes)

    def close(self) -> dict[str, dict[str, Any]]:
        """Of each split its entry in meta.json; without validation what is trained on stands for it. Raises DataError
        where nothing is left."""
        pages = self.splits
        if not pages["train"].tokens:
            raise DataError("no_dialogues_left", **self.left_out, window=self.window)
        entries = {split: each.close() for split, each in pages.items()}
        if not entries["validation"]["tokens"]:
            shutil.copyfile(pages["train"].path, pages["validation"].path)
            entries["validation"] = entries["train"] | {"name": pages["validation"].path.name}
        return entries
