"""Where ranks of this machine meet."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Below the ports that Linux gives to outgoing connections: such a one may be taken before rank 0 listens."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
