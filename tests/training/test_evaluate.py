"""`aura evaluate` beside lm-evaluation-harness called by hand, on tasks that need no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from aura.commands import cli, evaluate
from aura.commands.named import model_named
from aura.config import resolve
from aura.corpus.corpus import END_OF_TEXT, TOKENIZER, TOKENIZER_CONFIG, Corpus
from aura.errors import ConfigError
from aura.model import export
from aura.model.gpt import GPT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainers import complete, start

CHOICE = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
WORD = """task: last_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: " {{{{word}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
"""
TAGGED = CHOICE + "tag: some_tag\n"
GROUP = """group: choices
task: [of_three, of_four]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
"""
TASKS = ["of_two", "choices", "last_word"]  # and, by a tag, of_five


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    (trainer,) = complete(start(folder, corpus, 1, "--batch-size 8 --steps 20 --lr 1e-2"))
    return trainer.run_dir


@pytest.fixture(scope="module")
def model(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of random numbers."""
    folder = tmp_path_factory.mktemp("evaluate")
    settings = {"layers": 2, "heads": 4, "d_model": 32, "seq_len": 64, "vocab_size": corpus.vocab_size}
    torch.manual_seed(0)
    model = GPT(config := resolve("gpt2-nano", settings))
    export.export(config, model.state_dict(), corpus.path / TOKENIZER, folder / "exported")
    return folder / "exported"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    words = "el perro lee rápido en la red de cinco nodos".split()
    for name, answers, examples in (("of_two", 2, 30), ("of_three", 3, 30), ("of_four", 4, 10)):
        rows = [
            {"text": " ".join(words[: 2 + i % 5]), "choices": words[-answers:], "label": i % answers}
            for i in range(examples)
        ]
        write(folder / name, CHOICE.format(name=name, data=folder / f"{name}.jsonl"), rows)
    rows = [{"text": " ".join(words[:i]), "word": words[i]} for i in range(1, 9)]
    write(folder / "last_word", WORD.format(data=folder / "last_word.jsonl"), rows)
    (folder / "choices.yaml").write_text(GROUP)
    rows = [{"text": "", "choices": words[:5], "label": i % 5} for i in range(5)]
    write(folder / "of_five", TAGGED.format(name="of_five", data=folder / "of_five.jsonl"), rows)
    return folder


def write(path: Path, task: str, rows: list[dict[str, object]]) -> None:
    path.with_suffix(".yaml").write_text(task, encoding="utf-8")
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.more
def test_the_figures_are_those_of_the_harness(
    run: Path, model: Path, tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A run's are written into it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["--include", str(tasks), "--device", "cpu", "--tasks"]
    assert cli.main(["evaluate", str(run), *words, "some_tag"]) == 0
    assert cli.main(["evaluate", str(run), str(model), *words, *TASKS]) == 0
    table = capfd.readouterr().out
    ours = json.loads((run / evaluate.RESULT).read_text())["tasks"]
    theirs = by_hand(run / "final", tasks, tmp_path / "theirs")
    for task, metric in zip(TASKS, ("acc", "acc", "perplexity"), strict=True):
        assert ours[task]["metric"] == metric
        assert ours[task]["value"] == pytest.approx(theirs[task][f"{metric},none"], rel=1e-6)
        if metric == "acc":
            assert ours[task]["error"] == pytest.approx(theirs[task]["acc_stderr,none"], rel=1e-6)
    assert list(ours) == ["of_five", *TASKS]  # of both calls
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    (point,) = events.Scalars("Evaluation/of_two")
    assert (point.step, point.value) == (20, pytest.approx(ours["of_two"]["value"], rel=1e-6))
    assert [ours[task]["examples"] for task in TASKS] == [30, 40, 8]
    chances = [ours[task]["chance"] for task in TASKS]
    assert chances == [0.5, pytest.approx((30 / 3 + 10 / 4) / 40), None]
    assert run.name in table and "exported" in table and f"{ours['of_two']['value']:.3f} ±" in table


@pytest.mark.more
@pytest.mark.parametrize("end", [END_OF_TEXT, "<fin>"])
def test_a_text_begins_behind_the_end_of_another(run: Path, tmp_path: Path, end: str) -> None:
    """Whatever the tokenizer calls it."""
    other = shutil.copytree(run, tmp_path / "run")
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        (other / name).write_text((run / name).read_text().replace(END_OF_TEXT, end))
    script = "import sys; from lm_eval.models.huggingface import HFLM; "
    script += "print(HFLM(sys.argv[1], add_bos_token=True, device='cpu').tok_encode('el'))"
    with evaluate.exported(model_named(other)) as model:
        command = [evaluate.ENVIRONMENT.python(), "-I", "-c", script, model]
        done = subprocess.run(command, text=True, capture_output=True, check=True, timeout=300)
    assert json.loads(done.stdout.splitlines()[-1])[0] == 0


def by_hand(model: Path, tasks: Path, output: Path) -> dict[str, dict[str, float]]:
    """As the harness's own documentation says."""
    settings = f"pretrained={model},add_bos_token=True,dtype=auto"
    command = [evaluate.ENVIRONMENT.python(), *"-m lm_eval run --model hf --model_args".split(), settings]
    command += ["--tasks", ",".join(TASKS), "--include_path", tasks, "--output_path", output]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*command, "--device", "cpu"], env=variables, check=True, timeout=300)
    (file,) = output.rglob("results_*.json")
    results: dict[str, dict[str, float]] = json.loads(file.read_text())["results"]
    return results


@pytest.mark.more
def test_a_task_that_the_harness_does_not_have(model: Path, tasks: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task of_twos\. Similar ones: .*of_two"):
        evaluate.main([str(model), "--tasks", "of_twos", "--include", str(tasks)])


def test_what_is_no_model_is_said_before_anything_is_installed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(evaluate.ENVIRONMENT.variable, str(tmp_path / "environment"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty is no run with a checkpoint"):
        evaluate.main([str(model), str(tmp_path / "empty")])
    with pytest.raises(ConfigError, match="--limit 0 must be at least 1"):
        evaluate.main([str(model), "--limit", "0"])
    assert not (tmp_path / "environment").exists()
