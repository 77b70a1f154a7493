"""`aura tune`: from a trained model and dialogues to one that answers."""

from __future__ import annotations

import json
import math
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainers
from aura.commands import cli
from aura.config import resolve
from aura.corpus import chatml, dialogues, remote
from aura.corpus.corpus import INITIAL, NOT_LEARNT, Corpus, checksums, read_corpus
from aura.corpus.listener import NOBODY
from aura.corpus.windows import IGNORED, Windows, check_corpus, inputs_and_targets
from aura.errors import AuraError, ConfigError, DataError
from aura.model import export, sample, tuning
from aura.model.family import model_of
from aura.model.loss import LinearCrossEntropy
from aura.plan.auto import tuned
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

SEQ_LEN = 128
IGNORING = NOBODY.start("", None)
BASE = f"--seq-len {SEQ_LEN} --steps 20"
# Whatever follows trainers.TINY; two ids more than the base has.
TUNED = f"--preset tune --seq-len {SEQ_LEN} --vocab-size 302 --lr 1e-2 --validate-every 50"
# Of Qwen3's template, what transformers reads the mask from.
MARKED = chatml.TEMPLATE.replace(
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
)


@pytest.fixture(scope="module")
def base(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on text."""
    ranks = trainers.start(tmp_path_factory.mktemp("base"), corpus, 1, BASE)
    return trainers.complete(ranks)[0].run_dir


def twenty() -> list[dict[str, Any]]:
    people = "Ana Luis Eva Juan Rosa Hugo Pablo Lola Bruno Clara Diego Nuria Sara Vera Marta Pedro Irene Gil Óscar Leo"
    things = "casa libro gato flor tren mapa luna pan taza reloj llave barco nube perro mesa pera zapato vela pez arco"
    return [
        {"prompt": f"¿Qué tiene {person}?", "completion": f"Un {thing}."}
        for person, thing in zip(people.split(), things.split(), strict=True)
    ]


def written(folder: Path, records: list[Any], name: str = "dialogues.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    lines = (json.dumps(record) + "\n" for record in records)
    (folder / name).write_text("".join(lines), encoding="utf-8")
    return folder / name


def prepared(base: Path, folder: Path, records: list[Any], *words: str) -> Corpus:
    data = written(folder, records)
    assert (
        cli.main(
            [
                "tune",
                str(base),
                "--data",
                str(data),
                "--only-prepare",
                "--corpus",
                str(folder / "corpus"),
                *words,
            ]
        )
        == 0
    )
    return read_corpus(folder / "corpus")


def random_dialogues(count: int) -> list[dict[str, Any]]:
    """With spaces, line breaks and tokens of more than a letter at the borders of what is learnt."""
    rng = random.Random(3)
    pieces = [
        "hola",
        " casa",
        "\n",
        "  ",
        "¿qué?",
        "ñandú",
        "🦆",
        "\n\n- uno",
        "12 345",
        "el perro",
        "\t",
        "…",
        ".",
    ]

    def some() -> str:
        return "".join(rng.choices(pieces, k=rng.randrange(12)))

    made = []
    for _ in range(count):
        said = [{"role": "system", "content": some()}] if rng.random() < 0.3 else []
        for _ in range(rng.randrange(1, 4)):
            said += [{"role": "user", "content": some()}, {"role": "assistant", "content": some()}]
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


def test_it_begins_as_the_model_was(base: Path, tmp_path: Path) -> None:
    corpus = prepared(base, tmp_path, twenty())
    before = load_file(export.newest(base, print) / "model.safetensors")
    after = load_file(corpus.path / INITIAL)
    assert before.keys() == after.keys()
    for name, old in before.items():
        new = after[name][: len(old)] if name == "wte.weight" else after[name]
        assert torch.equal(new, old)
    assert torch.equal(after["wte.weight"][300:302], before["wte.weight"][:1].expand(2, -1))
    (trainer,) = trainers.complete(trainers.start(tmp_path / "run", corpus, 1, f"{TUNED} --steps 1"))
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
            torch.testing.assert_close(
                torch.autograd.grad(got, (hidden, weight)), gradients, rtol=1e-4, atol=1e-5
            )


def test_a_target_is_the_next_token_or_none() -> None:
    batch = torch.tensor([[5, 6 + NOT_LEARNT, 7, 8 + NOT_LEARNT]])
    inputs, targets = inputs_and_targets(batch, has_unlearnt=True)
    assert inputs.tolist() == [[5, 6, 7]]
    assert targets.tolist() == [[IGNORED, 7, IGNORED]]


@pytest.fixture(scope="module")
def by_heart(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, list[trainers.Trainer]]:
    folder = tmp_path_factory.mktemp("heart")
    corpus = prepared(base, folder, twenty(), "--validation-fraction", "0")
    settings = f"{TUNED} --batch-size 5 --gradient-accumulation-steps 4 --steps 120 --save-every 60"
    return corpus, trainers.complete(trainers.start(folder / "one", corpus, 1, settings))


def test_what_was_learnt_by_heart_comes_back(
    by_heart: tuple[Corpus, list[trainers.Trainer]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, (trainer,) = by_heart
    trained = sample.load(trainer.run_dir / "checkpoints/checkpoint-step-120")
    model, tokenizer = trained.model, trained.tokenizer
    for record in twenty():
        question = chatml.question([{"role": "user", "content": record["prompt"]}])
        ids = tokenizer.encode(question, add_special_tokens=False).ids
        end = tokenizer.token_to_id(chatml.END)
        answer = list(sample.generate(model, ids, 30, 302, 0, 0, 0, [end]))
        assert answer[-1] == end
        assert tokenizer.decode(answer) == record["completion"]
    words = ["chat", str(trainer.run_dir), "--ask", record["prompt"], "--temperature", "0"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"{record['completion']}\n"


def test_its_loss_is_the_mean_over_what_is_learnt(by_heart: tuple[Corpus, list[trainers.Trainer]]) -> None:
    corpus, (trainer,) = by_heart
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
    records = [
        record | {"completion": "sí " * (1 + 4 * (number % 2 == 0))} for number, record in enumerate(twenty())
    ]
    corpus = prepared(base, tmp_path, records, "--validation-fraction", "0")
    settings = f"{TUNED} --steps 8 --batch-size 2 --wire fp32 --log-every 1"
    one = trainers.complete(
        trainers.start(tmp_path / "one", corpus, 1, f"{settings} --gradient-accumulation-steps 4")
    )
    two = trainers.complete(
        trainers.start(tmp_path / "two", corpus, 2, f"{settings} --gradient-accumulation-steps 2")
    )
    assert two[0].done["loss"] == pytest.approx(one[0].done["loss"], rel=1e-4)
    assert two[0].done["validation_loss"] == pytest.approx(one[0].done["validation_loss"], rel=1e-4)
    assert two[0].done["tokens_seen"] == one[0].done["tokens_seen"]


def test_it_goes_on_to_the_bit(by_heart: tuple[Corpus, list[trainers.Trainer]], tmp_path: Path) -> None:
    corpus, (whole,) = by_heart
    settings = f"{TUNED} --batch-size 5 --gradient-accumulation-steps 4 --steps 120 --save-every 60"
    fault = {0: trainers.at_step(70, trainers.send_self(signal.SIGKILL))}
    (broken,) = trainers.start(tmp_path, corpus, 1, settings, fault)
    assert broken.end() == -signal.SIGKILL
    (again,) = trainers.complete(trainers.start(tmp_path, corpus, 1, settings))
    assert "step 60" in again.text
    assert again.files("checkpoint-step-120") == whole.files("checkpoint-step-120")


def test_the_same_command_goes_on_and_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    first = prepared(base, tmp_path, twenty())
    assert prepared(base, tmp_path, twenty()).fingerprint == first.fingerprint
    data = str(tmp_path / "dialogues.jsonl")
    words = ["tune", str(base), "--data", data, "--only-prepare", "--corpus", str(tmp_path / "corpus")]
    assert cli.main([*words, "--validation-fraction", "0.5"]) == 65
    written(tmp_path, twenty()[1:])
    assert cli.main(words) == 65
    assert read_corpus(tmp_path / "corpus").fingerprint == first.fingerprint


def test_what_has_begun_goes_on_whatever_its_model_has_learnt_since(
    corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = trainers.complete(trainers.start(tmp_path / "base", corpus, 1, BASE))[0].run_dir
    first = prepared(base, tmp_path, twenty())
    trainers.complete(trainers.start(tmp_path / "base", corpus, 1, BASE.replace("20", "25")))
    assert prepared(base, tmp_path, twenty()).fingerprint == first.fingerprint
    assert "has learnt more since" in capfd.readouterr().out


def test_tuned_again_it_keeps_its_rates(
    by_heart: tuple[Corpus, list[trainers.Trainer]], tmp_path: Path
) -> None:
    _, (trainer,) = by_heart
    again = prepared(trainer.run_dir, tmp_path, twenty())
    assert tuned(again.path, {}).lr == 1e-2
    assert again.vocab_size == 302


def test_a_dataset_is_taken_but_for_what_is_no_dialogue(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A directory that is one; of the hub it would be a name."""
    written(tmp_path / "set", [*twenty(), {"prompt": None, "completion": "hola"}], "train.jsonl")
    words = ["tune", str(base), "--dataset", str(tmp_path / "set"), "--corpus", str(tmp_path / "corpus")]
    assert cli.main([*words, "--only-prepare"]) == 0
    assert "Row 21 is left out: it is no dialogue" in capfd.readouterr().out
    meta = json.loads((tmp_path / "corpus/meta.json").read_text())
    assert sum(meta["documents"].values()) == 20
    assert meta["provenance"]["no_dialogues"] == 1
    assert cli.main([*words, "--only-prepare"]) == 0
    assert "up to date" in capfd.readouterr().out
    written(tmp_path / "set", twenty()[1:], "train.jsonl")
    assert cli.main([*words, "--only-prepare"]) == 65
    assert cli.main([*words[:2], "--dataset", "nvidia/ClimbMix"]) == 64
    assert "cc-by-nc-4.0" in capfd.readouterr().err


def test_validation_has_dialogues_of_its_own(base: Path, tmp_path: Path) -> None:
    corpus = prepared(base, tmp_path, twenty(), "--validation-fraction", "0.3")
    counts = json.loads((corpus.path / "meta.json").read_text())["documents"]
    assert counts["validation"] > 0
    assert sum(counts.values()) == 20
    read = [
        {
            tuple(row)
            for row in Windows(corpus, split, SEQ_LEN).batch(np.arange(counts[split]))[:, :-1].tolist()
        }
        for split in ("train", "validation")
    ]
    assert not read[0] & read[1]


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
    ],
)
def test_what_is_no_dialogue_is_refused_with_its_line(record: Any, sentence: str, tmp_path: Path) -> None:
    data = written(tmp_path, [twenty()[0], record])
    with pytest.raises(AuraError, match="element\\) 2") as refused:
        list(dialogues.read([data], IGNORING))
    assert sentence in str(refused.value)


