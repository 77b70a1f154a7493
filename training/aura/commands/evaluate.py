"""`aura evaluate`: what models can do, by the tasks of EleutherAI's lm-evaluation-harness (evaluation/)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aura.checkpoint.manifest import step_of
from aura.commands.environment import Environment
from aura.commands.named import Model, model_named
from aura.durable import write_atomically
from aura.errors import ConfigError, DataError, Parser
from aura.model import export
from aura.texts.console import print_table, text

# Those whose answers are texts: a small model's choice between letters is chance.
SPANISH = (
    *("multiblimp_spa", "global_piqa_nonparallel_cloze_spa_latn_spai", "xstorycloze_es", "copa_es"),
    *("hellaswag_es", "arc_es", "openbookqa_es", "lambada_openai_mt_es"),
)
ENGLISH = ("hellaswag", "arc_easy", "piqa", "sciq", "lambada_openai", "blimp")
SETS = {"spanish": SPANISH, "english": ENGLISH}
RESULT, CURVES = "evaluation.json", "tensorboard"  # in a run's directory
HARNESS = Path(__file__).parent / "evaluation/harness.py"  # what runs in its own environment
ENVIRONMENT = Environment(
    "evaluate", "lm-evaluation-harness", 700, HARNESS.with_name("requirements.txt"), on_trainer=True
)


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura evaluate",
        description="Try models on the tasks of lm-evaluation-harness, which is installed when it is first asked for.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a run, a checkpoint, or what aura export has written",
    )
    sets = ", ".join(f"{name} ({len(tasks)} tasks)" for name, tasks in SETS.items())
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["spanish"],
        metavar="TASK",
        help=f"the harness's names, or {sets}; spanish",
    )
    parser.add_argument(
        "--include", type=Path, metavar="DIR", help="with tasks of your own, as the harness reads them"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="take N examples of each task only")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="texts at once (8)")
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, cuda, cuda:1 … (the first GPU, if there is one)"
    )
    arguments = parser.parse_args(argv)
    for name, value in (("limit", arguments.limit), ("batch-size", arguments.batch_size)):
        if value is not None and value < 1:
            raise ConfigError("at_least", name=name, value=value, least=1)
    if arguments.include and not arguments.include.is_dir():
        raise ConfigError("evaluate_no_directory", path=arguments.include)
    tasks = list(dict.fromkeys(task for name in arguments.tasks for task in SETS.get(name, (name,))))
    asked = {
        **{"tasks": tasks, "limit": arguments.limit, "batch_size": arguments.batch_size},
        **{"device": arguments.device, "include": arguments.include and str(arguments.include)},
    }
    models = find(arguments.runs)
    interpreter = ENVIRONMENT.python()
    found: dict[str, dict[str, Any]] = {}
    try:
        for name, model in models.items():
            with exported(model) as path:
                result = evaluate(interpreter, name, asked | {"model": str(path)})
            found[name] = result["tasks"]
            keep(model, result)
    finally:  # those before one that failed
        if found:
            print_table([[text("evaluate_task"), *found, text("evaluate_chance"), ""], *_rows(found)])
            print(text("evaluate_footnote"))
    return 0


def find(paths: Sequence[Path]) -> dict[str, Model]:
    """All of them by what the table calls them, before any is tried. Raises ConfigError where one is no model, and
    DataError."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return {name: model_named(path) for name, path in zip(names, paths, strict=True)}


@contextmanager
def exported(model: Model) -> Iterator[Path]:
    """As transformers loads it. Raises DataError."""
    if export.is_exported(model.path):
        yield model.path
        return
    with tempfile.TemporaryDirectory(prefix="aura-evaluate-") as folder:
        export.export_checkpoint(model.path, target := Path(folder, "model"))
        yield target


def evaluate(interpreter: Path, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What harness.py answers; `name` is for a sentence. Raises ConfigError, DataError."""
    with tempfile.TemporaryDirectory(prefix="aura-evaluate-") as folder:
        output = Path(folder, "result.json")
        command: list[str | Path] = [interpreter, "-I", HARNESS, output]
        done = subprocess.run(
            command, input=json.dumps(asked), text=True, stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode or not output.exists():
            raise DataError("evaluate_failed", model=name, code=done.returncode)
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    for task, near in result.get("unknown", {}).items():
        raise ConfigError("evaluate_no_task", name=task, near=", ".join(near) or text("unknown"))
    return result


def keep(model: Model, result: dict[str, Any]) -> None:
    """In the directory of a run, beside what other tasks have said about the same checkpoint, and in its curves."""
    if not model.run:
        return
    file, name = model.run / RESULT, model.path.name
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        others = before["tasks"] if before["model"] == name else {}
    except (OSError, ValueError, LookupError, TypeError):
        others = {}
    try:
        write_atomically(file, {"model": name, **result, "tasks": others | result["tasks"]})
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(model.run / CURVES) as board:
            for task, row in result["tasks"].items():
                board.add_scalar(f"Evaluation/{task}", row["value"], step_of(model.path))
    except OSError as error:
        print(text("evaluate_not_kept", path=file, error=error))


def _rows(found: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    tasks = list(dict.fromkeys(task for rows in found.values() for task in rows))
    for task in tasks:
        of_models = [rows.get(task) for rows in found.values()]
        first = next(row for row in of_models if row)
        chance = "-" if first["chance"] is None else f"{first['chance']:.3f}"
        about = text("evaluate_about", metric=first["metric"], examples=first["examples"])
        yield [task, *(_figure(row) for row in of_models), chance, about]


def _figure(row: dict[str, Any] | None) -> str:
    if row is None:
        return text("unknown")
    error = row["error"]
    return f"{row['value']:.3f}" + (f" ± {error:.3f}" if isinstance(error, float) else "")
