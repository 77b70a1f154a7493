"""The lab: virtual bare nodes on this machine. `tests/lab/lab` is its command line."""
