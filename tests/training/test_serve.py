"""`aura serve`: llama.cpp's server on loopback, with the model of a run, and nothing left behind when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from aura.checkpoint import manifest
from aura.commands import cli, serve
from aura.commands.environment import Environment
from aura.corpus.corpus import Corpus
from aura.errors import EXIT_DATA, EXIT_USAGE
from aura.model import export
from by_heart import ANSWERS, QUESTIONS, tuned_run
from conftest import Aura
from ports import free_port
from services import asked, listens, wait_until
from trainers import FORK, Command, Trainer, complete, speak_into, start

# In place of llama-server: it answers, and notes what it was called with.
STAND_IN = f"""#!{sys.executable}
import http.server, json, pathlib, sys
words = sys.argv[1:]
pathlib.Path(__file__).with_name("called").write_text(json.dumps(words))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


class Served(Command):
    def __init__(self, output: Path, *words: str) -> None:
        self.port = free_port()
        super().__init__(output, "serve", *words, "--port", str(self.port))

    def ask(self, path: str, **what: Any) -> Any:
        return asked(f"127.0.0.1:{self.port}", path, **what)

    def ended_by(self, number: signal.Signals) -> int:
        """The exit code; the server that it had started is gone."""
        (child,) = psutil.Process(self.pid).children()
        os.kill(self.pid, number)
        code = self.end()
        wait_until(
            lambda: not child.is_running() and not listens(self.port), 20, lambda: "the server is there"
        )
        return code


Serve = Callable[..., Served]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of these tests has xllamacpp, of the same version."""
    monkeypatch.setenv(serve.ENVIRONMENT.variable, str(tmp_path / "environments"))
    monkeypatch.setenv("PATH", os.defpath)  # where no llama-server is
    _, folder = serve.ENVIRONMENT.folder()
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin/python").chmod(0o755)
    (folder / "complete").touch()


@pytest.fixture
def served(command: Serve) -> Serve:
    return partial(command, kind=Served)


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned_run(tmp_path_factory.mktemp("serve") / "Answers", corpus)


@pytest.mark.usefixtures("environment")
def test_a_tuned_run_answers(run: Path, served: Serve, tmp_path: Path) -> None:
    server = served(str(run))
    server.says("ollama create answers -f")
    for said in (
        f"Answers answers at http://127.0.0.1:{server.port}",
        f'base_url="http://127.0.0.1:{server.port}/v1"',
        f"ssh -L {server.port}:127.0.0.1:{server.port} ",
    ):
        assert said in server.text
    assert "was never tuned" not in server.text
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    said = server.ask("/v1/chat/completions", messages=messages, temperature=0, max_tokens=60)
    assert said["choices"][0]["message"]["content"] == ANSWERS[0]
    assert said["choices"][0]["finish_reason"] == "stop"
    assert said["model"] == "Answers"
    modelfile = (run / "served/Modelfile").read_text()
    assert 'PARAMETER stop "<|im_end|>"' in modelfile and "FROM ./model-Q8_0.gguf" in modelfile
    assert (connections := psutil.Process(server.pid).children()[0].net_connections())
    assert {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    # Who comes second is told so, and harms nobody.
    assert cli.main(["serve", str(run), "--port", str(server.port)]) == EXIT_USAGE
    assert server.ended_by(signal.SIGTERM) == 0

    # What was written once serves until there is another checkpoint, also where that is no newer one.
    file = run / "served" / "model-Q8_0.gguf"
    before = file.stat()
    server = served(str(run))
    server.says("ollama create")
    assert "Writing" not in server.text and file.stat().st_ino == before.st_ino
    assert server.ended_by(signal.SIGINT) == 0
    content = run / "checkpoints/checkpoint-step-80" / manifest.MANIFEST
    os.utime(content, ns=(before.st_mtime_ns - 10**9,) * 2)
    server = served("--checkpoint", str(content.parent), "--output", str(run / "served"))
    server.says("ollama create")
    assert "Writing" in server.text and file.stat().st_ino != before.st_ino
    assert server.ended_by(signal.SIGHUP) == 0


@pytest.mark.usefixtures("environment")
def test_an_untuned_model_goes_on_with_a_text(
    reference: list[Trainer], served: Serve, tmp_path: Path
) -> None:
    shutil.copytree(reference[0].run_dir, tmp_path / "run")
    server = served(str(tmp_path / "run"))
    server.says("ollama create")
    assert "run was never tuned" in server.text and "/v1/completions" in server.text
    said = server.ask("/v1/completions", prompt="El perro", max_tokens=5, temperature=0)
    assert said["usage"]["completion_tokens"] == 5
    assert "{{ .Prompt }}" in (tmp_path / "run/served/Modelfile").read_text()
    assert server.ended_by(signal.SIGTERM) == 0


def test_a_llama_server_of_the_machine_is_taken(
    run: Path, served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / serve.PROGRAM
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    export.export_checkpoint(run / "checkpoints/checkpoint-step-80", tmp_path / "exported", ["F16"])
    monkeypatch.setenv("PATH", f"{program.parent}:{os.defpath}")
    for words in ([], ["--server", str(program)]):
        server = served("--checkpoint", str(tmp_path / "exported"), *words)
        server.says("ollama create")
        called = json.loads(program.with_name("called").read_text())
        assert called[called.index("--model") + 1] == str(tmp_path / "exported/model-F16.gguf")
        assert called[called.index("--host") + 1] == "127.0.0.1"
        assert server.ended_by(signal.SIGTERM) == 0
        monkeypatch.setenv("PATH", os.defpath)


def test_what_cannot_be_served_is_a_sentence(
    run: Path, corpus: Corpus, tmp_path: Path, served: Serve, aura_says: Aura, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(serve.ENVIRONMENT.variable, str(tmp_path / "none"))
    export.export_checkpoint(run / "checkpoints/checkpoint-step-80", tmp_path / "exported")
    (other,) = complete(start(tmp_path / "hrm", corpus, 1, "--family hrm-text --layers 2"))
    for words, sentence in (
        ([str(run), "--port", "70000"], "--port 70000 is no port"),
        ([str(run), "--server", str(tmp_path / "x")], "is no program that can be run"),
        (["--checkpoint", str(tmp_path / "exported")], "has no model-Q8_0.gguf"),
        ([str(other.run_dir)], "llama.cpp has no model of family=hrm-text"),
    ):
        assert sentence in aura_says("serve", *words, code=EXIT_USAGE)
    server = served(str(run), "--server", "false")
    assert server.end() == EXIT_DATA and "has ended by itself (exit code 1)" in server.text
    assert not (tmp_path / "none").exists()


def test_two_that_make_an_environment_at_the_same_time_make_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AURA_NOTHING_IN", str(tmp_path / "environments"))
    (tmp_path / "requirements.txt").touch()
    environment = Environment("nothing", "nothing", 1, tmp_path / "requirements.txt")

    def make(output: Path) -> None:
        speak_into(output)
        raise SystemExit(environment.python() != tmp_path / environment.folder()[1] / "bin/python")

    outputs = [tmp_path / "first.txt", tmp_path / "second.txt"]
    processes = [FORK.Process(target=make, args=(output,)) for output in outputs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    said = "".join(output.read_text() for output in outputs)
    assert said.count("Installing nothing, once, in ") == 1, said
    assert environment.python().is_file()
