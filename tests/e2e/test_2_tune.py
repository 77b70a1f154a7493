"""From a text to a model that answers, by the README's commands."""

from __future__ import annotations

import json
from pathlib import Path

from lab_cluster import NODES, Cluster

PEOPLE = "Ana Luis Eva Juan Rosa Hugo Pablo Lola Bruno Clara Diego Nuria".split()
THINGS = "casa libro gato flor tren mapa luna pan taza reloj llave barco".split()


def test_the_model_of_the_demo_learns_to_answer(cluster: Cluster, tmp_path: Path) -> None:
    data = tmp_path / "dialogues.jsonl"
    pairs = dict(zip(PEOPLE, THINGS, strict=True))
    dialogues = (
        {"prompt": f"¿Qué tiene {person}?", "completion": f"Tiene: {thing}."}
        for person, thing in pairs.items()
    )
    data.write_text(
        "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in dialogues), encoding="utf-8"
    )
    said = cluster.refused("launch.yml", "-e", "tune=nobody", "-e", f"data={data}")
    assert "No node that takes part has a checkpoint of a run nobody" in " ".join(said.split())

    words = ("-e", "tune=gpt2-nano", "-e", f"data={data}", "-e", "validation_fraction=0")
    said = cluster.ansible("launch.yml", *words, "-e", "epochs=60", "-e", "lr=3e-3", "-e", "wait=true")
    assert "12 dialogues to learn from" in said
    done = cluster.done("gpt2-nano-tuned")
    assert len(done) == len(NODES)
    assert len({each["parameters_checksum"] for each in done}) == 1
    for person in ("Ana", "Nuria"):
        chat = "/opt/aura/current/venv/bin/aura chat --temperature 0 --ask"
        answer = cluster.sh("node0", f"{chat} '¿Qué tiene {person}?' /var/lib/aura/runs/gpt2-nano-tuned")
        assert answer.strip() == f"Tiene: {pairs[person]}."
