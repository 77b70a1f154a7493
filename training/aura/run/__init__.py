"""One run: an attempt of one rank, the training loop, and everything that looks on."""
