"""The tokenizer of a corpus: trained on its text, or one that exists.

Whatever it was before, in a corpus it is tokenizer.json (for `tokenizers`) with a token that ends a document and one
that pads; what is missing is added, and said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from aura.corpus.corpus import END_OF_TEXT, TOKENIZER, TOKENIZER_CONFIG
from aura.corpus.special_tokens import ENDS, PAD, PADS, SPECIAL_TOKENS, is_tuned, settings_of
from aura.errors import ConfigError
from aura.texts import console

VOCABULARY = "vocab.json"  # with merges.txt
HUB_FILES = [TOKENIZER, "*.model", VOCABULARY, "merges.txt", SPECIAL_TOKENS, TOKENIZER_CONFIG]
SMALLEST_VOCABULARY = 257  # 256 bytes and <|endoftext|>
LONGEST_PRE_TOKEN = 1000  # bytes; training takes time with the square of it
# What a converted SentencePiece model must encode as SentencePiece does.
SAMPLE = (
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme.",
    "¿Cuánto cuesta? ¡1.234,56 €! El 50 % más, según la señora Núñez.",
    "  dos  espacios, comillas «así» y «“así”»; guiones – y — puntos…",
    "URL: https://example.org/?a=1&b=2 ñandú pingüino ÁÉÍÓÚ",
)


@dataclass(frozen=True)
class Prepared:
    """A tokenizer as the corpus needs it."""

    json: str  # content of tokenizer.json
    vocab_size: int  # all ids are below
    end_of_text: str
    end_of_text_id: int
    pad: str
    pad_id: int


def train(texts: Iterable[str], vocab_size: int) -> Prepared:
    """A byte-level BPE as GPT-2's: any text can be encoded, and decoding gives back the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Cut for training only: encoding takes n log n.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [byte_level, pre_tokenizers.FixedLength(length=LONGEST_PRE_TOKEN)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = byte_level
    return _prepared(tokenizer, END_OF_TEXT, END_OF_TEXT)


def load(name: str, say: Callable[[str], None]) -> Prepared:
    """A tokenizer.json, a SentencePiece .model, a directory with one of them (or vocab.json and merges.txt), or a name
    on the hub.

    Raises ConfigError.
    """
    path, settings = Path(name), dict[str, Any]()
    if not path.exists():
        path = _fetched(name)
    if path.is_dir():
        settings = settings_of(path)
        found = [path / TOKENIZER, *sorted(path.glob("*.model")), path / VOCABULARY]
        path = next((file for file in found if file.is_file()), path)
    if path.is_dir():
        raise ConfigError("no_tokenizer_in", tokenizer=TOKENIZER, vocabulary=VOCABULARY, name=name)
    if path.suffix == ".model":
        tokenizer = from_sentencepiece(path)
    elif path.name == VOCABULARY:
        tokenizer = _from_vocabulary(path, bool(settings.get("add_prefix_space")))
    else:
        with _one_sentence(name):
            tokenizer = Tokenizer.from_file(str(path))
        _refuse_lost_bytes(path, tokenizer)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    # What ends an answer of a tuned model ends no document.
    end = _chosen(settings.get("bos_token" if is_tuned(settings) else "eos_token"), ENDS, vocabulary)
    if end is None:
        end = END_OF_TEXT
        say(console.text("no_end_token", name=name, token=end))
    pad = _chosen(settings.get("pad_token"), PADS, vocabulary)
    if pad is None:
        pad = PAD
        say(console.text("no_padding_token", name=name, token=pad))
    return _prepared(tokenizer, end, pad)


def _refuse_lost_bytes(path: Path, tokenizer: Tokenizer) -> None:
    """What a byte-level BPE does not have, and no other token stands for, is left out of the text without a word.

    Raises ConfigError.
    """
    described = json.loads(tokenizer.to_str())
    model, before = described["model"], json.dumps(described["pre_tokenizer"])
    if model["type"] != "BPE" or '"ByteLevel"' not in before or model["unk_token"] or model["byte_fallback"]:
        return
    points = [*range(0x800), *range(0x800, 0xD800, 0x400), 0xE000, 0xF000, *range(0x10000, 0x110000, 0x10000)]
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("".join(map(chr, points)))
    missing = {letter for piece, _ in pieces for letter in piece} - tokenizer.get_vocab().keys()
    if missing:
        raise ConfigError("tokenizer_lacks_bytes", path=path, count=len(missing))


