"""The complete configuration of a training run, and the presets.

A preset is data: a file in presets/ that gives what is not as in presets/manual.toml, which gives every field but the
size. The same function checks a preset and the overrides of the command line, of launch.yml and of `aura config`, so
that a mistake is found before a node is touched.
Two presets are not a file of their own: `auto` chooses one by the memory of the GPU (aura/plan/auto.py), and `manual`
takes the size of the model from the command line and the rest from presets/manual.toml. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from itertools import accumulate, pairwise
from typing import Any

from aura.errors import ConfigError, did_you_mean, in_words
from aura.families.known import FAMILIES
from aura.recipe import rate


def _setting(**limits: Any) -> Any:
    """minimum and maximum (inclusive), above and below (exclusive), choices. What it is, and its unit, says help_<name>
    in aura/texts."""
    return field(metadata=limits)


@dataclass(frozen=True)
class TrainConfig:
    preset: str  # the name of the one that this configuration started from
    # The model
    family: str = _setting(choices=tuple(FAMILIES))
    layers: int = _setting(minimum=1, maximum=10_000)
    heads: int = _setting(minimum=1)
    kv_heads: int = _setting(minimum=0)
    d_model: int = _setting(minimum=1, maximum=1_000_000)
    seq_len: int = _setting(minimum=1)
    vocab_size: int = _setting(minimum=1)
    tied: str = _setting(choices=("auto", "true", "false"))
    dropout: float = _setting(minimum=0, below=1)
    zero_projections: bool = _setting()
    # How it is computed (none of these changes what is learnt, but for rounding)
    vocab_multiple: int = _setting(minimum=1)
    loss_chunk: int = _setting(minimum=0)
    gradient_checkpointing: bool = _setting()
    compile: str = _setting(choices=("auto", "true", "false"))
    deterministic: bool = _setting()
    # One optimizer step
    batch_size: int = _setting(minimum=1)
    gradient_accumulation_steps: int = _setting(minimum=1)
    rank_batch_sizes: str = _setting()
    micro_batch: str = _setting()
    global_batch_tokens: int = _setting(minimum=0)
    balance: str = _setting(choices=("equal", "speed"))
    precision: str = _setting(choices=("fp32", "bf16", "fp16"))
    # The optimizer
    optimizer: str = _setting(choices=("adamw", "muon"))
    parameter_format: str = _setting(choices=("fp32", "bf16"))
    moment_format: str = _setting(choices=("fp32", "bf16", "int8"))
    steps: int = _setting(minimum=1)
    epochs: float = _setting(minimum=0)
    tokens: int = _setting(minimum=0)
    schedule: str = _setting(choices=("cosine", "wsd"))
    lr: float = _setting(above=0)
    embedding_lr: float = _setting(minimum=0)
    head_lr: float = _setting(minimum=0)
    gain_lr: float = _setting(minimum=0)
    min_lr_ratio: float = _setting(minimum=0, maximum=1)
    warmup_steps: int = _setting(minimum=0)
    warmup_ratio: float = _setting(minimum=0, below=1)
    decay_ratio: float = _setting(minimum=0, maximum=1)
    weight_decay: float = _setting(minimum=0)
    decay_embeddings: bool = _setting()
    beta1: float = _setting(minimum=0, below=1)
    beta2: float = _setting(minimum=0, below=1)
    clip: float = _setting(above=0)
    allow_dataset_oversubscription: bool = _setting()
    # How ranks agree
    strategy: str = _setting(choices=("sharded", "rounds", "auto"))
    wire: str = _setting(choices=("fp32", "bf16", "int8", "int4"))
    delay: float = _setting(minimum=0, maximum=1)
    delay_after: int = _setting(minimum=0)
    predicted_weights: bool = _setting()
    allow_delayed_adamw: bool = _setting()
    local_steps: int = _setting(minimum=1)
    outer_lr: float = _setting(above=0)
    outer_momentum: float = _setting(minimum=0, below=1)
    collective_timeout: int = _setting(minimum=5)
    # The run
    seed: int = _setting(minimum=0, maximum=2**64 - 1)
    log_every: int = _setting(minimum=1)
    validate_every: int = _setting(minimum=1)
    validation_windows: int = _setting(minimum=1)
    save_every: int = _setting(minimum=1)
    keep_checkpoints: int = _setting(minimum=1)
    keep_every: int = _setting(minimum=0)

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check_limits(setting.name, getattr(self, setting.name), setting.metadata)
        if self.parameter_format == "bf16" and self.precision != "bf16":
            raise ConfigError("bf16_parameters_need_bf16", precision=self.precision)
        if self.optimizer == "muon" and (self.parameter_format, self.moment_format) != ("fp32", "fp32"):
            raise ConfigError(
                "muon_needs_fp32", parameter_format=self.parameter_format, moment_format=self.moment_format
            )
        if self.strategy == "auto" and (self.wire != "fp32" or self.delay):
            raise ConfigError("auto_chooses", wire=self.wire, delay=self.delay)
        late_gradients = self.delay > 0 and self.strategy != "rounds"
        if late_gradients and self.optimizer == "adamw" and not self.allow_delayed_adamw:
            raise ConfigError("delay_ruins_adamw", delay=self.delay)
        if self.balance == "speed" and not self.global_batch_tokens:
            raise ConfigError("balance_needs_global_batch", tokens=self.global_batch_tokens)
        if self.d_model % self.heads:
            raise ConfigError("heads_do_not_divide", d_model=self.d_model, heads=self.heads)
        FAMILIES[self.family].check(self)
        if self.head_lr and FAMILIES[self.family].shape(self).tied:
            raise ConfigError("head_lr_without_head", head_lr=self.head_lr, family=self.family)
        if over := self.global_batch_tokens % self.seq_len:
            raise ConfigError(
                "global_batch_no_multiple",
                tokens=self.global_batch_tokens,
                seq_len=self.seq_len,
                next=self.global_batch_tokens + self.seq_len - over,
            )

    def batch_sizes(self, ranks: int) -> list[int]:
        """Largest micro-batch of every rank [sequences]. Raises ConfigError."""
        sizes = self._asked_sizes(ranks)
        if self.micro_batch not in MICRO_BATCH:
            sizes = self._numbers("micro_batch", ranks)
        elif not self.global_batch_tokens:
            return sizes
        # Micro-batches of one length, as far as the share allows: torch.compile makes kernels for each length.
        pairs = zip(self.shares(ranks), sizes, strict=True)
        return [math.ceil(share / math.ceil(share / size)) for share, size in pairs]

    def _asked_sizes(self, ranks: int) -> list[int]:
        if not self.rank_batch_sizes:
            return [self.batch_size] * ranks
        return self._numbers("rank_batch_sizes", ranks)

    def _numbers(self, name: str, ranks: int) -> list[int]:
        """Of every rank; of micro_batch one number is for all."""
        words = (value := getattr(self, name)).split(",")
        if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            raise ConfigError("numbers_wrong", name=name, value=value)
        if len(words) != ranks and (len(words) > 1 or name != "micro_batch"):
            raise ConfigError("numbers_of_ranks", name=name, value=value, count=len(words), ranks=ranks)
        return [int(word) for word in words] * (ranks // len(words))

    def among(self, ranks: int, active_ranks: Sequence[int]) -> TrainConfig:
        """For those of the ranks of a launch that take part: together they compute the step of all. Raises
        ConfigError."""
        if len(active_ranks) == ranks:
            return self
        own: dict[str, Any] = {"global_batch_tokens": sum(self.shares(ranks)) * self.seq_len}
        for name in ("rank_batch_sizes", "micro_batch"):
            if getattr(self, name) not in ("", *MICRO_BATCH):
                sizes = self._numbers(name, ranks)
                own[name] = ",".join(str(sizes[rank]) for rank in active_ranks)
        return replace(self, **own)

    def shares(self, ranks: int) -> list[int]:
        """Sequences of every rank in one optimizer step; with balance=speed, at first. Raises ConfigError."""
        sizes = self._asked_sizes(ranks)
        if not self.global_batch_tokens:
            return [size * self.gradient_accumulation_steps for size in sizes]
        sequences, parts = self.global_batch_tokens // self.seq_len, sum(sizes)
        borders = (sequences * part // parts for part in accumulate(sizes, initial=0))
        shares = [stop - start for start, stop in pairwise(borders)]
        if 0 in shares:
            among = f"rank_batch_sizes={self.rank_batch_sizes}" if self.rank_batch_sizes else f"{ranks} ranks"
            step = {"tokens": self.global_batch_tokens, "sequences": sequences, "seq_len": self.seq_len}
            raise ConfigError("rank_without_share", **step, among=among, rank=shares.index(0))
        return shares

    def digest(self) -> str:
        """Equal exactly when all settings are equal. Where a run is long in tokens or epochs, its steps may follow from
        the number of ranks."""
        unsaid = {name for name, value in LATER.items() if getattr(self, name) == value}
        settings = {name: value for name, value in asdict(self).items() if name not in unsaid}
        if self.epochs or self.tokens:
            del settings["steps"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


SETTINGS = {setting.name: setting for setting in fields(TrainConfig) if setting.name != "preset"}
# What a configuration on a disk means that is older than these settings; a digest is made without them where they say
# just that, so that a run that is done stays so.
LATER = {
    "micro_batch": "auto",
    "zero_projections": False,
    "embedding_lr": 0.0,
    "head_lr": 0.0,
    "gain_lr": 0.0,
    "decay_embeddings": True,
    "local_steps": 30,
    "outer_lr": 1.0,
    "outer_momentum": 0.5,
}
BEFORE = LATER | {
    "family": "gpt2",
    "kv_heads": 0,
    "tied": "auto",
    "optimizer": "adamw",
    "wire": "fp32",
    "delay": 0.0,
    "delay_after": 0,
    "predicted_weights": True,
    "allow_delayed_adamw": False,
    "deterministic": False,
    "global_batch_tokens": 0,
    "balance": "equal",
    "tokens": 0,
}
GONE = "loss_tolerance"  # a setting that there was; it said nothing of what is learnt
MICRO_BATCH = ("auto", "batch_size")  # or numbers
# Who names one of these gets that one, and auto no more.
OF_A_MICRO_BATCH = frozenset({"batch_size", "loss_chunk"})
DDP = "ddp"  # a strategy that there was: every rank computed all updates. `sharded` gives the same gradients.
# Who gives two of them means something else than what would happen.
SAY_THE_SAME = {
    "length_said_twice": ("tokens", "epochs", "steps"),
    "step_said_twice": ("global_batch_tokens", "gradient_accumulation_steps"),
}
# Of two ways to say the same, a person's own is the one that is meant. (Of both, warmup_steps where it is not 0.)
IN_PLACE_OF = {
    "gradient_accumulation_steps": "global_batch_tokens",
    "warmup_ratio": "warmup_steps",
    "warmup_steps": "warmup_ratio",
}
AUTO, MANUAL = "auto", "manual"
POWER = re.compile(r"\d+(\.\d+)?[eE]\+?\d{1,2}")  # a large whole number, as people write it
MANUAL_NEEDS = ("layers", "heads", "d_model", "seq_len")
# What the guides call a setting: what it is called here. Both are accepted wherever a person names a setting.
ALIASES = {
    "custom_preset": "preset",
    "model_preset": "preset",
    "num_layers": "layers",
    "num_heads": "heads",
    "embed_size": "d_model",
    "seq_length": "seq_len",
    "learning_rate": "lr",
    "log_interval": "log_every",
    "save_steps": "save_every",
}


def preset_names() -> list[str]:
    """The complete presets; AUTO and MANUAL are accepted besides them."""
    files = resources.files("aura").joinpath("presets").iterdir()
    names = (file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))
    return sorted(name for name in names if name != MANUAL)


def resolve(preset: str, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """The preset with some settings replaced; values may be text, and `preset` itself may be among them.

    Raises ConfigError with one sentence.
    """
    given = canonical(overrides or {})
    preset = str(given.pop("preset", preset))
    refuse_two_ways(given)
    names = [*preset_names(), AUTO, MANUAL]
    if preset not in names:
        hint = did_you_mean(preset, names)
        raise ConfigError("unknown_preset", preset=preset, hint=hint, names=", ".join(names))
    if preset == AUTO:
        raise ConfigError("auto_with_ranks")
    own = own_settings(preset)
    values = own | said_otherwise(given) | given
    lacking = ["/".join(flags(name)) for name in MANUAL_NEEDS if name not in values]
    if preset == MANUAL and lacking:
        raise ConfigError("manual_incomplete", missing=", ".join(lacking))
    if missing := sorted(set(SETTINGS) - set(values)):
        raise ConfigError("preset_incomplete", preset=preset, missing=", ".join(missing))
    config = from_values({"preset": preset, **values})
    if config.optimizer == own["optimizer"] or "lr" in given:
        return config
    return replace(config, lr=rate(config.optimizer, config.d_model))


def said_otherwise(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a person has not named, but whose place what is `given` takes."""
    own = {other: 0 for name, other in IN_PLACE_OF.items() if name in given}
    return own | ({"micro_batch": "batch_size"} if OF_A_MICRO_BATCH & given.keys() else {})


