"""`aura serve`: a trained model as an address that OpenAI's clients can talk to, by llama.cpp's own server."""

from __future__ import annotations

import errno
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aura.checkpoint.manifest import MANIFEST
from aura.commands.environment import Environment
from aura.commands.flags import check_port
from aura.commands.named import Model, add_model, model_asked
from aura.corpus.special_tokens import is_tuned, settings_of
from aura.errors import ConfigError, DataError, Parser
from aura.model import export, gguf_file
from aura.texts.console import put, text

SERVER = Path(__file__).parent / "serving/server.py"  # what runs in its own environment
ENVIRONMENT = Environment("serve", "llama.cpp (xllamacpp)", 110, SERVER.with_name("requirements.txt"))
PROGRAM = "llama-server"
LOOPBACK = "127.0.0.1"
FORM = "Q8_0"
SERVED = "served"  # in a run's directory
PAUSE = 0.2  # seconds between two looks at whether it answers
GRACE = 10.0  # seconds to end


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura serve",
        description="Let clients of OpenAI's API talk with a trained model, by llama.cpp's server. Ctrl+C ends it.",
    )
    add_model(parser)
    parser.add_argument("--port", type=int, default=8080, metavar="PORT", help="on this machine only (8080)")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help=f"where the GGUF is written (<run directory>/{SERVED})"
    )
    parser.add_argument(
        "--server", metavar="PATH", help=f"this {PROGRAM} (the one on the PATH, else one that is installed)"
    )
    arguments = parser.parse_args(argv)
    check_port("--port", arguments.port)
    if in_use(arguments.port):
        raise ConfigError("serve_port_in_use", port=arguments.port)
    program = shutil.which(arguments.server or PROGRAM)
    if arguments.server and not program:
        raise ConfigError("serve_no_program", path=arguments.server)
    model = model_asked(arguments)
    file = gguf_of(model, arguments.output)
    name = (model.run or model.path).resolve().name
    tuned = is_tuned(settings_of(export.tokenizer_of(model.path).parent))
    if not tuned:
        put(text("serve_untuned", name=name))
    command = command_of(program, file, arguments.port, name)
    return attend(command, arguments.port, lambda: put(_how_to_reach(name, arguments.port, file, tuned)))


def in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError("serve_no_port", port=port, error=error.strerror) from None
            return True
    return False


def gguf_of(model: Model, output: Path | None) -> Path:
    """Written where it is not there, or was written from another checkpoint. Raises ConfigError, DataError."""
    if export.is_exported(model.path):
        names = map(gguf_file.name_of, (FORM, *gguf_file.FORMATS))
        for name in names:
            if (model.path / name).is_file():
                return model.path / name
        raise ConfigError("serve_no_gguf", path=model.path, file=gguf_file.name_of(FORM), form=FORM)
    folder = output or (model.run or export.run_of(model.path)) / SERVED
    file = folder / gguf_file.name_of(FORM)
    # The file has the time of the checkpoint that it was made of.
    written = (model.path / MANIFEST).stat().st_mtime_ns
    if not file.is_file() or file.stat().st_mtime_ns != written:
        put(text("serve_exports", path=model.path, file=file))
        export.export_checkpoint(model.path, folder, [FORM])
        os.utime(file, ns=(written, written))
    return file


def command_of(program: str | None, file: Path, port: int, name: str) -> Sequence[str | Path]:
    """Raises DataError where the environment cannot be made."""
    if program is None:
        return [ENVIRONMENT.python(), "-I", SERVER, file, str(port), name]
    # All of the model's context, for one answer at a time.
    options = ["--parallel", "1", "--ctx-size", "0", "--alias", name]
    return [program, "--model", file, "--host", LOOPBACK, "--port", str(port), *options]


def attend(command: Sequence[str | Path], port: int, say: Callable[[], None]) -> int:
    """The exit code, once somebody ends it; `say` when it answers. Raises DataError where the server ends by itself."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)  # as Ctrl+C
    # In a process group of its own: Ctrl+C in the terminal reaches this process only.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
    try:
        while process.poll() is None and not _answers(port):
            time.sleep(PAUSE)
        if process.poll() is None:
            say()
        raise DataError("serve_ended", code=process.wait())
    except KeyboardInterrupt:
        return 0
    finally:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    """While it still reads the model, it says so, and that is no answer."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _how_to_reach(name: str, port: int, file: Path, tuned: bool) -> str:
    address = f"http://{LOOPBACK}:{port}"
    path, asked = "completions", {"prompt": "El perro", "max_tokens": 50}
    if tuned:
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hola"}]}
    lines = [
        text("serve_answers", name=name, address=address),
        f"    curl {address}/v1/{path} -H 'Content-Type: application/json' -d '{json.dumps(asked)}'",
        text("serve_clients"),
        f'    OpenAI(base_url="{address}/v1", api_key="-")',
        text("serve_elsewhere"),
        f"    ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}",
    ]
    if (modelfile := file.with_name(gguf_file.MODELFILE)).is_file():
        lines += [text("serve_ollama"), f"    ollama create {name.lower()} -f {modelfile}"]
    return "\n".join(lines)
