"""What existing tokenizers do to a text: it comes back, or somebody hears of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from aura.corpus import round_trip
from aura.corpus.corpus import Corpus
from aura.corpus.listener import Silence
from aura.corpus.mixture import Mixture, Part
from aura.corpus.prepare import build
from aura.corpus.sources import LocalFiles
from aura.corpus.special_tokens import count_ids, with_special_tokens
from aura.corpus.work import Settings
from aura.errors import AuraError, ConfigError, DataError
from test_prepare import documents_of
from test_prepare_resume import stopped_at, take_steps
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

KNOWN = ["el perro lee", "la red lee el cable", "un cable\ny una red", "la casa"]
FOREIGN = [*KNOWN, "el año"]  # in which nobody knows the ñ
Trainer = (
    trainers.BpeTrainer | trainers.UnigramTrainer | trainers.WordPieceTrainer | trainers.WordLevelTrainer
)
WORDS = ["cable", *(letter + "rojo" for letter in "ñ漢áé"), "red"]
LETTERS = sorted({letter for text in KNOWN for letter in text if not letter.isspace()})
UNKNOWN = "[UNK]"
FAILS = r"^The tokenizer .*tokenizer\.json cannot be used: [^\n]*\.$"


def lost(before: str, after: str) -> str:
    return rf"loses text: of \d+ characters .* Examples: '{before}' becomes '{after}' \(document 1\)"


# Family, its unknown token, and the sentence that a text with an ñ meets.
FAMILIES: dict[str, tuple[str, str | None, str | None]] = {
    "BPE that drops": ("bpe", None, lost("año", "ao")),
    "BPE": ("bpe", UNKNOWN, lost("año", r"a\[UNK\]o")),
    "byte-level BPE": ("bytes", None, None),
    "byte-level BPE without a decoder": ("bytes without decoder", None, None),
    "byte-level BPE without an alphabet": ("few bytes", None, lost("año", "ao")),
    "Unigram that fails": ("unigram", None, FAILS),
    "Unigram": ("unigram", UNKNOWN, lost("año", r"a\[UNK\]o")),
    "WordPiece that fails": ("wordpiece", None, FAILS),
    "WordPiece": ("wordpiece", UNKNOWN, lost("año", r"\[UNK\]")),
    "WordLevel that fails": ("wordlevel", None, FAILS),
    "WordLevel": ("wordlevel", UNKNOWN, lost("año", r"\[UNK\]")),
}


def drawn(family: str, unknown: str | None) -> Tokenizer:
    """Trained on KNOWN; of what fails the unknown token is missing."""
    special = [unknown] if unknown else []
    trainer: Trainer
    if family == "bpe":
        made = Tokenizer(models.BPE(unk_token=unknown))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    elif family in ("bytes", "few bytes", "bytes without decoder"):
        made = Tokenizer(models.BPE())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.pre_tokenizer = byte_level
        if family == "bytes without decoder":
            made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), byte_level])
        else:
            made.decoder = decoders.ByteLevel()
        alphabet = [] if family == "few bytes" else pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    elif family == "unigram":
        letters = [(letter, -2.0) for letter in [*LETTERS, " ", "\n", "perro"]]
        made = Tokenizer(models.Unigram([(unknown or "a", -9.0), *letters], 0 if unknown else None, False))
        made.decoder = decoders.Fuse()
        return made
    elif family == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False)
    else:
        made = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    made.train_from_iterator(KNOWN, trainer)
    return made


class Heard(Silence):
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


def prepare(
    made: Tokenizer | Path, texts: list[str], tmp_path: Path, **settings: Any
) -> tuple[Corpus, list[str]]:
    """The corpus, and what was said."""
    tokenizer = made if isinstance(made, Path) else tmp_path / "tokenizer.json"
    if isinstance(made, Tokenizer):
        made.save(str(tokenizer))
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    heard = Heard()
    asked = replace(Settings(None, 0.3, tokenizer=str(tokenizer)), **settings)
    return build(LocalFiles([file]), tmp_path / "c", asked, heard), heard.sentences


def letters(texts: list[str]) -> list[str]:
    return sorted("".join(text.split()) for text in texts)


def all_documents(corpus: Corpus) -> list[str]:
    return documents_of(corpus, "train") + documents_of(corpus, "validation")


@pytest.mark.parametrize("name", FAMILIES)
def test_text_comes_back_or_is_refused(name: str, tmp_path: Path) -> None:
    family, unknown, refusal = FAMILIES[name]
    known, said = prepare(drawn(family, unknown), KNOWN, tmp_path)
    assert letters(all_documents(known)) == letters(KNOWN)
    altered = sorted(all_documents(known)) != sorted(KNOWN)
    assert any("changes text by its own rules" in sentence for sentence in said) == altered
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    texts = FOREIGN[::-1]
    if refusal is None:
        assert letters(all_documents(prepare(drawn(family, unknown), texts, foreign)[0])) == letters(FOREIGN)
        return
    with pytest.raises(DataError, match=refusal):
        prepare(drawn(family, unknown), texts, foreign)
    assert {file.name for file in foreign.iterdir()} == {"tokenizer.json", "texts.jsonl"}
    if refusal != FAILS:
        _, said = prepare(drawn(family, unknown), texts, foreign, accept_lossy=True)
        assert sum("loses text" in sentence for sentence in said) == 1
        assert not any("come up only now" in sentence for sentence in said)


def test_an_added_word_with_an_accent_is_no_loss(tmp_path: Path) -> None:
    """The library's decoder makes "a\ufffdo" of it, but a model learns its id."""
    made = drawn("bytes", None)
    made.add_tokens(["año"])
    _, said = prepare(made, FOREIGN, tmp_path)
    assert not any("'año'" in sentence for sentence in said)


