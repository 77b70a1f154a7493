"""Checkpoints: complete or absent, tensors and JSON only."""