def own_settings(preset: str) -> dict[str, Any]:
    """What its file says, and the one of MANUAL where it says nothing."""
    files = (resources.files("aura").joinpath("presets", f"{name}.toml") for name in (MANUAL, preset))
    general, own = (tomllib.loads(file.read_text(encoding="utf-8")) for file in files)
    return general | own


def canonical(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides under our own names. Raises ConfigError for an unknown one, and for one that is given twice."""
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    for spelling, value in overrides.items():
        name = spelling.replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in SETTINGS and name != "preset":
            raise _unknown_setting(name)
        if name in said:
            raise ConfigError("same_setting_twice", one=said[name], other=spelling)
        values[name], said[name] = value, spelling
    return values


def refuse_two_ways(given: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    said = {name for name, value in given.items() if _typed(name, value, SETTINGS[name].type)}
    for error, names in SAY_THE_SAME.items():
        if len(both := [name for name in names if name in said]) > 1:
            raise ConfigError(error, one=both[0], other=both[1])


def flags(name: str) -> list[str]:
    """'--lr', '--learning-rate': ours first."""
    spellings = [name, *(alias for alias, meant in ALIASES.items() if meant == name)]
    return [f"--{spelling.replace('_', '-')}" for spelling in spellings]


def from_values(values: Mapping[str, Any]) -> TrainConfig:
    """A configuration from all its settings, for example from config.json."""
    values = BEFORE | {name: value for name, value in values.items() if name != GONE}
    if str(values.get("strategy")).lower() == DDP:
        values["strategy"] = "sharded"
    for name in values:
        if name not in SETTINGS and name != "preset":
            raise _unknown_setting(name)
    if missing := sorted(set(SETTINGS) - set(values)):
        raise ConfigError("configuration_incomplete", missing=", ".join(missing))
    typed = {name: _typed(name, values[name], setting.type) for name, setting in SETTINGS.items()}
    return TrainConfig(preset=str(values.get("preset", "")), **typed)


def _unknown_setting(name: str) -> ConfigError:
    names = ", ".join(SETTINGS)
    return ConfigError("unknown_setting", name=name, hint=did_you_mean(name, SETTINGS), names=names)


def _typed(name: str, value: Any, kind: Any) -> Any:
    """`value` as int, float, bool or str; text is parsed, and 2.0 is not an int."""
    kinds = {"int": "a_whole_number", "float": "a_number", "bool": "true_or_false", "str": "a_word"}
    wanted = in_words(kinds[kind])
    wrong = ConfigError(
        "setting_has_wrong_type", name=name, value=value, wanted=wanted, help=in_words(f"help_{name}")
    )
    if kind == "bool" and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if kind == "str" and str(value).lower() in SETTINGS[name].metadata.get("choices", ()):
        return str(value).lower()  # True too, where true is one of the words
    if kind == "bool" or isinstance(value, bool):
        raise wrong
    try:
        if kind == "int" and isinstance(value, str) and POWER.fullmatch(value) and float(value).is_integer():
            return int(float(value))  # 2.5e9
        if kind == "int" and isinstance(value, int | str):
            return int(value)
        if kind == "float" and isinstance(value, int | float | str) and math.isfinite(float(value)):
            return float(value)
    except (ValueError, OverflowError):
        raise wrong from None
    if kind == "str" and isinstance(value, str):
        return value
    raise wrong


def _check_limits(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if (choices := limits.get("choices")) and value not in choices:
        said = {"hint": did_you_mean(str(value), choices), "choices": ", ".join(choices)}
        raise ConfigError("setting_has_unknown_value", name=name, value=value, **said)
    for limit, key, is_met in (
        ("minimum", "setting_at_least", operator.ge),
        ("maximum", "setting_at_most", operator.le),
        ("above", "setting_more_than", operator.gt),
        ("below", "setting_less_than", operator.lt),
    ):
        if limit in limits and not is_met(value, limits[limit]):
            raise ConfigError(key, name=name, value=value, limit=limits[limit], help=in_words(f"help_{name}"))


def as_words(settings: Mapping[str, Any]) -> str:
    """'batch_size=4 compile=true': what parse_assignments reads."""
    return " ".join(f"{name}={str(value).lower()}" for name, value in settings.items())
