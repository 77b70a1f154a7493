"""`aura plan`: the command line of aura/plan/plan.py. Standard library only: a controller can plan."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aura.commands.flags import add_flags, given_settings, number, parse_assignments
from aura.config import AUTO, SAY_THE_SAME, TrainConfig, canonical, resolve
from aura.corpus.corpus import Corpus, check_vocabulary, read_corpus
from aura.errors import ConfigError, Parser
from aura.plan import gpus
from aura.plan.auto import USABLE, Cards, Choice, choose, choose_for, chosen_before
from aura.plan.gpus import Gpu
from aura.plan.memory import GIB
from aura.plan.micro_batch import auto_micro_batch, filled_line
from aura.plan.plan import plan_for
from aura.plan.setting import Decision, cluster_of, decide, exchanging
from aura.plan.shapes import with_vocabulary
from aura.storage.address import Address, place
from aura.texts.console import text


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    overrides = canonical(given_settings(arguments) | parse_assignments(arguments.set))
    gpu, found = _device(arguments.gpu, arguments.peak_tflops, arguments.memory_gb)
    corpus = _described(arguments.corpus) if arguments.corpus else None
    for name in SAY_THE_SAME["length_said_twice"]:
        if arguments.hours and name in overrides:
            raise ConfigError("plan_length_twice", name=name)
    preset = str(overrides.pop("preset", arguments.preset))
    sized, auto = preset == AUTO and arguments.hours, {}
    if preset == AUTO:
        if arguments.hours and arguments.nodes > 1:  # as launch.yml has it
            overrides = {"strategy": "auto", **overrides}
        choice = _choice(arguments, gpu, found, overrides, corpus)
        print(choice.reason, file=sys.stderr)
        preset, overrides = choice.preset, choice.with_these(overrides)
        auto = {"auto": {"preset": preset, "settings": overrides, "reason": choice.reason}}
    config = resolve(preset, overrides)
    if config.epochs and not (arguments.hours or corpus):
        raise ConfigError("plan_epochs_need_corpus", epochs=config.epochs)
    if corpus:
        config = with_vocabulary(config, corpus.vocab_size)
        check_vocabulary(corpus, config.vocab_size, config.preset)
    ranks = arguments.nodes * arguments.ranks_per_node
    asked = config
    config = filled = replace(asked, **auto_micro_batch(asked, [gpu] * ranks))
    decision = _decision(config, [gpu] * ranks, arguments)
    if config.strategy == "auto":
        chosen = decision.chosen if decision else None
        config = chosen.applied_to(config) if chosen else exchanging(config, "fp32", 0.0)
    plan = plan_for(
        config,
        ranks,
        gpu,
        nodes=arguments.nodes,
        link_mbit=arguments.link,
        hours=None if sized else arguments.hours,
        mfu=arguments.mfu,
        corpus_tokens=corpus.tokens["train"] if corpus else None,
    )
    if arguments.json:
        print(json.dumps(plan.as_json() | (decision.as_json() if decision else {}) | auto, indent=2))
    else:
        rows = list(plan.rows())
        width = max(len(name) for name, _ in rows)
        print(*(f"{name:{width}}  {value}" for name, value in rows), *plan.lines()[len(rows) :], sep="\n")
        if filled != asked:
            print(text("plan_note", sentence=filled_line(asked, filled, ranks)))
    if decision and not arguments.json:
        print("\n".join([text("plan_candidates"), *decision.table, decision.reason]))
    return 0


def _choice(
    arguments: argparse.Namespace,
    gpu: Gpu,
    found: list[gpus.Found],
    overrides: dict[str, Any],
    corpus: Corpus | None,
) -> Choice:
    """What the run has begun with; else the model for --hours, or the largest preset that fits."""
    if arguments.run_dir and (before := arguments.run_dir / "config.json").is_file():
        return chosen_before(before)
    if not arguments.hours:
        return choose(found, overrides, corpus)
    ranks = arguments.nodes * arguments.ranks_per_node
    of_a_rank = max((one.free for one in found), default=gpu.memory / arguments.ranks_per_node)
    cards = Cards(
        gpu,
        USABLE * of_a_rank,
        ranks,
        arguments.nodes,
        arguments.link,
        arguments.mfu,
        all(one.has_bf16 for one in found),
    )
    return choose_for(arguments.hours, cards, overrides, corpus)


def _decision(config: TrainConfig, devices: list[Gpu], arguments: argparse.Namespace) -> Decision | None:
    """What strategy=auto would take; None where there is nothing to choose, or not enough is known."""
    if arguments.nodes == 1:
        return None
    cluster = cluster_of(config, devices, arguments.nodes, arguments.link, arguments.mfu)
    return decide(config, cluster) if cluster else None


def _device(name: str | None, tflops: float | None, memory_gb: float | None) -> tuple[Gpu, list[gpus.Found]]:
    """The GPU that is planned for, and what `auto` has to choose by. Without a name: what this machine has."""
    if tflops and memory_gb:
        gpu = gpus.described(name or text("some_gpu"), tflops, memory_gb * GIB)
    elif tflops or memory_gb:
        raise ConfigError("plan_needs_both")
    elif name and name != "cpu":
        gpu = gpus.find(name)
    elif not name and (found := gpus.of_this_machine(partial(print, file=sys.stderr))):
        best = max(found, key=lambda gpu: gpu.free)
        return gpus.called(best.name, best.total), found
    else:
        return gpus.cpu(), []
    capability = gpus.FIRST_WITH_BF16 if gpu.has_bf16 else (7, 5)
    return gpu, [gpus.Found(gpu.name, int(gpu.memory), int(gpu.memory), capability=capability)]


def _parser() -> Parser:
    parser = Parser(
        prog="aura plan",
        description="Predict what a training needs: memory, time, traffic, disk. Nothing is trained.",
    )
    add_flags(parser)
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="SETTING=VALUE", help="replace settings"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="of every rank, such as 3060, or cpu (this machine's best)"
    )
    parser.add_argument("--peak-tflops", type=number, metavar="X", help="of a GPU that is not in the table")
    parser.add_argument("--memory-gb", type=number, metavar="GB", help="of a GPU that is not in the table")
    parser.add_argument(
        "--mfu", type=fraction, metavar="X", help="part of the peak that is reached, such as 0.4"
    )
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="PCs (1)")
    parser.add_argument("--ranks-per-node", type=count, default=1, metavar="K", help="GPUs of each (1)")
    parser.add_argument("--link", type=number, default=1000, metavar="MBIT", help="of each node (1000)")
    parser.add_argument(
        "--corpus", type=place, metavar="DIR", help="its vocabulary, and its length where epochs is above 0"
    )
    parser.add_argument(
        "--hours",
        type=number,
        metavar="H",
        help="length of the run; with --preset auto the model is chosen for it",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="--preset auto: go on with what this run has begun with"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser


def _described(corpus: Path | Address) -> Corpus:
    if isinstance(corpus, Path):
        return read_corpus(corpus)
    from aura.corpus.remote import read

    return read(corpus)


def fraction(word: str) -> float:
    if (value := number(word)) > 1:
        raise argparse.ArgumentTypeError(text("has_to_be_at_most_1", value=word))
    return value


def count(word: str) -> int:
    if (value := number(word)) != int(value):
        raise argparse.ArgumentTypeError(text("has_to_be_whole", value=word))
    return int(value)
