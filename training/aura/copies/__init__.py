"""Copies of runs on another disk or in object storage, and the way back. The trainer needs none of this."""
