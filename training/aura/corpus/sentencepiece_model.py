"""A SentencePiece model, unigram or BPE, as a tokenizer for `tokenizers`, and whether that gives the same ids.

What the parts mean: sentencepiece_model.proto in the repository google/sentencepiece. transformers'
convert_slow_tokenizer raises AttributeError on BPE, and gives more other ids on unigram (docs/log.md).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from aura.errors import ConfigError

# What a text that gets other ids is shown by: a word, two words, or its beginning.
PARTS = (r"\S+", r"\S{0,15}\s+\S{0,15}", r"(?s).{1,60}")


class SentencePiece:
    """Raises ConfigError for a file that is none."""

    def __init__(self, path: Path) -> None:
        import sentencepiece
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        self.format: Any = sentencepiece_model_pb2  # its classes are made when it is imported
        self.path, self.proto = path, self.format.ModelProto()
        try:
            self.proto.ParseFromString(path.read_bytes())
            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (DecodeError, RuntimeError, OSError):
            raise ConfigError("no_sentencepiece", path=path) from None
        self.is_unigram = self.proto.trainer_spec.model_type == self.format.TrainerSpec.UNIGRAM
        kinds = self.format.ModelProto.SentencePiece
        self.symbols = self._pieces(kinds.USER_DEFINED)
        self.control = self._pieces(kinds.CONTROL, kinds.UNKNOWN)
        self.ordinary = {*self._pieces(kinds.NORMAL), *self.symbols}

    def _pieces(self, *kinds: int) -> list[str]:
        return [piece.piece for piece in self.proto.pieces if piece.type in kinds]

    def converted(self) -> Tokenizer:
        """Raises ConfigError where it is neither unigram nor BPE."""
        spec = self.proto.normalizer_spec
        tokenizer = Tokenizer(self._model())
        tokenizer.normalizer = _normalizer(spec)
        if self.symbols:  # each is a word of its own, the longest first, and such a word is looked up whole
            longest_first = sorted(self.symbols, key=len, reverse=True)
            pattern = "|".join(map(re.escape, longest_first))
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        begin = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *begin]
        )
        tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in self.control])
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _model(self) -> Any:
        pieces = [(piece.piece, piece.score) for piece in self.proto.pieces]
        settings = self.proto.trainer_spec
        if self.is_unigram:
            return models.Unigram(pieces, settings.unk_id, settings.byte_fallback)
        if settings.model_type != self.format.TrainerSpec.BPE:
            raise ConfigError("sentencepiece_of_words", path=self.path)
        return models.BPE(
            {piece: number for number, (piece, _) in enumerate(pieces)},
            self._merges(pieces),
            unk_token=pieces[settings.unk_id][0],
            fuse_unk=True,
            byte_fallback=settings.byte_fallback,
            ignore_merges=bool(self.symbols),
        )

    def _merges(self, pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
        """Every way to make an ordinary piece of two, best piece first."""
        ids = {piece: number for number, (piece, _) in enumerate(pieces) if piece in self.ordinary}
        merges = []
        for piece, score in pieces:
            halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece in ids]
            ways = [(ids[a], ids[b], a, b) for a, b in halves if a in ids and b in ids]
            merges += [(-score, number, a, b) for number, (_, _, a, b) in enumerate(sorted(ways))]
        return [(a, b) for _, _, a, b in sorted(merges, key=lambda merge: merge[:2])]

    def check_same(self, tokenizer: Tokenizer, text: str) -> None:
        """Raises ConfigError where one id of it differs from SentencePiece's own. Where the text itself says "</s>",
        a unigram of `tokenizers` takes the control piece, and nothing can be set against that."""
        text = re.sub("|".join(map(re.escape, self.control)), " ", text)
        if self._is_same(tokenizer, text):
            return
        parts = (part for pattern in PARTS for part in re.findall(pattern, text))
        shortest = next((part for part in parts if not self._is_same(tokenizer, part)), text)
        raise ConfigError("sentencepiece_not_expressible", path=self.path, text=shortest)

    def check_symbols(self, tokenizer: Tokenizer) -> None:
        """Of the model's own symbols and line breaks, wherever they may stand. Raises ConfigError."""
        for symbol in [*self.symbols, "\n"]:
            self.check_same(tokenizer, f"{symbol} a{symbol}b {symbol}\n{symbol}{symbol} c\n\nd")

    def _is_same(self, tokenizer: Tokenizer, text: str) -> bool:
        """Of two ways that a unigram finds equally likely, "--" "-" and "-" "--", rounding decides: 32 bits there, 64
        bits here. So the order may differ."""
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids  # hears signals
        own = self.processor.encode(text)
        return bool(ids == own or (self.is_unigram and sorted(ids) == sorted(own)))


def _normalizer(spec: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