def test_what_a_tokenizer_says_of_itself_is_said_and_not_refused(tmp_path: Path) -> None:
    """Lower case, no accents, no line breaks."""
    made = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    texts = ["El Año\nNuevo. We do not know", "El perro lee"]
    made.train_from_iterator(texts, trainers.WordPieceTrainer(special_tokens=[UNKNOWN], show_progress=False))
    corpus, said = prepare(made, texts, tmp_path)
    assert "ano" in " ".join(all_documents(corpus))
    (sentence,) = [each for each in said if "its own rules" in each]
    assert "2 of 2 texts" in sentence and r"'Año\nNuevo.' becomes 'ano nuevo .'" in sentence


def test_a_line_break_that_no_rule_drops_is_text(tmp_path: Path) -> None:
    vocabulary = {letter: number for number, letter in enumerate([*LETTERS, " "])}
    made = Tokenizer(models.BPE(vocabulary, []))
    with pytest.raises(DataError, match=lost(r"cable\\ny", "cabley")):
        prepare(made, [KNOWN[2], *KNOWN], tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_rare_character_is_met_where_it_first_stands(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_trip, "SAMPLE", 30)
    made, texts = drawn("bpe", None), [f"{text} el" * 9 for text in KNOWN] + ["el año"]
    with pytest.raises(DataError, match=r"loses text: .*'año' becomes 'ao' \(document 5\)"):
        prepare(made, texts, tmp_path, workers=workers)
    monkeypatch.setattr(round_trip, "READ", 60)
    with pytest.raises(DataError, match=r"come up only now\. Examples: 'año' becomes 'ao'\. Take"):
        prepare(made, texts, tmp_path, workers=workers)
    assert not (tmp_path / "c.partial").exists()
    _, said = prepare(made, texts, tmp_path, workers=workers, accept_lossy=True)
    assert sum("come up only now" in sentence for sentence in said) == 1


MANY = [f"{text}{' el' * number}" for number in range(9) for text in KNOWN]  # no two alike


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("first", "second", "most", "example"),
    [
        ([*MANY, "el año"], None, 30, None),
        (["el perro lee", "el año", *MANY], None, 30, "'año' becomes 'ao'"),
        ([*MANY, "el año"], KNOWN, None, None),
        ([*MANY, "el año"], ["el perro", "una caña"], None, "'caña' becomes 'caa'"),
    ],
)
def test_text_that_is_not_taken_refuses_nothing(
    first: list[str], second: list[str] | None, most: int | None, example: str | None, workers: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Behind the last document that is asked for, and read ahead for a mixture in which another part is used up."""
    monkeypatch.setattr(round_trip, "READ", 10)
    file, parts = tmp_path / "tokenizer.json", []
    drawn("bpe", None).save(str(file))
    for number, texts in enumerate([first, second] if second else [first]):
        jsonl = tmp_path / f"{number}.jsonl"
        jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        parts.append(Part(str(number), 0.5, LocalFiles([jsonl])))
    source = Mixture(parts) if second else parts[0].source
    settings = Settings(None, 0.3, tokenizer=str(file), max_tokens=most, workers=workers)
    if example:
        with pytest.raises(DataError, match=f"only now.*{example}"):
            build(source, tmp_path / "c", settings)
    else:
        assert sum(build(source, tmp_path / "c", settings).tokens.values())


@pytest.mark.parametrize(
    ("affix", "known", "lacks"),
    [("end_of_word_suffix", "montañas, red", "cañ"), ("continuing_subword_prefix", "ñandú, red", "caña")],
)
def test_a_character_is_met_also_where_words_did_not_have_it(
    affix: str, known: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a vocabulary has an entry for every place of a letter, at the beginning, inside and at the end of a word."""
    monkeypatch.setattr(round_trip, "SAMPLE", 30)
    options: dict[str, Any] = {affix: "##"}
    made = Tokenizer(models.BPE(**options))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, **options)
    made.train_from_iterator([*KNOWN, known], trainer)
    texts = [known, *KNOWN * 3]
    assert sum(prepare(made, texts, tmp_path)[0].tokens.values())
    (tmp_path / "c").rename(tmp_path / "known")
    for read, refusal in (
        (999, rf"loses text: .*'{lacks},?' becomes"),
        (60, rf"only now\. .*'{lacks},?' becomes"),
    ):
        monkeypatch.setattr(round_trip, "READ", read)
        with pytest.raises(DataError, match=refusal):
            prepare(made, [*texts, f"la {lacks}, el cable"], tmp_path)


