"""Aura trains one language model on several ordinary PCs together."""

__version__ = "0.1.0"
