"""What launch.yml and prepare.yml make of -e before any node is touched."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tree
from plays import played

request = tree.plugin("filter/run_request")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "books").mkdir()
    (tmp_path / "one.txt").touch()
    (tmp_path / "tokenizer.json").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "No text was named.\nName a file or a directory"),
        ({"text": "no.txt"}, "/no.txt on this machine.\nName a file or a directory"),
        ({"text": "books", "dataset": "c4"}, "Both a text and a dataset were named."),
        ({"text": "books", "corpus": "s3://data/es"}, "s3://data/es is no corpus of the nodes"),
        ({"text": "books", "corpus": "mis libros"}, "corpus=mis libros is no name"),
        ({"text": "books", "corpus": "../es"}, "corpus=../es is no name"),
        ({"text": "books", "tokenizer": "./no.json"}, "There is no tokenizer "),
        ({"text": "books", "tokenizer": "~/mine"}, "There is no tokenizer "),
    ],
)  # fmt: skip
def test_what_cannot_be_prepared_is_refused(here: Path, given: dict[str, Any], sentence: str) -> None:
    assert sentence in request.prepare_request(given, str(here))["problem"]


@pytest.mark.parametrize(
    ("name", "leads_to", "sentence"),
    [
        ("again", ".", "books is in .*/books twice, through a link"),
        ("best", "2020", "books/2020 is in .*/books twice, through a link"),
        ("gone", "../nowhere", "books/gone is a link that leads nowhere"),
        ("more", "../more", ""),
    ],
)
def test_links_in_a_text_are_followed_or_refused(here: Path, name: str, leads_to: str, sentence: str) -> None:
    for folder in ("books/2020", "more"):
        (here / folder).mkdir()
        (here / folder / "es.txt").touch()
    (here / "books" / name).symlink_to(leads_to)
    said = request.prepare_request({"text": "books"}, str(here))["problem"]
    assert re.search(sentence, said) if sentence else said == ""


def test_what_is_on_this_machine_is_copied_and_all_else_is_an_option(here: Path) -> None:
    given = {"text": "books", "tokenizer": "tokenizer.json", "workers": 2, "documents_per_line": "true"}
    given["accept_lossy_tokenizer"] = "true"
    said = request.prepare_request(given, str(here))
    assert said == {
        "problem": "", "text": f"{here}/books/", "dataset": [], "tokenizer": f"{here}/tokenizer.json",
        "options": ["--workers=2", "--documents-per-line", "--accept-lossy-tokenizer"],
    }  # fmt: skip
    for elsewhere in ("gpt2", "/opt/tokenizer.json"):  # of the hub, and of the first node
        said = request.prepare_request({"dataset": "c4", "tokenizer": elsewhere}, str(here))
        assert (said["problem"], said["options"]) == ("", [f"--tokenizer={elsewhere}"])


@pytest.mark.parametrize(
    ("named", "dataset"),
    [
        ("wikipedia", ["wikipedia"]),
        ("/srv/my texts", ["/srv/my texts"]),
        ("fineweb2-es=0.7  fineweb-edu:10BT=0.3", ["fineweb2-es=0.7", "fineweb-edu:10BT=0.3"]),
        ("", []),
    ],
)
def test_a_mixture_comes_in_its_parts(here: Path, named: str, dataset: list[str]) -> None:
    given = {"dataset": named, "dataset_split": "train"}
    said = request.prepare_request(given, str(here))
    assert (said["dataset"], said["options"]) == (dataset, ["--dataset-split=train"])
    assert bool(said["problem"]) == (not dataset)
    assert request.preset_settings(given) == {}


@pytest.mark.parametrize(
    ("words", "dataset"),
    [
        (["dataset=fineweb2-es=0.7 c4=0.3", "lr=1e-4"], "fineweb2-es=0.7 c4=0.3"),
        (["dataset=wikipedia lr=1e-4"], "wikipedia"),
    ],
)
def test_a_mixture_arrives_as_it_was_typed(tmp_path: Path, words: list[str], dataset: str) -> None:
    """Ansible would cut it at the first blank, and c4 would be no setting of a preset (test_script.py has more
    ways to type it)."""
    content = "{{ [request_extra_vars.dataset, request_overrides, request_config.lr] | to_json }}"
    play = {
        "hosts": "localhost", "gather_facts": False, "vars_files": f"{tree.ROOT}/playbooks/vars/request.yml",
        "vars": {"cluster_root": str(tree.ROOT)},
        "tasks": [
            {"ansible.builtin.import_tasks": f"{tree.ROOT}/playbooks/tasks/read_request.yml"},
            {"ansible.builtin.copy": {"content": content, "dest": "{{ playbook_dir }}/given.json"}},
        ],
    }  # fmt: skip
    done = played(tmp_path, [play], {}, *(option for word in words for option in ("-e", word)))
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "given.json").read_text()) == [dataset, {"lr": "1e-4"}, 1e-4]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"preset": "gpt2-nano", "runtime": "docker", "image": "mine:1"}, ""),
        ({"script": "train.py"}, "A script: ansible-playbook launch.yml -e script=…"),
        ({"preset": "gpt2", "join": "true"}, "playbooks/stop.yml, then launch again"),
        ({"run": "mine-2.b", "corpus": "es_1"}, ""),
        ({"run": "mi corrida"}, "run=mi corrida is no name"),
        ({"run": "a/b"}, "run=a/b is no name"),
        ({"run": ""}, "run= is no name"),
        ({"run": ".hidden"}, "run=.hidden is no name"),
        ({"corpus": "a b"}, "corpus=a b is no name"),
        ({"corpus": "s3://bucket/corpora/es"}, ""),
        ({"preset": "auto", "hours": "24"}, ""),
        ({"preset": "auto", "hours": "a day"}, "hours=a day is no number of hours above 0"),
        ({"preset": "auto", "hours": "0"}, "hours=0 is no number"),
        ({"preset": "gpt2", "hours": 24}, "sizes the model of -e preset=auto"),
        ({"runtime": "podman"}, "There is no runtime podman"),
        ({"image": "mine"}, "of use with -e runtime=docker only"),
        ({"runtime": "docker", "image": "sha256:0f1e"}, "named by a digest (sha256:0f1e)"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched_is_refused(given: dict[str, Any], sentence: str) -> None:
    said = request.launch_problem(given)
    assert sentence in said if sentence else said == ""


def test_what_is_nobodys_own_is_a_setting() -> None:
    given = {"preset": "gpt2-nano", "lr": "1e-4", "workers": 2, "trainer_threads": 1, "image": "mine"}
    assert request.preset_settings(given, "runtime", "image") == {"lr": "1e-4"}
    assert request.preset_settings(given) == {"lr": "1e-4", "image": "mine"}
