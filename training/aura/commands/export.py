"""`aura export`: write a trained model for transformers."""

from __future__ import annotations

from pathlib import Path

from aura.commands.named import model_named
from aura.errors import Parser
from aura.model.export import export_checkpoint
from aura.model.gguf_file import FORMATS
from aura.storage.address import place


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura export",
        description="Write a trained model as transformers' AutoModelForCausalLM and AutoTokenizer read it.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="take the newest checkpoint of this run (or its name in runs/)",
    )
    which.add_argument(
        "--checkpoint", type=place, metavar="DIR", help="take this checkpoint, also one of s3://…"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory to write")
    parser.add_argument(
        "--gguf",
        nargs="+",
        type=str.upper,
        choices=FORMATS,
        default=[],
        metavar="FORMAT",
        help=f"for llama.cpp and ollama also a file in each of these formats: {', '.join(FORMATS)}",
    )
    arguments = parser.parse_args(argv)
    path = model_named(arguments.checkpoint or arguments.run_dir).path
    export_checkpoint(path, arguments.output, arguments.gguf)
    print(f"{path} -> {arguments.output}")
    return 0