def _prepared(tokenizer: Tokenizer, end: str, pad: str) -> Prepared:
    tokenizer.add_special_tokens(list(dict.fromkeys([end, pad])))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    # `tokenizers` counts tokens, and takes no heed of gaps.
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ConfigError("tokenizer_has_gaps")
    return Prepared(
        json=tokenizer.to_str(pretty=False),
        vocab_size=max(vocabulary.values()) + 1,
        end_of_text=end,
        end_of_text_id=vocabulary[end],
        pad=pad,
        pad_id=vocabulary[pad],
    )


def unknown_id(tokenizer: Prepared) -> int | None:
    """The id that stands for letters which the vocabulary does not have; None where there is no such letter."""
    model = json.loads(tokenizer.json)["model"]
    if model["type"] == "Unigram":
        return None if model["byte_fallback"] else model["unk_id"]
    vocabulary: dict[str, int] = model["vocab"]
    return vocabulary.get(model["unk_token"]) if model.get("unk_token") else None


def _chosen(named: str | None, known: tuple[str, ...], vocabulary: dict[str, int]) -> str | None:
    """The token that the configuration names, or a well-known name; None when the vocabulary has none."""
    return next((token for token in (named, *known) if token in vocabulary), None)


def _fetched(name: str) -> Path:
    """The directory with the files of a tokenizer that the hub has, without the weights beside them."""
    if Path(name).suffix in (".json", ".model") or name.startswith((".", "/", "~")):
        raise ConfigError("no_tokenizer", name=name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with _one_sentence(name, "tokenizer_not_fetched"):
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))


@contextmanager
def _one_sentence(name: str, key: str = "tokenizer_unusable") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # tokenizers raises nothing more precise, and the hub many things
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(key, name=name, error=reason) from None


def _from_vocabulary(path: Path, prefix_space: bool) -> Tokenizer:
    """vocab.json with merges.txt beside it, as GPT-2 and RoBERTa were published."""
    with _one_sentence(str(path)):
        tokenizer = Tokenizer(models.BPE.from_file(str(path), str(path.with_name("merges.txt"))))
    vocabulary = tokenizer.get_vocab()
    if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()) or any(
        piece.endswith("</w>") for piece in vocabulary
    ):
        raise ConfigError("no_byte_level_bpe", path=path, tokenizer=TOKENIZER)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def from_sentencepiece(path: Path) -> Tokenizer:
    """The same tokenizer for `tokenizers`; refused when it would not give the same ids.

    One difference stays: where "</s>" stands in a text, a unigram model of `tokenizers` finds its token.
    What the parts mean: sentencepiece_model.proto in the repository google/sentencepiece. transformers' converters give
    other ids more often, and fail on BPE (docs/benchmarks.md).
    """
    import sentencepiece
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    format: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    proto = format.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (DecodeError, RuntimeError, OSError):
        raise ConfigError("no_sentencepiece", path=path) from None
    kinds = format.ModelProto.SentencePiece
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    settings = proto.trainer_spec
    if settings.model_type == format.TrainerSpec.UNIGRAM:
        model: Any = models.Unigram(pieces, settings.unk_id, settings.byte_fallback)
    elif settings.model_type == format.TrainerSpec.BPE:
        ids = {piece: number for number, (piece, _) in enumerate(pieces)}
        model = models.BPE(
            ids,
            _merges(pieces),
            unk_token=pieces[settings.unk_id][0],
            fuse_unk=True,
            byte_fallback=settings.byte_fallback,
        )
    else:
        raise ConfigError("sentencepiece_of_words", path=path)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    begin = [decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *begin]
    )
    control = [piece.piece for piece in proto.pieces if piece.type in (kinds.CONTROL, kinds.UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in control])
    tokenizer.encode_special_tokens = True
    for text in SAMPLE:
        if tokenizer.encode(text, add_special_tokens=False).ids != processor.encode(text):
            raise ConfigError("sentencepiece_not_expressible", path=path, text=text)
    return tokenizer


def _normalizer(spec: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])


def _merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """The merges of a BPE that is written down as pieces: every way to make one piece of two, best piece first."""
    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    merges = []
    for piece, score in pieces:
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        ways = [(ids[a], ids[b], a, b) for a, b in halves if a in ids and b in ids]
        merges += [(-score, number, a, b) for number, (_, _, a, b) in enumerate(sorted(ways))]
    return [(a, b) for _, _, a, b in sorted(merges, key=lambda merge: merge[:2])]
