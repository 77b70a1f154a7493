"""A program at a terminal of its own, as a shell's, where a person answers."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of site.yml and bootstrap.yml, and of -k and -K.
PROMPTS = (b"] ", b"] \r\n", b"(yes/no):", b"(yes/no):\r\n", b"assword: ", b"password]: ")


def at_a_terminal(
    words: list[str], typed: list[str], limit: float = 120, /, **environment: str
) -> tuple[int, str]:
    """How it ends where this is typed at its prompts (which end as PROMPTS do), or without a terminal (nothing typed);
    what it says, on one line. limit: seconds."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *words] if typed else words, stdin=its if typed else subprocess.DEVNULL,
        stdout=its, stderr=its, cwd=ROOT, env=os.environ | {"NO_COLOR": "1", "COLUMNS": "400"} | environment,
    )  # fmt: skip
    os.close(its)
    text, waiting, deadline = b"", list(typed), time.monotonic() + limit
    try:
        while time.monotonic() < deadline:
            # What is typed before the prompt reads is lost: it reads when nothing more is said.
            if select.select([ours], [], [], 1)[0]:
                try:
                    text += os.read(ours, 65536)
                except OSError:  # the last one that had the other end is gone
                    break
            elif text.endswith(PROMPTS) and waiting:
                os.write(ours, f"{waiting.pop(0)}\r".encode())
        process.wait(timeout=60)
    finally:
        process.kill()
        os.close(ours)
    return process.returncode, " ".join(text.decode().split())
