"""The sentences that a person reads, in Spanish and English. Standard library only."""
