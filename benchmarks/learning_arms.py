"""What `make bench-learning` compares: the model, the arms, and which of them are asked about together."""

from __future__ import annotations

from dataclasses import replace

from playing import Setting

VOCABULARY = 512
# 134,912 parameters; 384,000 tokens, a third of the text. betas as in gpt2-medium; the last learning rate is zero.
STEPS = 300
MODEL = {"layers": 2, "d_model": 64, "heads": 2, "seq_len": 32, "vocab_size": VOCABULARY}
SCHEDULE = {"min_lr_ratio": 0.0, "beta2": 0.95}
# With 30 steps of warm-up, some seeds of AdamW stay where pairs of tokens are all that is learnt (4.3 nats).
WARMUP = {"muon": 30, "adamw": 100}
# The best for the synchronous arms, of 0.014, 0.02, 0.028 and of 0.0056, 0.008, 0.011, 0.016
RATES = {"muon": 2e-2, "adamw": 1.1e-2}
SYNCHRONOUS = "synchronous, fp32"
LATE = Setting(late=1.0, predicted=True)
INT4_LATE = replace(LATE, gradients="int4", differences="int4")
# The groups that ask about an arm with Muon, and with AdamW, which loses most to any delay.
ASKED: list[tuple[str, Setting, str, str]] = [
    ("int8", Setting("int8", "int8"), "main", ""),
    ("int4", Setting("int4", "int4"), "main", "main"),
    ("1/4 late", Setting(late=0.25), "delays", "delays"),
    ("1/2 late", Setting(late=0.5), "main", "delays"),
    ("1/2 late, predicted weights", replace(LATE, late=0.5), "main", "delays"),
    ("1 late", Setting(late=1.0), "main", "delays"),
    ("1 late, predicted weights", LATE, "main", "delays"),
    ("1 late after a quarter, predicted", replace(LATE, after=0.25), "delays", ""),
    ("int4 + 1/2 late, predicted", replace(INT4_LATE, late=0.5), "delays", "delays"),
    ("int8 + 1 late, predicted", replace(LATE, gradients="int8", differences="int8"), "delays", ""),
    ("int4 + 1 late, predicted", INT4_LATE, "main", ""),
    ("int4 + 1 late after a quarter, predicted", replace(INT4_LATE, after=0.25), "main", ""),
    ("rounds of 5", Setting(local_steps=5), "rounds", ""),
    ("rounds of 10", Setting(local_steps=10), "rounds", ""),
    ("rounds of 30", Setting(local_steps=30), "rounds", "rounds"),
    ("rounds of 30, int4", Setting("int4", "int4", local_steps=30), "rounds", ""),
    ("rounds of 30, a tenth late", Setting(local_steps=30, late=0.1), "rounds", ""),
    ("rounds of 30, a half late", Setting(local_steps=30, late=0.5), "rounds", ""),
]
GROUPS = {
    group: {
        "muon": [arm for arm, _, muon, _ in ASKED if group in muon.split()],
        "adamw": [arm for arm, _, _, adamw in ASKED if group in adamw.split()],
    }
    for group in ("main", "delays", "rounds")
}
ALONE = "alone"
# One PC on its own, and the learning rates that are tried. With all 40 sequences it computes what five do in fp32.
ONE_PC = {
    f"one PC, {sequences} windows": Setting(ranks=1, micro_batches=sequences) for sequences in (20, 10, 5)
}
ARMS = {SYNCHRONOUS: Setting(), **{arm: setting for arm, setting, _, _ in ASKED}, **ONE_PC}
RATES_ALONE = dict(
    zip(
        [SYNCHRONOUS, *ONE_PC],
        ((2e-2,), (1e-2, 1.4e-2, 2e-2), (7e-3, 1e-2, 1.4e-2), (5e-3, 7e-3, 1e-2)),
        strict=True,
    )
)
PARTS = (0.25, 0.5, 0.75, 1.0)  # of the tokens
# Tokens a second of five RTX 4090 at gigabit, as a multiple of one's, by `make bench-wire` (docs/benchmarks.md); the
# delay after a quarter: a quarter of the steps at the speed of int4, the others at that with the delay.
SPEEDS = {
    SYNCHRONOUS: 0.69,
    "int8": 1.95,
    "int4": 2.83,
    "int4 + 1/2 late, predicted": 3.85,
    "int8 + 1 late, predicted": 2.94,
    "int4 + 1 late, predicted": 4.89,
    "int4 + 1 late after a quarter, predicted": 1 / (0.25 / 2.83 + 0.75 / 4.89),
}
