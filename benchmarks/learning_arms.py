"""What `make bench-learning` compares: the model, the arms, and which of them are asked about together."""

from __future__ import annotations

from playing import Setting

VOCABULARY = 512
# 134,912 parameters; 384,000 tokens, a third of the text. betas as in gpt2-medium; the last learning rate is zero.
STEPS = 300
MODEL = {"seq_len": 32, "vocab_size": VOCABULARY}
# By its parameters; all but the ladder is measured with the first.
SIZES = {
    "0.13M": {"layers": 2, "d_model": 64, "heads": 2},
    "0.5M": {"layers": 4, "d_model": 96, "heads": 3},
    "2M": {"layers": 6, "d_model": 160, "heads": 5},
}
SMALLEST = "0.13M"
SCHEDULE = {"min_lr_ratio": 0.0, "beta2": 0.95}
# With 30 steps of warm-up, some seeds of AdamW stay where pairs of tokens are all that is learnt (4.3 nats).
WARMUP = {"muon": 30, "adamw": 100}
# Of the synchronous arms; the short form takes those that the long form has chosen.
RATES = {"muon": (1.4e-2, 2e-2, 2.8e-2), "adamw": (5.6e-3, 8e-3, 1.1e-2, 1.6e-2)}
CHOSEN = {"muon": 2e-2, "adamw": 1.1e-2}
SEEDS = {"short": 2, "long": 5}
TUNING_SEEDS = 2
SYNCHRONOUS = "synchronous, fp32"
# The groups that ask about an arm with Muon, and with AdamW, which loses most to any delay: its finer points are left
# out.
ASKED: list[tuple[str, Setting, str, str]] = [
    ("int8", Setting("int8", "int8"), "main", "formats"),
    ("int4", Setting("int4", "int4"), "main", "main"),
    ("int4 gradients", Setting(gradients="int4"), "formats", ""),
    ("int4 gradients, error feedback", Setting(gradients="int4", error_feedback=True), "formats", ""),
    ("int4 differences", Setting(differences="int4"), "formats", ""),
    ("1/4 late", Setting(late=0.25), "delays", "delays"),
    ("1/2 late", Setting(late=0.5), "main", "delays"),
    ("1/2 late, predicted weights", Setting(late=0.5, predicted=1.0), "main", "delays"),
    ("3/4 late, predicted", Setting(late=0.75, predicted=1.0), "causes", ""),
    ("7/8 late, predicted", Setting(late=0.875, predicted=1.0), "causes", ""),
    ("1 late", Setting(late=1.0), "main causes", "delays"),
    ("1 late, half predicted", Setting(late=1.0, predicted=0.5), "causes", ""),
    ("1 late, predicted weights", Setting(late=1.0, predicted=1.0), "main causes", "delays"),
    ("1 late, predicted 1.5", Setting(late=1.0, predicted=1.5), "causes", ""),
    ("1 late, predicted 2", Setting(late=1.0, predicted=2.0), "causes", ""),
    ("1 late, corrected", Setting(late=1.0, corrected=1.0), "main", "main"),
    ("1 late, matrices only", Setting(late=1.0, others_late=0.0), "causes", ""),
    ("1 late, matrices only, predicted", Setting(late=1.0, predicted=1.0, others_late=0.0), "causes", ""),
    ("1 late, the others 1/4, predicted", Setting(late=1.0, predicted=1.0, others_late=0.25), "causes", ""),
    (
        "7/8 late, the others 1/4, predicted, after a quarter",
        Setting(late=0.875, predicted=1.0, others_late=0.25, after=0.25),
        "causes",
        "",
    ),
    ("1 late after a tenth, predicted", Setting(late=1.0, predicted=1.0, after=0.1), "causes", ""),
    ("1 late after a quarter, predicted", Setting(late=1.0, predicted=1.0, after=0.25), "causes", ""),
    ("1 late after half, predicted", Setting(late=1.0, predicted=1.0, after=0.5), "", "causes"),
    ("int4 + 1/2 late, predicted", Setting("int4", "int4", late=0.5, predicted=1.0), "delays", "delays"),
    ("int8 + 1 late, predicted", Setting("int8", "int8", late=1.0, predicted=1.0), "delays", ""),
    ("int4 + 1 late, predicted", Setting("int4", "int4", late=1.0, predicted=1.0), "main", ""),
    (
        "int4 + 1 late after a quarter, predicted",
        Setting("int4", "int4", late=1.0, predicted=1.0, after=0.25),
        "main",
        "",
    ),
    (
        "int4 + 1 late, the others 1/4, after a quarter, predicted",
        Setting("int4", "int4", late=1.0, predicted=1.0, others_late=0.25, after=0.25),
        "",
        "",
    ),
]
ASKED += [
    (f"rounds of {steps}{more}", Setting(local_steps=steps, **own), "rounds", both)
    for steps, more, own, both in (
        (5, "", {}, ""),
        (10, "", {}, ""),
        (30, "", {}, "rounds"),
        (30, ", int4", {"gradients": "int4", "differences": "int4"}, ""),
        (30, ", a tenth late", {"late": 0.1}, ""),
        (30, ", a half late", {"late": 0.5}, ""),
    )
]
GROUPS = {
    group: {
        "muon": [arm for arm, _, muon, _ in ASKED if group in muon.split()],
        "adamw": [arm for arm, _, _, adamw in ASKED if group in adamw.split()],
    }
    for group in ("main", "causes", "formats", "delays", "rounds")
}
ALONE, FIVE = "alone", "int4 + 1 late, predicted"
# Sizes by lengths (parts of the tokens), at the best of five learning rates: seed 0, all tokens.
LADDER, LENGTHS = "ladder", (1.0, 3.0)
RATES_OF_LADDER = {"0.13M": 1.4e-2, "0.5M": 1e-2, "2M": 7e-3}
ARMS_OF_LADDER = (
    "int4",
    "int4 + 1 late after a quarter, predicted",
    "int4 + 1 late, the others 1/4, after a quarter, predicted",
)
# One PC on its own, and the learning rates that are tried. With all 40 windows it computes what five do in fp32.
ONE_PC = {f"one PC, {windows} windows": Setting(ranks=1, micro_batches=windows) for windows in (20, 10)}
ARMS = {SYNCHRONOUS: Setting(), **{arm: setting for arm, setting, _, _ in ASKED}, **ONE_PC}
RATES_ALONE = dict(
    zip([SYNCHRONOUS, *ONE_PC], ((2e-2,), (1e-2, 1.4e-2, 2e-2), (7e-3, 1e-2, 1.4e-2)), strict=True)
)
PARTS = (0.25, 0.5, 0.75, 1.0)  # of the tokens
# Of five PCs with int4 and 0.9 of a step late, by `make bench-wire`, encoded beforehand on the 4090.
SPEEDUPS = {"RTX 4090": 4.89, "RTX 3060": 4.96}
