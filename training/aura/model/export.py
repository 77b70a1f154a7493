"""A trained model as a directory that `transformers` loads (GPT2LMHeadModel, HrmTextForCausalLM
or Qwen3ForCausalLM, and AutoTokenizer).

    model.safetensors         the parameters under the names that they have there, in the format of their training
    config.json               the shape of the model, and the ids of the special tokens
    generation_config.json    those ids again, for generate()
    tokenizer.json            as `aura prepare` wrote it, byte for byte
    tokenizer_config.json     with special_tokens_map.json: what tokenizer.json does not say
    model-F16.gguf            the same once more for llama.cpp, and model-Q8_0.gguf, where they are asked for

Where the output matrix is the embedding, it is not in the file. Rows that no token of the tokenizer has are
left out. `transformers` itself is not needed, and `load` reads such a directory back.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from aura.checkpoint import manifest
from aura.checkpoint import store as checkpoint
from aura.checkpoint.newest import newest_valid
from aura.config import TrainConfig, from_values, resolve
from aura.corpus.corpus import TOKENIZER
from aura.corpus.tokenizer import ENDS, PADS
from aura.durable import publish
from aura.errors import ConfigError, DataError
from aura.families.family import Names
from aura.families.known import FAMILIES
from aura.model import gguf_file
from aura.model.family import NETWORKS, model_of
from aura.model.language_model import LanguageModel

MODEL, CONFIG = "model.safetensors", "config.json"
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
FILES = {MODEL, CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS}
GGUF_FILES = {gguf_file.name_of(form) for form in gguf_file.FORMATS}


def export(
    config: TrainConfig,
    parameters: Mapping[str, Tensor],
    tokenizer_path: Path,
    output: Path,
    gguf: Sequence[str] = (),
) -> None:
    """Write the model with these parameters (named as in aura/model) and its tokenizer to the directory `output`.

    `gguf`: in which formats llama.cpp's file is wanted too (gguf_file.FORMATS).

    It appears all at once. An earlier export in `output` is replaced; anything else there is left alone: ConfigError.
    Raises DataError when it cannot be written, or when the tokenizer has more tokens than the model has rows.
    """
    if output.exists() and not (
        output.is_dir() and {path.name for path in output.iterdir()} <= FILES | GGUF_FILES
    ):
        raise ConfigError("no_exported_model_there", path=output)
    tokenizer = read_tokenizer(tokenizer_path)
    rows = token_ids(tokenizer)
    if rows > config.vocab_size:
        raise DataError(
            "tokenizer_of_other_model", path=tokenizer_path, rows=rows, vocab_size=config.vocab_size
        )
    if gguf:
        gguf_file.check(config, tokenizer)
    special = _special_tokens(tokenizer)
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in special.items()}
    names, with_rows = FAMILIES[config.family].names, NETWORKS[config.family].vocabulary
    ours = {name: part[:rows] if name in with_rows else part for name, part in parameters.items()}
    tensors = {names.of(name): turned(names, name, part) for name, part in ours.items()}
    kind = next(iter(tensors.values())).dtype
    texts = {
        CONFIG: {
            "model_type": names.model_type,
            **names.config(config),
            "vocab_size": rows,
            "torch_dtype": str(kind).removeprefix("torch."),  # every version reads it under this name
            **ids,
        },
        GENERATION: ids,
        TOKENIZER_CONFIG: {
            # transformers 5 would rebuild "GPT2Tokenizer" from the vocabulary, with a pre-tokenizer of its own.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.seq_len,
            "clean_up_tokenization_spaces": False,
            **special,
        },
        SPECIAL_TOKENS: special,
    }
    temporary = output.with_name(f"{output.name}{manifest.TEMPORARY}{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        for name, content in texts.items():
            (temporary / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(tokenizer_path, temporary / TOKENIZER)
        there = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(there, temporary / MODEL, metadata={"format": "pt"})
        for form in gguf:
            file = temporary / gguf_file.name_of(form)
            gguf_file.write(file, form, config, ours, tokenizer, rows, special)
        (temporary / MODEL).chmod(0o640)  # as checkpoints: what copies runs is another user, in this group
        publish(temporary, output)
    except (OSError, SafetensorError) as error:
        raise DataError("export_not_written", path=output, error=error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export_checkpoint(path: Path, output: Path, gguf: Sequence[str] = ()) -> None:
    """`export` of a verified checkpoint, with the tokenizer of its run directory."""
    config = from_values(verified_state(path)["config"])
    export(config, load_file(path / manifest.MODEL), tokenizer_of(path), output, gguf)


def load(path: Path) -> LanguageModel:
    """The model of an exported directory, in fp32. Raises DataError when the directory is not complete."""
    families = {family.names.model_type: family for family in FAMILIES.values()}
    try:
        values = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(path / MODEL)
        family = families[values["model_type"]]
        names = family.names
        fixed = {"vocab_multiple": 1, "parameter_format": "fp32", "dropout": 0}
        shape = {"family": family.name, "vocab_size": values["vocab_size"], **names.shape(values), **fixed}
        model = model_of(resolve("gpt2-nano", shape))
        model.load_state_dict(
            {name: turned(names, name, tensors[names.of(name)]) for name in model.state_dict()}
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise DataError("no_exported_model", path=path, kind=type(error).__name__, error=error) from None
    return model


def turned(names: Names, name: str, tensor: Tensor) -> Tensor:
    """To the layout there, and back."""
    return tensor.t() if names.turned and names.turned.fullmatch(name) else tensor


def verified_state(path: Path) -> checkpoint.State:
    """The state of a checkpoint whose every byte is right. Raises DataError."""
    try:
        manifest.verify(path)
    except manifest.Damaged as reason:
        raise DataError("checkpoint_unusable", path=path, reason=reason) from None
    return checkpoint.read_state(path)


def is_exported(path: Path) -> bool:
    return (path / CONFIG).is_file() and (path / TOKENIZER_CONFIG).is_file()


def tokenizer_of(path: Path) -> Path:
    """The tokenizer of a checkpoint: a copy lies in its run directory. Raises DataError."""
    file = path.absolute().parents[1] / TOKENIZER
    if not file.is_file():
        raise DataError("run_tokenizer_missing", file=file)
    return file


def read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers has no type of its own for it
        raise DataError("tokenizer_unreadable", path=path, error=error) from None


def token_ids(tokenizer: Tokenizer) -> int:
    """The number of rows that the tokenizer needs: its largest id and one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The id of the token that ends a document, and begins a text that nothing precedes."""
    token = _first_of(ENDS, tokenizer)
    return None if token is None else tokenizer.token_to_id(token)


def _first_of(tokens: tuple[str, ...], tokenizer: Tokenizer) -> str | None:
    return next((token for token in tokens if tokenizer.token_to_id(token) is not None), None)


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """A tokenizer without a padding token pads with the end of the text, as is usual for GPT-2."""
    end = _first_of(ENDS, tokenizer)
    tokens = {"bos_token": end, "eos_token": end, "pad_token": _first_of(PADS, tokenizer) or end}
    return {name: token for name, token in tokens.items() if token is not None}


def newest(run_dir: Path, say: Callable[[str], None]) -> Path:
    """The newest checkpoint of a run whose every byte is right; `say` hears of those that are not.

    Raises DataError when there is none.
    """
    found = newest_valid([run_dir / "checkpoints"], say)
    if found is None:
        raise DataError("no_checkpoint_yet", path=run_dir / "checkpoints")
    return found.path
