"""`aura tune`: a trained model learns to answer, from dialogues.

It prepares a corpus of dialogues with the model in it, and trains that as `aura train --preset tune` does, which every
rank of a cluster can do too (docs/model.md).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tokenizers import Tokenizer

from aura.checkpoint import manifest, store
from aura.commands.bars import Bars
from aura.commands.flags import add_dataset, add_settings, given_settings
from aura.commands.named import places
from aura.config import TUNE, TrainConfig, flags, from_values
from aura.corpus import chatml, dialogues
from aura.corpus import corpus as corpora
from aura.corpus.catalogue import DIALOGUES
from aura.corpus.files import digest_of, find_files
from aura.corpus.shards import workplace
from aura.corpus.sources import SHOWN, HubDataset
from aura.corpus.special_tokens import count_ids, is_tuned, special_tokens, with_special_tokens
from aura.corpus.work import unigram_entropy
from aura.durable import replace_text
from aura.errors import ConfigError, DataError, Parser
from aura.model import export, tuning
from aura.texts.console import put, text


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("tune_is_one_process")
    base = run_directory(arguments.run)
    base = base if base.name not in ("", "..") else base.resolve()
    run_dir = arguments.run_dir or base.with_name(f"{base.name}-tuned")
    corpus = arguments.corpus or run_dir / "dialogues"
    layout = Layout(arguments.validation_fraction, arguments.pack)
    prepare(base, Files(arguments.data) if arguments.data else Named(arguments), corpus, layout)
    if arguments.only_prepare:
        return 0
    from aura.commands.cli import train

    words = ["--preset", TUNE, "--corpus", str(corpus), "--run-dir", str(run_dir)]
    for name, value in given_settings(arguments).items():
        words += [flags(name)[0], value]
    return train(words)


def run_directory(run: Path) -> Path:
    """Raises ConfigError."""
    for place in places(run):
        if (place / "config.json").is_file():
            return place
    raise ConfigError("no_run_there", path=run, file="config.json")


@dataclass(frozen=True)
class Base:
    """The model that shall learn to answer."""

    checkpoint: Path
    config: TrainConfig
    tokenizer: Tokenizer  # with ChatML's tokens
    added: list[int]  # those of them that it did not have
    end: int  # ends a document
    is_tuned: bool

    @classmethod
    def of(cls, run_dir: Path) -> Base:
        """The newest checkpoint. Raises DataError."""
        path = export.newest(run_dir, put)
        config = from_values(export.verified_state(path)["config"])
        file = export.tokenizer_of(path)
        tokenizer = export.read_tokenizer(file)
        special = special_tokens(file.parent, tokenizer)
        begin = special.get("bos_token")  # what ends a text begins the next
        end = None if begin is None else tokenizer.token_to_id(begin)
        if end is None:
            raise DataError("tune_without_end", path=run_dir)
        known = tokenizer.get_vocab()
        tokenizer = with_special_tokens(tokenizer, [chatml.BEGIN, chatml.END])
        added = [place for word, place in tokenizer.get_vocab().items() if word not in known]
        return cls(path, config, tokenizer, sorted(added), end, is_tuned(special))

    @property
    def identity(self) -> str:
        return manifest.read(self.checkpoint)["files"][manifest.MODEL]["sha256"]


class Files:
    """Dialogues of this machine."""

    def __init__(self, data: list[Path]) -> None:
        self.files = find_files(data, put)
        self.size: int | None = sum(file.stat().st_size for file in self.files)

    def identity(self, bars: Bars) -> dict[str, Any]:
        return {"sha256": digest_of(self.files, bars.start(text("reading"), self.size))}

    def read(self, bars: Bars) -> Iterator[dialogues.Dialogue]:
        return dialogues.read(self.files, bars.start(text("encoding_dialogues"), self.size))

    def provenance(self) -> dict[str, Any]:
        return {}


class Named:
    """Dialogues of the Hugging Face hub, or of a local directory that is a dataset."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.hub = HubDataset(
            asked.dataset,
            asked.dataset_config,
            asked.dataset_split,
            column="",
            revision=asked.dataset_revision,
        )
        self.left_out = 0

    def identity(self, bars: Bars) -> dict[str, Any]:
        """Of the hub without the commit that is newest: who goes on with a run need not ask there."""
        if self.hub.directory:
            return self.hub.identity(bars.start(text("reading"), None))
        names = ("path", "config", "split", "revision")
        return {name: getattr(self.hub, name) for name in names if getattr(self.hub, name)}

    def read(self, bars: Bars) -> Iterator[dialogues.Dialogue]:
        self.found = self.hub.identity(bars.start(text("reading"), None))
        yield from dialogues.read_dataset(self.hub.rows(), self._leave_out)

    def _leave_out(self, sentence: str) -> None:
        self.left_out += 1
        if self.left_out <= SHOWN:
            put(sentence)

    def provenance(self) -> dict[str, Any]:
        return {**self.found, **self.hub.provenance(), "no_dialogues": self.left_out}


@dataclass(frozen=True)
class Layout:
    validation_fraction: float
    packed: bool


