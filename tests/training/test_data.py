from __future__ import annotations

import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aura.config import resolve
from aura.corpus import shards
from aura.corpus.corpus import TOKENIZER, Corpus, read_corpus, verify
from aura.corpus.sequences import Order, Sequences, check_corpus, even_share, permutation, share_of
from aura.errors import DataError
from aura.plan.shapes import with_vocabulary
from conftest import prepare


def test_windows_are_the_text_in_order_and_share_one_token(corpus: Corpus) -> None:
    sequences = Sequences(corpus, "train", 16)
    stream = np.fromfile(corpus.path / "train-00000.bin", dtype="<u2").astype(np.int64)
    inputs, targets = sequences.read(np.arange(len(sequences)))
    assert inputs.shape == targets.shape == (len(sequences), 16)
    used = len(sequences) * 16
    assert np.array_equal(inputs.flatten().numpy(), stream[:used])
    assert np.array_equal(targets.flatten().numpy(), stream[1 : used + 1])
    assert len(stream) - 1 - used < 16
    # A sequence needs one token more than it has inputs.
    assert [len(Sequences(corpus, "train", len(stream) + more)) for more in (-1, 0, 1)] == [1, 0, 0]


def test_windows_do_not_see_the_borders_of_files(
    corpus: Corpus, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 3000)
    made = prepare([text], tmp_path / "c", 300, 0.1)
    assert verify(made.path) == made
    assert all(entry["tokens"] >= 3000 for entry in made.files["train"][:-1])
    cut = Sequences(made, "train", 16)
    whole = Sequences(corpus, "train", 16)
    assert len(cut.shards) > 3 and len(cut) == len(whole)
    everything = np.arange(len(whole))
    assert cut.read(everything)[0].equal(whole.read(everything)[0])


def test_a_corpus_may_have_more_files_than_a_process_usually_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 8)
    (tmp_path / "text.txt").write_text("\n\n".join(f"Había {number} veces. " * 300 for number in range(150)))
    many = prepare([tmp_path / "text.txt"], tmp_path / "c", 300)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, usual[1]))
    try:
        assert len(Sequences(many, "train", 16).shards) > 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def test_a_tokenizer_that_was_cut_short_is_refused_before_a_run_takes_it(
    corpus: Corpus, tmp_path: Path
) -> None:
    path = shutil.copytree(corpus.path, tmp_path / "c")
    (path / TOKENIZER).write_bytes((corpus.path / TOKENIZER).read_bytes()[:-100])
    with pytest.raises(DataError, match=r"tokenizer\.json is damaged"):
        read_corpus(path)


def test_every_epoch_visits_every_window_once_in_its_own_order() -> None:
    order = Order(101, seed=3)
    first, second = order.at(0, 101), order.at(101, 101)
    assert sorted(first) == sorted(second) == list(range(101))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.arange(101))
    assert not np.array_equal(first, Order(101, seed=4).at(0, 101))


def test_the_order_is_the_same_for_ever() -> None:
    """A run that was started with an older release must find its place: these numbers may never change."""
    assert permutation(12, seed=0, epoch=0).tolist() == [0, 7, 8, 11, 2, 5, 9, 4, 10, 6, 3, 1]
    assert permutation(12, seed=7, epoch=3).tolist() == [1, 6, 9, 0, 4, 7, 11, 3, 10, 2, 8, 5]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_any_number_of_ranks_reads_the_same_windows(ranks: int) -> None:
    order, per_step = Order(101, seed=0), 20
    for step in range(12):  # over two borders of epochs
        together: list[int] = []
        for rank in range(ranks):
            offset, share = share_of(rank, [per_step // ranks] * ranks)
            together += order.at(step * per_step + offset, share).tolist()
        assert together == order.at(step * per_step, per_step).tolist()
    assert sorted(order.at(0, 202)) == sorted([*range(101), *range(101)])
    assert [share_of(rank, [3, 1, 4]) for rank in range(3)] == [(0, 3), (3, 1), (4, 4)], "uneven ones"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
def test_validation_is_divided_completely(ranks: int) -> None:
    parts = [even_share(rank, ranks, 41) for rank in range(ranks)]
    assert [i for part in parts for i in part] == list(range(41))


def test_a_corpus_that_does_not_fit_is_refused(corpus: Corpus) -> None:
    def check(world_size: int = 1, **settings: object) -> None:
        values = {"vocab_size": 300, "seq_len": 16, "batch_size": 10, **settings}
        check_corpus(corpus, resolve("gpt2-nano", values), world_size)

    check()
    with pytest.raises(DataError, match=r"vocabulary of 300.*vocab_size=299.*--vocab-size 299"):
        check(vocab_size=299)
    sequences = len(Sequences(corpus, "train", 16))
    check(batch_size=sequences)
    with pytest.raises(
        DataError, match=rf"{sequences} sequences of 16, but .* takes {sequences + 1} .*--allow-"
    ):
        check(batch_size=sequences + 1)
    with pytest.raises(DataError, match=rf"takes {2 * sequences} .* 2 ranks"):
        check(2, batch_size=sequences)
    check(batch_size=sequences + 1, allow_dataset_oversubscription=True)
    check(2, global_batch_tokens=16 * sequences)
    too_much = rf"takes {sequences + 1} \(global_batch_tokens=\d+\): .* reduce --global-batch"
    with pytest.raises(DataError, match=too_much):
        check(2, global_batch_tokens=16 * (sequences + 1))
    with pytest.raises(DataError, match="validation tokens, less than one"):
        check(batch_size=1, seq_len=corpus.tokens["validation"])


def test_a_padding_token_has_room_in_the_padded_embedding(corpus: Corpus) -> None:
    config = resolve("gpt2-nano", {"vocab_size": 299, "vocab_multiple": 64})  # 320 rows
    assert with_vocabulary(config, corpus.vocab_size).vocab_size == 300
    enough = replace(config, vocab_size=310)
    assert with_vocabulary(enough, corpus.vocab_size) == enough
    too_small = replace(config, vocab_size=299, vocab_multiple=1)
    assert with_vocabulary(too_small, corpus.vocab_size) == too_small
