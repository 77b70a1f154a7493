"""What others' tools do with a model that was trained here: the commands of docs/model.md, typed on a small one.

TRL and lm-evaluation-harness come with `make tools`.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import aura
import pytest
import torch
from aura.corpus.corpus import Corpus
from aura.model import export, sample
from test_gguf import Llama
from trainers import complete, start

pytestmark = pytest.mark.more
ROOT = Path(aura.__file__).parents[2]
TASK = """task: last_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: " {{{{word}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
"""
PEOPLE = (
    "Ana Luis Eva Juan Rosa Hugo Pablo Lola Bruno Clara Diego Nuria Sara Vera Marta Pedro Irene Gil Óscar Leo"
)
THINGS = (
    "casa libro gato flor tren mapa luna pan taza reloj llave barco nube perro mesa pera zapato vela pez arco"
)
ANSWERS = {
    f"¿Qué tiene {person}?": f"Un {thing}."
    for person, thing in zip(PEOPLE.split(), THINGS.split(), strict=True)
}


def typed(tool: str, folder: Path, changes: str = "") -> None:
    """The command of docs/model.md that begins with these words, in `folder`; `changes`: flags with other values."""
    rows = (ROOT / "docs/model.md").read_text(encoding="utf-8").splitlines()
    (command,) = [row.split("`")[-2] for row in rows if row.startswith("| ") and f"`{tool} " in row]
    words = [word.replace("examples/", f"{ROOT}/examples/") for word in shlex.split(command)]
    given = changes.split()
    for flag, value in zip(given[::2], given[1::2], strict=True):
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    environment = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [Path(sys.executable).with_name(words[0]), *words[1:]],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def exported(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of a few steps; beside it the tools work."""
    folder = tmp_path_factory.mktemp("tools")
    (trainer,) = complete(start(folder, corpus, 1, "--seq-len 128 --steps 20"))
    export.export_checkpoint(export.newest(trainer.run_dir, print), folder / "exported")
    return folder / "exported"


def test_trl_teaches_it_to_answer_and_llama_cpp_answers_the_same(exported: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = exported.parent
    (folder / "dialogues").mkdir()
    asked = {question: [{"role": "user", "content": question}] for question in ANSWERS}
    with (folder / "dialogues/train.jsonl").open("w", encoding="utf-8") as file:
        for question, answer in ANSWERS.items():
            messages = [*asked[question], {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    quickly = "--learning_rate 5e-3 --num_train_epochs 200 --warmup_steps 10 --per_device_train_batch_size 20"
    typed("trl sft", folder, f"{quickly} --use_cpu true --bf16 false --save_strategy no --report_to none")

    tokenizer = AutoTokenizer.from_pretrained(folder / "tuned")
    model = AutoModelForCausalLM.from_pretrained(folder / "tuned", dtype=torch.float32)
    said: dict[str, list[int]] = {}
    for question, answer in ANSWERS.items():
        ids = tokenizer.apply_chat_template(
            asked[question], add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        made = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
        assert made[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(made, skip_special_tokens=True) == answer
        said[question] = made

    typed("aura export", folder)
    llama = Llama(folder / "gguf/model-Q8_0.gguf")
    for question, answer in ANSWERS.items():
        prompt = llama.ask("apply-template", messages=asked[question])["prompt"]
        of_it: dict[str, Any] = {"prompt": prompt, "n_predict": 40, "temperature": 0, "return_tokens": True}
        assert llama.ask("completion", **of_it)["tokens"] == said[question]
        spoken = llama.ask("v1/chat/completions", messages=asked[question], temperature=0, max_tokens=40)
        assert spoken["choices"][0]["message"]["content"] == answer
        assert spoken["choices"][0]["finish_reason"] == "stop"


def test_lm_eval_finds_what_the_model_computes(exported: Path) -> None:
    folder, words = exported.parent, ["perro", "casa", "red", "modelo"]
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "last_word.yaml").write_text(TASK.format(data=tasks / "words.jsonl"))
    texts = [f"El nodo aprende con datos y {word}" for word in ("la", "una", "los", "en la")]
    lines = [json.dumps({"text": text, "word": word}) for text, word in zip(texts, words, strict=True)]
    (tasks / "words.jsonl").write_text("\n".join(lines), encoding="utf-8")
    own = f"--tasks last_word --include_path {tasks} --device cpu --output_path {folder}/results.json"
    typed("lm_eval", folder, own)
    (file,) = folder.glob("results*.json")
    found = json.loads(file.read_text())["results"]["last_word"]

    trained = sample.load(exported)
    begin, nats = trained.id_of("bos_token"), 0.0
    assert begin is not None
    for text, word in zip(texts, words, strict=True):
        given, whole = (trained.tokenizer.encode(words).ids for words in (text, f"{text} {word}"))
        with torch.no_grad():
            logits = trained.model(torch.tensor([[begin, *whole]]))[0, len(given) : -1]
        nats -= (
            torch.log_softmax(logits, 1).gather(1, torch.tensor(whole[len(given) :])[:, None]).sum().item()
        )
    assert found["perplexity,none"] == pytest.approx(math.exp(nats / len(words)), rel=1e-4)