def prepare(run_dir: Path, said: Files | Named, output: Path, layout: Layout) -> None:
    """The corpus in `output`; one of the same dialogues that is there already stays, whatever the run has learnt since:
    what learns from it goes on. It appears all at once. Raises DataError, ConfigError."""
    base = Base.of(run_dir)
    with Bars() as bars:
        source = {**said.identity(bars), **asdict(layout)}
        if output.exists() and any(output.iterdir()):
            _check_same(output, source, base)
            return
        with workplace(output, put) as place:
            place.start_again()
            made = _encode(base, place.corpus, layout, said.read(bars))
            about = {"source": source | {"model_sha256": base.identity}, "provenance": said.provenance()}
            _write_rest(base, made, place.corpus, about)
            place.finish()
    put(_summary(made, output))


def _check_same(output: Path, source: dict[str, Any], base: Base) -> None:
    """Raises DataError."""
    before = dict(corpora.verify(output).source)
    model = before.pop("model_sha256", None)
    if before != source:
        raise DataError("dialogues_are_others", path=output)
    put(text("dialogues_are_there", path=output))
    if model != base.identity:
        put(text("dialogues_of_before"))


def _encode(
    base: Base, directory: Path, layout: Layout, found: Iterator[dialogues.Dialogue]
) -> dialogues.Dialogues:
    where = (directory, base.config.seq_len, base.end)
    made = dialogues.Dialogues(base.tokenizer, *where, layout.validation_fraction, layout.packed)
    made.add(found)
    return made


def _write_rest(base: Base, made: dialogues.Dialogues, directory: Path, about: dict[str, Any]) -> None:
    """The tokenizer, the model and meta.json beside the tokens."""
    entries = made.close()
    windows = entries["train"]["tokens"] // base.config.seq_len
    settings = tuning.settings_of(base.config, count_ids(base.tokenizer), windows, base.is_tuned)
    parameters = tuning.initial(
        load_file(base.checkpoint / manifest.MODEL), from_values(settings), base.added, base.end
    )
    store.save_tensors(parameters, directory / corpora.INITIAL)
    (directory / corpora.INITIAL).chmod(0o644)  # as the files beside it
    tokenizer = base.tokenizer.to_str(pretty=False)
    replace_text(directory / corpora.TOKENIZER, tokenizer)
    initial = {
        "name": corpora.INITIAL,
        "bytes": (directory / corpora.INITIAL).stat().st_size,
        "sha256": corpora.sha256_of(directory / corpora.INITIAL),
    }
    end = base.tokenizer.id_to_token(base.end)
    meta = {
        **about,
        "format": corpora.FORMAT,
        "vocab_size": count_ids(base.tokenizer),
        "bytes_per_token": 4,
        "tokenizer_sha256": hashlib.sha256(tokenizer.encode()).hexdigest(),
        **{"end_of_text": end, "end_of_text_id": base.end, "pad": end, "pad_id": base.end},
        "end_of_answer": chatml.END,
        "chat_template": chatml.TEMPLATE,
        "window": base.config.seq_len,
        "settings": settings,
        "tokens": {split: entry["tokens"] for split, entry in entries.items()},
        "learnt_tokens": int(made.counts.sum()),
        "documents": {split: pages.dialogues for split, pages in made.splits.items()},
        "left_out": made.left_out,
        "text_bytes": made.text_bytes,
        "unigram_entropy": unigram_entropy(made.counts),
        "files": {**{split: [entry] for split, entry in entries.items()}, "initial": [initial]},
    }
    meta["fingerprint"] = corpora.fingerprint_of(meta)
    replace_text(directory / corpora.META, json.dumps(meta, indent=1))


def _summary(made: dialogues.Dialogues, output: Path) -> str:
    tokens = sum(pages.tokens for pages in made.splits.values())
    pages = made.splits
    sentence = text(
        "dialogues_prepared",
        path=output,
        train=pages["train"].dialogues,
        validation=pages["validation"].dialogues,
        windows=pages["train"].tokens // made.window,
        window=made.window,
        part=made.counts.sum() / tokens,
        **made.left_out,
    )
    return sentence if pages["validation"].dialogues else f"{sentence} {text('dialogues_not_validated')}"


def _parser() -> Parser:
    parser = Parser(
        prog="aura tune",
        description="Let a trained model learn to answer, from dialogues: it learns what the assistant says in them. "
        "The run it makes is one like any other: continued by the same command, sampled, exported, and talked to with "
        "aura chat.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="directory, or its name in runs/")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--data",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSON lines with messages, conversations, prompt and completion, or instruction and output",
    )
    which.add_argument(
        "--dataset",
        metavar="NAME",
        help=f"{', '.join(DIALOGUES)}, any other name of the Hugging Face hub, or a directory that is a dataset",
    )
    add_dataset(parser)
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="checkpoints and logs (RUN-tuned, beside RUN)"
    )
    parser.add_argument(
        "--corpus", type=_directory, metavar="DIR", help="what is prepared (dialogues in the run directory)"
    )
    parser.add_argument(
        "--only-prepare",
        action="store_true",
        help="do not train: aura train --preset tune --corpus DIR does, also as ranks of several PCs",
    )
    parser.add_argument(
        "--validation-fraction",
        type=_fraction,
        default=0.02,
        metavar="X",
        help="dialogues that are not trained on (0.02)",
    )
    parser.add_argument(
        "--pack",
        action="store_true",
        help="several dialogues in a window: faster where they are short, but each is read behind those before it",
    )
    add_settings(parser)
    return parser


def _directory(word: str) -> Path:
    if "://" in word:
        raise argparse.ArgumentTypeError(text("has_to_be_a_directory", value=word))
    return Path(word)


def _fraction(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(text("has_to_be_a_part", value=word))
    return value
