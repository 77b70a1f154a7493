"""Which token ids llama.cpp makes of texts, where its wheel `xllamacpp` is installed beside aura.

The second half runs as a program of its own, since llama.cpp ends the process in which it meets a fault.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit


def is_installed() -> bool:
    return find_spec("xllamacpp") is not None


def token_ids(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """`file`: GGUF. What is written like a special token is text. Raises ValueError, with llama.cpp's last line, where
    it does not read the file."""
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps([str(file), list(texts)]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [str(done.returncode)])[-1])
    ids: list[list[int]] = json.loads(done.stdout)
    return ids


def main() -> None:
    import xllamacpp

    file, texts = json.loads(Path("/dev/stdin").read_bytes())
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.hostnames, parameters.port = ["127.0.0.1"], 0
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 64, 1, False
    parameters.n_gpu_layers, parameters.verbosity = 0, 1  # on the processor; errors
    server = xllamacpp.Server(parameters)
    connection = http.client.HTTPConnection(urlsplit(server.listening_address).netloc)
    found = []
    for text in texts:
        asked = json.dumps({"content": text, "add_special": False, "parse_special": False})
        connection.request("POST", "/tokenize", asked, {"Content-Type": "application/json"})
        found.append(json.loads(connection.getresponse().read())["tokens"])
    Path("/dev/stdout").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # on a busy machine the server has waited for its own threads for ever


if __name__ == "__main__":
    main()
