"""What `make bench-learning` compares: the model, the arms, and which of them are asked about together."""

from __future__ import annotations

from five_ranks import Setting

VOCABULARY = 512
# 134,912 parameters; 384,000 tokens, a third of the text. betas as in gpt2-medium; the last learning rate is zero.
STEPS = 300
MODEL = {"layers": 2, "d_model": 64, "heads": 2, "seq_len": 32, "vocab_size": VOCABULARY}
SCHEDULE = {"min_lr_ratio": 0.0, "beta2": 0.95}
# With 30 steps of warm-up, some seeds of AdamW stay where pairs of tokens are all that is learnt (4.3 nats).
WARMUP = {"muon": 30, "adamw": 100}
# Of the synchronous arms; the short form takes those that the long form has chosen.
RATES = {"muon": (1.4e-2, 2e-2, 2.8e-2), "adamw": (5.6e-3, 8e-3, 1.1e-2, 1.6e-2)}
CHOSEN = {"muon": 2e-2, "adamw": 1.1e-2}
SEEDS = {"short": 2, "long": 5}
TUNING_SEEDS = 2
SYNCHRONOUS = "synchronous, fp32"
ARMS = {
    SYNCHRONOUS: Setting(),
    "1/4 late": Setting(late=0.25),
    "1/2 late": Setting(late=0.5),
    "1 late": Setting(late=1.0),
    "1/2 late, predicted weights": Setting(late=0.5, predicted=1.0),
    "1 late, predicted weights": Setting(late=1.0, predicted=1.0),
    "1 late, corrected": Setting(late=1.0, corrected=1.0),
    "int8": Setting("int8", "int8"),
    "int4": Setting("int4", "int4"),
    "int4 gradients": Setting(gradients="int4"),
    "int4 gradients, error feedback": Setting(gradients="int4", error_feedback=True),
    "int4 differences": Setting(differences="int4"),
    "int4 + 1/2 late, predicted": Setting("int4", "int4", late=0.5, predicted=1.0),
    "int4 + 1 late, predicted": Setting("int4", "int4", late=1.0, predicted=1.0),
    "int8 + 1 late, predicted": Setting("int8", "int8", late=1.0, predicted=1.0),
    "1 late, half predicted": Setting(late=1.0, predicted=0.5),
    "1 late, predicted 1.5": Setting(late=1.0, predicted=1.5),
    "1 late, predicted 2": Setting(late=1.0, predicted=2.0),
    "1 late, matrices only": Setting(late=1.0, others_late=0.0),
    "1 late, matrices only, predicted": Setting(late=1.0, predicted=1.0, others_late=0.0),
    "1 late, the others 1/4, predicted": Setting(late=1.0, predicted=1.0, others_late=0.25),
    "7/8 late, the others 1/4, predicted, after 75 steps": Setting(
        late=0.875, predicted=1.0, others_late=0.25, from_step=75
    ),
    "1 late after 30 steps, predicted": Setting(late=1.0, predicted=1.0, from_step=30),
    "1 late after 75 steps, predicted": Setting(late=1.0, predicted=1.0, from_step=75),
    "1 late after 150 steps, predicted": Setting(late=1.0, predicted=1.0, from_step=150),
    "int4 + 1 late after 75 steps, predicted": Setting("int4", "int4", late=1.0, predicted=1.0, from_step=75),
    "3/4 late, predicted": Setting(late=0.75, predicted=1.0),
    "7/8 late, predicted": Setting(late=0.875, predicted=1.0),
}
# Which arms of which optimizer are asked about together. AdamW loses most to any delay, so that its finer points are
# left out.
GROUPS = {
    "main": {
        "muon": [
            "int8",
            "int4",
            "1/2 late",
            "1 late",
            "1/2 late, predicted weights",
            "1 late, predicted weights",
            "1 late, corrected",
            "int4 + 1 late, predicted",
            "int4 + 1 late after 75 steps, predicted",
        ],
        "adamw": ["int4", "1 late, corrected"],
    },
    "causes": {
        "muon": [
            "1 late",
            "1 late, predicted weights",
            "1 late, half predicted",
            "1 late, predicted 1.5",
            "1 late, predicted 2",
            "1 late, matrices only",
            "1 late, matrices only, predicted",
            "1 late, the others 1/4, predicted",
            "1 late after 30 steps, predicted",
            "1 late after 75 steps, predicted",
            "3/4 late, predicted",
            "7/8 late, predicted",
            "7/8 late, the others 1/4, predicted, after 75 steps",
        ],
        "adamw": ["1 late after 150 steps, predicted"],
    },
    "formats": {
        "muon": ["int4 gradients", "int4 gradients, error feedback", "int4 differences"],
        "adamw": ["int8"],
    },
    "delays": {
        "muon": ["1/4 late", "int4 + 1/2 late, predicted", "int8 + 1 late, predicted"],
        "adamw": [
            "1/4 late",
            "1/2 late",
            "1 late",
            "1/2 late, predicted weights",
            "1 late, predicted weights",
            "int4 + 1/2 late, predicted",
        ],
    },
}
ALONE, FIVE = "alone", "int4 + 1 late, predicted"
# One PC on its own, and the learning rates that are tried. With all 40 windows it computes what five do in fp32.
ARMS |= {f"one PC, {windows} windows": Setting(ranks=1, micro_batches=windows) for windows in (20, 10)}
RATES_ALONE = {
    SYNCHRONOUS: (2e-2,),
    "one PC, 20 windows": (1e-2, 1.4e-2, 2e-2),
    "one PC, 10 windows": (7e-3, 1e-2, 1.4e-2),
}
PARTS = (0.25, 0.5, 0.75, 1.0)  # of the tokens
# Of five PCs with int4 and 0.9 of a step late, by `make bench-wire`, encoded beforehand on the 4090.
SPEEDUPS = {"RTX 4090": 4.89, "RTX 3060": 4.96}
