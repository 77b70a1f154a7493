"""The command `aura`: finds the sub-command and hands over. Everything heavy is imported only when it is needed."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aura import __version__
from aura.checkpoint import manifest
from aura.cluster.activity import Activity
from aura.commands.flags import add_flags, given_settings, number
from aura.commands.named import corpus_here
from aura.config import DDP
from aura.errors import EXIT_USAGE, AuraError, ConfigError, Parser, did_you_mean, refusal_of
from aura.plan.auto import resolve_here, take_best_gpu
from aura.run import watchdog
from aura.run.division import read_decisions
from aura.run.runlog import versions
from aura.storage.address import Address, place
from aura.texts.console import put, text

# A command's function is `main` of its module here, but for the two of this one.
COMMANDS = {
    "prepare": "turn text files into a corpus: a tokenizer and files of token ids",
    "train": "train a model, alone or as one rank of several",
    "fetch": "fetch a corpus from s3:// or https:// into a directory",
    "plan": "predict memory, time, traffic and disk of a training, before any training",
    "sample": "continue a text with a trained model",
    "export": "write a trained model for transformers",
    "monitor": "show the load of processor, memory and GPUs every few seconds",
    "notify": "tell a person what runs and GPUs do: Discord, Slack, Telegram, e-mail, ntfy, a webhook",
    "watch": "look after the GPUs of this machine, and end the rank on one that is sick",
    "check-allreduce": "let all ranks add numbers and check the sum",
    "fingerprint": "verify a corpus and print its fingerprint",
    "config": "print a complete training configuration, or what is wrong with it",
    "version": "print the versions of everything that takes part, as JSON",
}
# The others must outlive whoever reads what they print: a training saves, although `| tee` is gone, and a write to a
# rank that is gone is an error of that write.
ANSWERS = ("plan", "sample", "monitor", "fingerprint", "config", "version")
OF_PREPARE = (  # which the guides give to the trainer
    *("--prepare", "--dataset"),
    *("--dataset-name", "--dataset-max-tokens", "--tokenizer-name-or-path", "--tokenizer"),
    *("--validation-split", "--validation-fraction"),
)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] == "--version":
        print(f"aura {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        _print_help()
        return 0 if words else EXIT_USAGE
    command = words[0].replace("_", "-")
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        print(text("no_such_command", word=words[0], hint=hint), file=sys.stderr)
        return EXIT_USAGE
    # `aura plan … | head` ends quietly.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL if command in ANSWERS else signal.SIG_IGN)
    # Names of files need not be UTF-8 (stderr takes them by itself); and whoever reads may be gone.
    with suppress(OSError):
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _function_of(command)(words[1:])
    except (AuraError, OSError) as error:
        refusal = refusal_of(error)
        print(refusal, file=sys.stderr, flush=True)
        return refusal.exit_code
    except KeyboardInterrupt:
        return 130


def _function_of(command: str) -> Callable[[list[str]], int]:
    """Imported only when it is asked for: most commands need no torch, and some nothing but the standard library."""
    if command in (here := {"train": train, "version": version}):
        return here[command]
    return importlib.import_module(f"aura.commands.{command.replace('-', '_')}").main


def _print_help() -> None:
    print("usage: aura COMMAND [ARGUMENTS]\n\nTrain one language model on several ordinary PCs together.\n")
    for name, description in COMMANDS.items():
        print(f"  {name:16} {description}")
    print("\n`aura COMMAND --help` explains one command. `aura --version` prints the version.")


def train(argv: list[str]) -> int:
    """Read the command line and check the configuration; torch is imported only after that."""
    # torch reads it when it is imported: memory in parts that grow has fewer gaps that fit nothing.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    arguments = _train_parser().parse_args(argv)
    run_dir = arguments.run_dir or Path("runs", arguments.preset)
    activity = Activity()
    watchdog.start(activity)  # before torch, which a slow disk takes long to read
    try:
        given = given_settings(arguments)
        if given.get("strategy", "").lower() == DDP:
            put(text("ddp_is_sharded"))
        corpus = corpus_here(arguments.corpus)
        config = resolve_here(arguments.preset, given, corpus, run_dir, put, arguments.hours)
        if corpus.is_file():
            raise ConfigError("corpus_is_a_file", path=corpus, vocab_size=config.vocab_size)
        resume_from = _of_this_run(arguments.resume_from, run_dir)
        if arguments.shares_from and config.balance != "speed":
            raise ConfigError("shares_from_needs_speed", path=arguments.shares_from, balance=config.balance)
        if arguments.shares_from:
            read_decisions(arguments.shares_from)  # what is wrong with it is said before anything is begun
        take_best_gpu(put)
        if arguments.webhook_config and os.environ.get("RANK", "0") == "0":
            from aura.commands.notify import beside

            beside(arguments.webhook_config, run_dir)
    except (AuraError, OSError) as error:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        from aura.run.refusal import refuse

        return refuse(refusal_of(error), run_dir, arguments.join_timeout)

    from aura.run.attempt import run

    log_dir = arguments.log_dir or run_dir / "tensorboard"
    return run(
        config,
        corpus,
        run_dir,
        log_dir,
        arguments.backend,
        arguments.join_timeout,
        resume_from=resume_from,
        activity=activity,
        shares_from=arguments.shares_from,
    )


def _train_parser() -> Parser:
    parser = Parser(
        prog="aura train",
        description="Train a model. Without RANK and WORLD_SIZE in the environment it is one process; with them (and "
        "MASTER_ADDR, MASTER_PORT) it is one rank of several, started by systemd, torchrun or by hand. A run directory "
        "that holds checkpoints is continued. SIGTERM saves and stops.",
        elsewhere={"aura prepare": OF_PREPARE},
    )
    parser.add_argument(
        "--corpus",
        "--dataset-path",
        type=place,
        required=True,
        metavar="DIR",
        help="made by aura prepare; s3://… and https://… are fetched once",
    )
    parser.add_argument(
        "--run-dir", "--output-dir", type=Path, metavar="DIR", help="checkpoints and logs (runs/<preset>)"
    )
    parser.add_argument(
        "--resume-from",
        type=place,
        metavar="DIR",
        help="go on from this checkpoint of the run directory, not from the newest; newer ones are set aside; one of "
        "s3://… is fetched into it",
    )
    parser.add_argument(
        "--shares-from",
        type=Path,
        metavar="FILE",
        help="balance=speed: take the shares of the ranks from the shares.jsonl of another run, and measure nothing",
    )
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="TensorBoard (<run directory>/tensorboard)"
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="how ranks talk (auto: nccl with GPUs inside one node, gloo between nodes)",
    )
    parser.add_argument(
        "--join-timeout",
        type=float,
        default=600,
        metavar="SECONDS",
        help="longest wait for the other ranks (600)",
    )
    parser.add_argument(
        "--webhook-config",
        type=Path,
        metavar="FILE",
        help="tell a person how the run goes, as aura notify does; for a run that is started by hand",
    )
    parser.add_argument(
        "--hours",
        type=number,
        metavar="H",
        help="with --preset auto: model and steps are chosen for so many hours on this machine's GPU",
    )
    parser.add_argument(
        "--use-custom-model", action="store_true", help="accepted, as the guides have it; no effect"
    )
    add_flags(parser)
    return parser


def _of_this_run(checkpoint: Path | Address | None, run_dir: Path) -> Path | None:
    """The checkpoint that is named, in the directory of the run. Raises ConfigError."""
    checkpoints = run_dir / "checkpoints"
    if checkpoint is None:
        return None
    if isinstance(checkpoint, Address):
        from aura.checkpoint.remote import fetch
        from aura.commands.bars import Bars

        with Bars() as bars:
            checkpoint = fetch(checkpoint, checkpoints, bars)
    if checkpoint.resolve().parent != checkpoints.resolve():
        raise ConfigError("checkpoint_elsewhere", path=checkpoint, checkpoints=checkpoints)
    if not checkpoint.is_dir() or not manifest.NAME.fullmatch(checkpoint.name):
        there = sorted(path.name for path in manifest.checkpoints(checkpoints))
        raise ConfigError("no_such_checkpoint", path=checkpoint, names=", ".join(there) or text("none"))
    return checkpoint


def version(argv: list[str]) -> int:
    Parser(prog="aura version", description="Print the versions of everything that takes part.").parse_args(
        argv
    )
    print(json.dumps(versions(), indent=2))
    return 0
