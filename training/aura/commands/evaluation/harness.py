"""Runs in the harness's own environment (../environment.py), so that nothing of aura is imported here.

Reads from standard input what is asked for: `model` (a directory that transformers loads), `tasks`, `include` (a
directory with tasks of one's own, or null), `limit` (examples of each task, or null), `batch_size`, `device` (or null).
Writes to the file that it is called with either `unknown` (names that are no tasks, each with similar ones) or
`version` and `tasks`: for each `metric`, `value`, `error` (one standard error), `chance` (what guessing gives; null
where nothing can be guessed), `examples` and `limit`.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def main() -> None:
    asked, output = json.load(sys.stdin), Path(sys.argv[1])
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=asked["include"])
    names = known.all_tasks
    if unknown := [name for name in asked["tasks"] if name not in names]:
        near = {name: difflib.get_close_matches(name, names, 4) for name in unknown}
        output.write_text(json.dumps({"unknown": near}), encoding="utf-8")
        return
    import torch
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model="hf",
        # Every text that the model has learnt from begins behind the end of another.
        model_args={"pretrained": asked["model"], "add_bos_token": True, "dtype": "auto"},
        tasks=asked["tasks"],
        task_manager=known,
        device=asked["device"] or ("cuda" if torch.cuda.is_available() else "cpu"),
        **{name: asked[name] for name in ("limit", "batch_size")},
        log_samples=True,
    )
    order = {name: place for place, name in enumerate(asked["tasks"])}  # tasks of a tag come last
    scored_ones = sorted(scored(found), key=lambda name: order.get(name, len(order)))
    rows = {name: row_of(found, name) | {"limit": asked["limit"]} for name in scored_ones}
    content = {"version": found["lm_eval_version"], "tasks": rows}
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def scored(found: Mapping[str, Any]) -> list[str]:
    """Groups that have a figure of their own, and tasks that are in none of those."""
    with_figure = [name for name, values in found["results"].items() if any("," in key for key in values)]
    parts = {part for name in with_figure for part in found["group_subtasks"].get(name, ())}
    return [name for name in with_figure if name not in parts]


def row_of(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    values: dict[str, float] = {}
    for key, value in found["results"][name].items():
        if "," in key and isinstance(value, float | int):
            values.setdefault(key.partition(",")[0], value)  # of several filters the first
    samples = [sample for task in tasks_of(found, name) for sample in found["samples"][task]]
    chances = list(chances_of(samples))
    # Divided by the length of an answer, unless whole sentences are compared: those are given no beginning.
    begun = any(sample["arguments"][0][0] for sample in samples)
    order = ("acc_norm", "acc") if begun else ("acc",)
    metric = next((metric for metric in order if metric in values), next(iter(values)))
    return {
        "metric": metric,
        "value": values[metric],
        "error": values.get(f"{metric}_stderr"),
        "chance": sum(chances) / len(chances) if chances and metric in order else None,
        "examples": sum(found["n-samples"][task]["effective"] for task in tasks_of(found, name)),
    }


def tasks_of(found: Mapping[str, Any], name: str) -> Iterator[str]:
    if name in found["samples"]:
        yield name
    for part in found["group_subtasks"].get(name, ()):
        yield from tasks_of(found, part)


def chances_of(samples: list[dict[str, Any]]) -> Iterator[float]:
    """Of each example that has several answers to choose from."""
    for sample in samples:
        if all(len(request) == 2 and isinstance(request[1], str) for request in sample["arguments"]):
            answers = {answer for _, answer in sample["arguments"]}
            if len(answers) > 1:
                yield 1 / len(answers)


if __name__ == "__main__":
    main()
