"""Bounds of every wait and every measurement."""

CONNECT_TIMEOUT = 2.0  # seconds for one attempt to connect, and for one answer
RETRY_PAUSE = 0.25  # seconds between two attempts
STRAGGLER_GRACE = 4.0  # seconds the coordinator waits for a node beyond its own patience
SILENCE_LIMIT = 8.0  # seconds without a word from the coordinator, who says something every few
MEASURE = 0.4  # seconds of sending, per ordered pair
SLOT_LIMIT = 5.0  # seconds for one measurement, all included
BANDWIDTH_BUDGET = 20.0  # seconds for all measurements together
WARM_UP = 0.1  # seconds at the start of a measurement that do not count (TCP slow start, a shaper's burst)
CHUNK = 256 * 1024  # bytes
SEND_BUFFER = 1024 * 1024  # bytes; small, so that little is on its way when a measurement ends
