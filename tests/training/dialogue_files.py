"""Dialogues for tests, and what `aura tune` makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aura.commands import cli
from aura.corpus.corpus import Corpus, read_corpus
from aura.errors import EXIT_OK

SEQ_LEN = 128
BASE = f"--seq-len {SEQ_LEN} --steps 20"  # of the run `base` (conftest.py), whatever follows trainers.TINY


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


def prepared(base: Path, folder: Path, records: list[Any], *words: str, code: int = EXIT_OK) -> Corpus:
    """What is there when the command has ended with `code`."""
    data = written(folder, records)
    command = ["tune", str(base), "--data", str(data), "--only-prepare", "--corpus", str(folder / "corpus")]
    assert cli.main([*command, *words]) == code
    return read_corpus(folder / "corpus")
