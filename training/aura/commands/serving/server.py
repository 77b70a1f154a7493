"""Runs in an environment of its own (../environment.py), so that nothing of aura is imported here.

llama.cpp's server as the wheel xllamacpp has it, for loopback only. Called with the file, the port and what the model
is called there. It ends with SIGTERM, and when nobody holds its standard input any more.
"""

from __future__ import annotations

import sys

import xllamacpp


def main() -> None:
    file, port, name = sys.argv[1:]
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.model_alias = file, {name}
    parameters.hostnames, parameters.port = ["127.0.0.1"], int(port)
    parameters.n_parallel = 1  # else several answers at once would share the context
    parameters.verbosity = 1  # errors
    server = xllamacpp.Server(parameters)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
