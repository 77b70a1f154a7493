"""`aura export`: write a trained model for transformers."""

from __future__ import annotations

from pathlib import Path

from aura.commands.named import add_model, model_asked
from aura.errors import ConfigError, Parser
from aura.model.export import export_again, export_checkpoint, is_exported
from aura.model.gguf_file import FORMATS


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura export",
        description="Write a trained model as transformers' AutoModelForCausalLM and AutoTokenizer read it.",
    )
    add_model(parser, with_flag=True)
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
    path = model_asked(arguments).path
    if not is_exported(path):
        export_checkpoint(path, arguments.output, arguments.gguf)
    elif arguments.gguf:
        export_again(path, arguments.output, arguments.gguf)
    else:
        raise ConfigError("exported_already", path=path)
    print(f"{path} -> {arguments.output}")
    return 0