def test_words_around_a_rare_character_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trip, "SAMPLE", 30)
    monkeypatch.setattr(round_trip, "READ", 300)
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    texts = ["cable " * 30] + [f"{'cable ' * 40}{word}{' cable' * 40}" for word in WORDS]
    corpus, _ = prepare(made, texts, tmp_path)
    assert sum(corpus.tokens.values()) == 30 + 81 * len(WORDS) + 1 + len(WORDS)


def test_what_was_tried_is_not_new_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_steps(monkeypatch, chars=1, tokens=2000)
    made = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate([*WORDS, UNKNOWN])}, UNKNOWN)
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    texts = [f"{' '.join(WORDS)} {'red ' * number}" for number in range(9)] + ["".join(WORDS)]
    monkeypatch.setattr(round_trip, "READ", 10)
    with stopped_at(9, monkeypatch):
        prepare(made, texts, tmp_path)
    corpus, _ = prepare(made, texts, tmp_path)
    (tmp_path / "c").rename(tmp_path / "interrupted")
    assert prepare(made, texts, tmp_path)[0].fingerprint == corpus.fingerprint


def test_a_tokenizer_that_fails_later_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_trip, "READ", 20)
    with pytest.raises(DataError, match=FAILS):
        prepare(drawn("unigram", None), FOREIGN, tmp_path, workers=2)
    assert not (tmp_path / "c.partial").exists()


def sentencepiece_model(path: Path, **options: Any) -> Path:
    """Whose own symbols are in the text, one of them a line break."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in KNOWN for line in text.split("\n")]), model_writer=model,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepieces_own_symbols_have_its_ids(kind: str, tmp_path: Path) -> None:
    model = sentencepiece_model(
        tmp_path / "own.model", model_type=kind, vocab_size=320, byte_fallback=True,
        user_defined_symbols=["<br>", "\n", "la casa", "<b"], normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    texts = [*KNOWN, "<br>la casa\n\n<b> una<br>red  <br> y\n ñ"]
    corpus, _ = prepare(model, [*texts, "<s>la red</s>", "una <unk>"], tmp_path)
    made = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for text in texts:
        assert made.encode(text, add_special_tokens=False).ids == processor.encode(text)
        assert made.decode(processor.encode(text)) == text


def test_a_sentencepiece_that_would_get_other_ids_is_refused(tmp_path: Path) -> None:
    model = sentencepiece_model(
        tmp_path / "other.model", model_type="bpe", vocab_size=60, treat_whitespace_as_suffix=True
    )
    with pytest.raises(ConfigError, match="'el' would get other ids"):
        prepare(model, KNOWN, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"other.model", "texts.jsonl"}


def test_a_new_token_behind_gaps_takes_nobodys_id(tmp_path: Path) -> None:
    described = json.loads(drawn("bytes", None).to_str())
    before = {piece: 2 * number for piece, number in described["model"]["vocab"].items()}
    described["model"]["vocab"] = before
    made = Tokenizer.from_str(json.dumps(described))
    corpus, _ = prepare(made, KNOWN, tmp_path)
    after = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    largest = max(before.values())
    assert after.get_vocab() == before | {"<|endoftext|>": largest + 1, "<|pad|>": largest + 2}
    assert corpus.vocab_size == count_ids(after) == largest + 3
    assert letters(all_documents(corpus)) == letters(KNOWN)

    tuned = with_special_tokens(after, ["<|im_start|>", "<|pad|>"])
    assert tuned.token_to_id("<|im_start|>") == largest + 3
    assert tuned.token_to_id("<|pad|>") == largest + 2
    assert tuned.encode("<|im_start|>la").ids[0] == largest + 3


def test_two_tokens_with_one_id_are_refused(tmp_path: Path) -> None:
    described = json.loads(drawn("bytes", None).to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"] = vocabulary["b"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(AuraError, match="Two tokens of this tokenizer have the same id"):
        prepare(tmp_path / "tokenizer.json", KNOWN, tmp_path)
