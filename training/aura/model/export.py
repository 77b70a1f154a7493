"""A trained model as a directory that `transformers` loads (GPT2LMHeadModel, HrmTextForCausalLM
or Qwen3ForCausalLM, and AutoTokenizer).

    model.safetensors         the parameters under the names that they have there, in the format of their training
    config.json               the shape of the model, and the ids of the special tokens
    generation_config.json    those ids again, for generate()
    tokenizer.json            as `aura prepare` wrote it, byte for byte
    tokenizer_config.json     with special_tokens_map.json: what tokenizer.json does not say
    model-F16.gguf            the same once more for llama.cpp, and model-Q8_0.gguf, where they are asked for
    Modelfile                 with them, for ollama

Where the output matrix is the embedding, it is not in the file. Rows that no token of the tokenizer has are
left out. `transformers` itself is not needed, and `load` reads such a directory back.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from aura.checkpoint import manifest
from aura.checkpoint import store as checkpoint
from aura.checkpoint.newest import newest_valid
from aura.config import TrainConfig, from_values, resolve
from aura.corpus.corpus import TOKENIZER, TOKENIZER_CONFIG
from aura.corpus.special_tokens import SPECIAL_TOKENS, TOKENS, count_ids, is_tuned, special_tokens
from aura.durable import publish
from aura.errors import ConfigError, DataError, why_not_written
from aura.families.family import Names
from aura.families.known import FAMILIES
from aura.model import gguf_file
from aura.model.family import NETWORKS, model_of
from aura.model.language_model import LanguageModel
from aura.storage.address import appears_at_once

MODEL, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"
FILES = {MODEL, CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS}
GGUF_FILES = {*map(gguf_file.name_of, gguf_file.FORMATS), gguf_file.MODELFILE}
CHECKPOINTS, MODEL_CONFIG = "checkpoints", "model_config.json"  # in the directory of a run


def export(
    config: TrainConfig,
    parameters: Mapping[str, Tensor],
    tokenizer_path: Path,
    output: Path,
    gguf: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> None:
    """Write the model with these parameters (named as in aura/model) and its tokenizer to the directory `output`.
    Which of its tokens are special stands beside `tokenizer_path`.

    `gguf`: in which formats llama.cpp's file is wanted too (gguf_file.FORMATS); `texts`: of which it must make the
    same token ids, where it is installed.

    It appears all at once. An earlier export in `output` is replaced; anything else there is left alone: ConfigError.
    Raises DataError when it cannot be written, or when the tokenizer has more tokens than the model has rows.
    """
    output = appears_at_once(output)
    if output.exists() and not _is_ours(output):
        raise ConfigError("no_exported_model_there", path=output)
    tokenizer = read_tokenizer(tokenizer_path)
    rows = count_ids(tokenizer)
    if rows > config.vocab_size:
        raise DataError(
            "tokenizer_of_other_model", path=tokenizer_path, rows=rows, vocab_size=config.vocab_size
        )
    if gguf:
        gguf_file.check(config, tokenizer)
    special = special_tokens(tokenizer_path.parent, tokenizer)
    names, with_rows = FAMILIES[config.family].names, NETWORKS[config.family].vocabulary
    ours = {name: part[:rows] if name in with_rows else part for name, part in parameters.items()}
    tensors = {names.of(name): turned(names, name, part) for name, part in ours.items()}
    kind = str(next(iter(tensors.values())).dtype)
    temporary = output.with_name(f"{output.name}{manifest.TEMPORARY}{os.getpid()}")
    left = f"{escape(output.name)}{manifest.TEMPORARY}*"  # by one that was killed
    for path in output.parent.glob(left):
        shutil.rmtree(path, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for name, content in _described(config, rows, kind, tokenizer, special).items():
            (temporary / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(tokenizer_path, temporary / TOKENIZER)
        if adds_tokens(tokenizer):  # none that the model has seen there
            described = {**json.loads(tokenizer.to_str()), "post_processor": None}
            (temporary / TOKENIZER).write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")
        there = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(there, temporary / MODEL, metadata={"format": "pt"})
        for form in gguf:
            file = temporary / gguf_file.name_of(form)
            gguf_file.write(file, form, config, ours, tokenizer, rows, special)
            (temporary / gguf_file.MODELFILE).write_text(
                gguf_file.modelfile(file.name, special), encoding="utf-8"
            )
        if gguf:
            gguf_file.compare_ids(file, tokenizer, texts)
        (temporary / MODEL).chmod(0o640)  # as checkpoints: what copies runs is another user, in this group
        publish(temporary, output)
        for path in output.parent.glob(f".old-{left}"):
            shutil.rmtree(path, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise DataError("export_not_written", path=output, error=why_not_written(error)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _described(
    config: TrainConfig, rows: int, kind: str, tokenizer: Tokenizer, special: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """The content of the JSON files, by their names."""
    names = FAMILIES[config.family].names
    tokens = {name: special[name] for name in TOKENS if name in special}
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in tokens.items()}
    return {
        CONFIG: {
            "model_type": names.model_type,
            **names.config(config),
            "vocab_size": rows,
            "torch_dtype": kind.removeprefix("torch."),  # every version reads it under this name
            **ids,
        },
        GENERATION: ids,
        TOKENIZER_CONFIG: {
            # transformers 5 would rebuild "GPT2Tokenizer" from the vocabulary, with a pre-tokenizer of its own.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.seq_len,
            "clean_up_tokenization_spaces": False,
            **({"add_bos_token": False} if is_tuned(special) or adds_tokens(tokenizer) else {}),
            **special,
        },
        SPECIAL_TOKENS: tokens,
    }


def adds_tokens(tokenizer: Tokenizer) -> bool:
    """Whether it puts tokens around a text by itself. Corpora are encoded without them."""
    return tokenizer.num_special_tokens_to_add(is_pair=False) > 0


def export_checkpoint(path: Path, output: Path, gguf: Sequence[str] = ()) -> None:
    """`export` of a verified checkpoint, with the tokenizer of its run directory."""
    state, tokenizer = verified_state(path), tokenizer_of(path)
    texts: Sequence[str] = ()
    if gguf and (corpus := _corpus_of(run_of(path))):
        texts = gguf_file.sample_of_corpus(corpus, state.get("corpus", ""), read_tokenizer(tokenizer))
    config = from_values(state["config"])
    export(config, load_file(path / manifest.MODEL), tokenizer, output, gguf, texts)


def _corpus_of(run: Path) -> Path | None:
    """Where it was when the run was last started; None of a run of an earlier release."""
    try:
        return Path(json.loads((run / MODEL_CONFIG).read_text(encoding="utf-8"))["corpus"])
    except (OSError, ValueError, KeyError):
        return None


def export_again(path: Path, output: Path, gguf: Sequence[str]) -> None:
    """`export` of what transformers has written, once others have trained an exported model further."""
    config, parameters = read_exported(path)
    export(config, parameters, tokenizer_of(path), output, gguf)


def load(path: Path) -> LanguageModel:
    """The model of an exported directory, in fp32. Raises DataError when the directory is not complete."""
    config, parameters = read_exported(path)
    model = model_of(config)
    try:
        model.load_state_dict(parameters)
    except RuntimeError as error:
        raise DataError("no_exported_model", path=path, kind=type(error).__name__, error=error) from None
    return model


def read_exported(path: Path) -> tuple[TrainConfig, dict[str, Tensor]]:
    """The shape and the parameters, named as in aura/model, of an exported directory. Raises DataError when it is not
    complete."""
    families = {family.names.model_type: family for family in FAMILIES.values()}
    try:
        values = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(path / MODEL)
        family = families[values["model_type"]]
        names = family.names
        fixed = {"vocab_multiple": 1, "parameter_format": "fp32", "dropout": 0}
        shape = {"family": family.name, "vocab_size": values["vocab_size"], **names.shape(values), **fixed}
        config = resolve("gpt2-nano", shape)
        return config, {
            name: turned(names, name, tensors[names.of(name)])
            for name in model_of(config, "meta").state_dict()
        }
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError("no_exported_model", path=path, kind=type(error).__name__, error=error) from None


def turned(names: Names, name: str, tensor: Tensor) -> Tensor:
    """To the layout there, and back."""
    return tensor.t() if names.turned and names.turned.fullmatch(name) else tensor


def verified_state(path: Path, refusal: str = "checkpoint_unusable") -> checkpoint.State:
    """The state of a checkpoint whose every byte is right. Raises DataError, with the sentence `refusal`."""
    try:
        manifest.verify(path)
    except manifest.Damaged as reason:
        raise DataError(refusal, path=path, reason=reason) from None
    return checkpoint.read_state(path)


def is_exported(path: Path) -> bool:
    """By us or by others. A run has files of these names too."""
    files = (path / CONFIG, path / TOKENIZER_CONFIG)
    return all(file.is_file() for file in files) and not (path / CHECKPOINTS).is_dir()


def _is_ours(path: Path) -> bool:
    """A directory that is empty, or that `export` has written: whoever trains a model further and saves it there has
    transformers write its own version down."""
    if not path.is_dir() or not {file.name for file in path.iterdir()} <= FILES | GGUF_FILES:
        return False
    try:
        return "transformers_version" not in json.loads((path / CONFIG).read_bytes())
    except (OSError, ValueError):
        return not any(path.iterdir())


def run_of(checkpoint: Path) -> Path:
    """The directory of the run that it is of: its own, or, where a link leads to the checkpoint itself, that one's."""
    run = Path(os.path.abspath(checkpoint)).parent.parent  # noqa: PTH100  # without following links
    return run if (run / TOKENIZER).is_file() else checkpoint.resolve().parent.parent


def tokenizer_of(path: Path) -> Path:
    """The tokenizer of an exported model, or of a checkpoint: a copy lies in its run directory. Raises DataError."""
    file = (path if is_exported(path) else run_of(path)) / TOKENIZER
    if not file.is_file():
        raise DataError("run_tokenizer_missing", file=file)
    return file


def read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers has no type of its own for it
        raise DataError("tokenizer_unreadable", path=path, error=error) from None


def newest(run_dir: Path, say: Callable[[str], None]) -> Path:
    """The newest checkpoint of a run whose every byte is right; `say` hears of those that are not.

    Raises DataError when there is none.
    """
    found = newest_valid([run_dir / CHECKPOINTS], say)
    if found is None:
        raise DataError("no_checkpoint_yet", path=run_dir / CHECKPOINTS)
    return found.path
