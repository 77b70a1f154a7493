"""`aura launch-local`: start all ranks of one machine, pass signals on, and wait for the last checkpoint.

What torchrun does otherwise: it kills the ranks 30 seconds after a signal, whether they have saved or not, and it
turns every exit code into 1. Nothing is started again here; the same command continues the run.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from aura.commands.flags import check_port
from aura.errors import EXIT_TEMPORARY, ConfigError, Parser
from aura.texts import console

LOOPBACK = "127.0.0.1"
GRACE = 30.0  # seconds that ranks have to notice by themselves that one has died; the gang needs less than 10
STOP_TIMEOUT = 600.0  # seconds for a checkpoint
PAUSE = 0.1  # seconds between two looks at the ranks


@dataclass
class Ranks:
    """The processes of one launch, rank r at place r."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    received: list[signal.Signals] = field(default_factory=list)  # not yet passed on
    ended_by_us: set[int] = field(default_factory=set)  # these ranks had done nothing wrong

    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def failed(self) -> int | None:
        return next((rank for rank, process in enumerate(self.processes) if process.poll()), None)

    def send(self, number: signal.Signals) -> None:
        for rank in self.running():
            self.processes[rank].send_signal(number)

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    def exit_code(self) -> int:
        """The worst: one that says more than "another rank was lost" before one that says only that."""
        codes = [
            128 - process.returncode if process.returncode < 0 else process.returncode
            for rank, process in enumerate(self.processes)
            if rank not in self.ended_by_us
        ]
        return max(codes, key=lambda code: (code != 0, code != EXIT_TEMPORARY, code))


def supervise(ranks: Ranks, stop_timeout: float) -> int:
    """Wait until all have ended; the exit code. A signal goes to all; when one rank has failed, the time is limited."""
    deadline, last_word = float("inf"), signal.SIGTERM
    asked = failure_seen = False
    while running := ranks.running():
        while ranks.received:
            number = ranks.received.pop(0)
            say(console.text("passing_on", signal=number.name, seconds=stop_timeout))
            ranks.send(signal.SIGTERM if number == signal.SIGHUP else number)
            if not asked:
                asked, deadline, last_word = True, time.monotonic() + stop_timeout, signal.SIGKILL
        failed = ranks.failed()
        if failed is not None and not asked and not failure_seen:
            failure_seen, deadline = True, time.monotonic() + GRACE
            how = _how(ranks.processes[failed].returncode)
            say(console.text("rank_failed", rank=failed, how=how, seconds=GRACE))
        if time.monotonic() > deadline:
            say(console.text("too_late", ranks=", ".join(map(str, running)), signal=last_word.name))
            if not asked:
                ranks.ended_by_us.update(running)
            ranks.send(last_word)
            deadline = time.monotonic() + stop_timeout if last_word == signal.SIGTERM else float("inf")
            last_word = signal.SIGKILL
        time.sleep(PAUSE)
    return ranks.exit_code()


def _how(returncode: int) -> str:
    if returncode < 0:
        return signal.Signals(-returncode).name
    return console.text("exit_code", code=returncode)


def environment_of(rank: int, world_size: int, port: int, threads: int, verbose: bool) -> dict[str, str]:
    """What torchrun would set. A launcher above this one must not be taken for the ranks' own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # All ranks are here: no other interface is needed, and no name has to lead to an address.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if verbose:
        defaults["NCCL_DEBUG"] = "INFO"
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }
    return defaults | inherited | own


def start(command: list[str], environments: list[dict[str, str]], verbose: bool) -> Ranks:
    """In process groups of their own: Ctrl+C in the terminal reaches the launcher only, and each rank once."""
    ranks = Ranks()
    ranks.listen()
    for environment in environments:
        try:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
        except OSError:
            ranks.send(signal.SIGKILL)
            raise
        ranks.processes.append(process)
        if verbose:
            changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
            words = [f"{name}={value}" for name, value in sorted(changed.items())]
            say(f"{' '.join([*words, *command])}  # {process.pid}")
    return ranks


def free_port() -> int:
    """Below the ports that Linux gives to outgoing connections: such a one may be taken before rank 0 listens."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def say(sentence: str) -> None:
    console.put(f"[launch-local] {sentence}")


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura launch-local",
        usage="aura launch-local --gpus N [--script FILE] … -- ARGUMENTS",
        description="Start N ranks on this machine, one per GPU, or N processes on the CPU. What follows `--` goes to "
        "`aura train`, or to the script. Ctrl+C and SIGTERM let all ranks save and stop.",
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks to start")
    parser.add_argument(
        "--script", type=Path, metavar="FILE", help="a Python file of your own instead of aura train"
    )
    parser.add_argument("--master-port", type=int, metavar="PORT", help="where ranks meet (a free port)")
    parser.add_argument(
        "--stop-timeout",
        type=float,
        default=STOP_TIMEOUT,
        metavar="SECONDS",
        help=f"longest wait for the last checkpoint ({STOP_TIMEOUT:.0f})",
    )
    parser.add_argument("--verbose", action="store_true", help="show what each rank is started with")
    cut = argv.index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(argv[:cut])
    gpus = visible_gpus()
    check(arguments.gpus, gpus, arguments.script, arguments.master_port)
    if not arguments.stop_timeout > 0:
        raise ConfigError("stop_timeout_wrong")
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.gpus)
    program = [str(arguments.script)] if arguments.script else ["-m", "aura", "train"]
    port = arguments.master_port or free_port()
    environments = [
        environment_of(rank, arguments.gpus, port, threads, arguments.verbose)
        for rank in range(arguments.gpus)
    ]
    on_cpu = console.text("on_cpu", threads=environments[0]["OMP_NUM_THREADS"])
    device = console.text("on_gpus") if gpus else on_cpu
    say(console.text("launching", ranks=arguments.gpus, device=device, port=port))
    words = argv[cut + 1 :]
    ranks = start([sys.executable, *program, *words], environments, arguments.verbose)
    return supervise(ranks, arguments.stop_timeout)


def check(count: int, gpus: int, script: Path | None, port: int | None) -> None:
    if count < 1:
        raise ConfigError("at_least", name="gpus", value=count, least=1)
    if port is not None:
        check_port("--master-port", port)
    if script and not script.is_file():
        raise ConfigError("script_missing", path=script)
    if 0 < gpus < count:
        raise ConfigError("more_than_gpus", count=count, gpus=gpus)


def visible_gpus() -> int:
    import torch  # takes seconds

    return torch.cuda.device_count()
