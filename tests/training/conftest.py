"""A small corpus and a small model for all tests of the trainer."""

from __future__ import annotations

import functools
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import aura
import pytest
import torch
from aura.commands import cli
from aura.corpus.corpus import Corpus
from aura.corpus.prepare import build
from aura.corpus.sources import LocalFiles
from aura.corpus.work import Settings
from aura.errors import EXIT_OK
from aura.model import loss
from object_storage import Storage, storage
from trainers import Command, Trainer, complete, start

Aura = Callable[..., str]

WORDS = "el la los un una casa perro red nodo cable datos modelo aprende lee escribe rápido lento cinco y de en con"

# Whatever the locale and the settings of this machine: the tests look for sentences, in processes too.
os.environ |= {
    "AURA_LANG": "en",
    "PYTHONPATH": str(Path(aura.__file__).parents[1]),
    "GLOO_SOCKET_IFNAME": "lo",
}
for _name in (
    *"RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE CC CXX".split(),
    *"CUDA_VISIBLE_DEVICES PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF".split(),
):
    os.environ.pop(_name, None)


# Whom permissions bind, also where the tests run as root; in front of a command.
BOUND = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


def prepare(inputs: list[Path], output: Path, vocab_size: int, validation_fraction: float = 0.01) -> Corpus:
    """Of local files, with a tokenizer that is trained on them, in this process."""
    return build(LocalFiles(inputs), output, Settings(vocab_size, validation_fraction))


def flip_a_bit(path: Path) -> None:
    """In the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def graphs_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For who counts what torch.compile would make kernels of, which takes a C++ compiler half a minute."""
    loss._compiled_differences.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    loss._compiled_differences.cache_clear()


@pytest.fixture
def aura_says(capfd: pytest.CaptureFixture[str]) -> Aura:
    """All that the command says in this process, where it has to end with `code`."""

    def aura_says(*words: str, code: int = EXIT_OK) -> str:
        try:
            ended = cli.main(list(words))
        except SystemExit as exc:
            ended = exc.code  # type: ignore[assignment]
        said = "".join(capfd.readouterr())
        assert ended == code, said
        return said

    return aura_says


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 120 kB in which every word says much about the next."""
    rng = random.Random(0)
    words = WORDS.split()
    followers = {word: rng.sample(words, 3) for word in words}
    paragraphs, word = [], words[0]
    for _ in range(400):
        sentence = []
        for _ in range(60):
            word = rng.choice(followers[word])
            sentence.append(word)
        paragraphs.append(" ".join(sentence).capitalize() + ".")
    file = tmp_path_factory.mktemp("text") / "texto.txt"
    file.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def corpus(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare(
        [text], tmp_path_factory.mktemp("corpus") / "corpus", vocab_size=300, validation_fraction=0.1
    )


@pytest.fixture(scope="session")
def reference(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[Trainer]:
    """20 steps of two ranks without interruption, in the guides' language."""
    return complete(start(tmp_path_factory.mktemp("reference"), corpus, 2, language="es"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "small-disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not possible here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    files = tmp_path_factory.mktemp("storage") / "buckets"
    files.mkdir()
    with storage(files) as there:
        yield there


@pytest.fixture
def bucket(s3_server: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """The empty bucket `data`, and a cache that is empty too."""
    there = s3_server.files / "data"
    there.mkdir()
    for name, value in {**s3_server.environment, "AURA_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    s3_server.settle()
    s3_server.mend()
    yield s3_server
    there.rename(tmp_path / "bucket")


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts a command of ours in a process of its own; what is left of it ends with the test."""
    started: list[Command] = []

    def begin(*words: str, kind: type[Command] = Command) -> Command:
        started.append(kind(tmp_path / f"output-{len(started)}.txt", *words))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
