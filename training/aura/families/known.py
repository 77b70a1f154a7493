"""The families that there are."""

from __future__ import annotations

from aura.families.family import Family
from aura.families.gpt2 import GPT2
from aura.families.hrm_text import HRM_TEXT
from aura.families.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2, HRM_TEXT, QWEN3)}