def test_a_list_and_other_forms_are_read(tmp_path: Path) -> None:
    forms = [
        {"instruction": "suma", "input": "1 y 2", "output": "3"},
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
            ]
        },
    ]
    (tmp_path / "all.json").write_text("\n " + json.dumps(forms))
    read = list(dialogues.read([tmp_path / "all.json"], IGNORING))
    assert read[0] == [{"role": "user", "content": "suma\n\n1 y 2"}, {"role": "assistant", "content": "3"}]
    assert [each["role"] for each in read[1]] == ["system", "user", "assistant"]
    unanswered = [*read[1], {"role": "user", "content": "and?"}]
    assert dialogues.messages_of({"messages": unanswered}) == read[1]
    with pytest.raises(AuraError, match="JSON lines"):
        list(dialogues.read([written(tmp_path, [], "a.txt")], IGNORING))


def test_other_corpora_and_lengths_are_refused(
    base: Path, corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="aura tune RUN"):
        resolve("tune")
    assert (
        cli.main(
            ["train", "--preset", "tune", "--corpus", str(corpus.path), "--run-dir", str(tmp_path / "r")]
        )
        == 64
    )
    assert "no corpus of dialogues" in capfd.readouterr().err
    own = prepared(base, tmp_path, twenty())
    (short,) = trainers.start(tmp_path / "short", own, 1, "--preset tune --seq-len 32 --vocab-size 302")
    assert short.end() == 64
    assert f"laid out for seq_len={SEQ_LEN}" in short.text
    assert cli.main(["tune", str(tmp_path), "--data", str(tmp_path / "dialogues.jsonl")]) == 64
    assert "is no run" in capfd.readouterr().err


def test_fewer_windows_than_ranks_are_refused(base: Path, tmp_path: Path) -> None:
    own = prepared(base, tmp_path, twenty()[:2], "--validation-fraction", "0", "--pack")
    config = tuned(own.path, {})
    with pytest.raises(DataError, match="fewer than the 2 ranks: leave out --pack"):
        check_corpus(own, config, 2)


def test_it_can_be_fetched_from_object_storage(base: Path, tmp_path: Path) -> None:
    own = prepared(base, tmp_path, twenty())
    names = checksums(json.loads((own.path / "meta.json").read_text()))
    assert all(remote.FILE.fullmatch(name) for name in names)
    assert (own.path / INITIAL).stat().st_mode & 0o777 == 0o644
    with pytest.raises(SystemExit):
        cli.main(["tune", str(base), "--data", "a", "--corpus", "s3://bucket/a"])


def test_how_long_it_trains_follows_from_the_windows() -> None:
    settings = tuning.settings_of(resolve("gpt2"), 50259, 1000)
    assert (settings["steps"], settings["global_batch_tokens"]) == (math.ceil(3 * 1000 / 32), 32 * 1024)
    assert settings["vocab_size"] == 50259
