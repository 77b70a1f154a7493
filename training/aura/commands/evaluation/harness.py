"""Runs in the harness's own environment (environment.py), so that nothing of aura is imported here.

Reads from standard input what is asked for: `model` (a directory that transformers loads), `tasks`, `include` (a
directory with tasks of one's own, or null), `limit` (examples of each task, or null), `batch_size`, `device`. Writes to
the file that it is called with either `unknown` (names that are no tasks, each with similar ones) or `version` and
`tasks`: for each `metric`, `value`, `error` (one standard error), `chance` (what guessing gives; null where nothing can
be guessed) and `examples`.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS = ("acc_norm", "acc")  # the first one that a task has; the former divides by the length of an answer


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
    rows = {name: row_of(found, name) for asked_for in asked["tasks"] for name in scored(found, asked_for)}
    content = {"version": found["lm_eval_version"], "tasks": rows}
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def scored(found: Mapping[str, Any], name: str) -> Iterator[str]:
    """The name itself, or the tasks of a group that has no figure of its own."""
    if any("," in metric for metric in found["results"].get(name, ())):
        yield name
    else:
        for part in found["group_subtasks"].get(name, ()):
            yield from scored(found, part)


def row_of(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    values = {
        metric.partition(",")[0]: value
        for metric, value in found["results"][name].items()
        if "," in metric and isinstance(value, float | int)
    }
    figures = [metric for metric in values if not metric.endswith("_stderr")]
    metric = next((metric for metric in METRICS if metric in values), figures[0])
    chances = [chance for task in tasks_of(found, name) for chance in chances_of(found["samples"][task])]
    return {
        "metric": metric,
        "value": values[metric],
        "error": values.get(f"{metric}_stderr"),
        "chance": sum(chances) / len(chances) if chances and metric in METRICS else None,
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
        answers = len(sample["arguments"])
        if answers > 1 and all(isinstance(answer[0], list | tuple) for answer in sample["resps"]):
            yield 1 / answers


if __name__ == "__main__":
    main()
