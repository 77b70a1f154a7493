"""A trained model as one file that llama.cpp reads, and what is built on it: ollama (with a Modelfile), LM Studio.

Matrices are in 16 bits, or in 8 with a scale for 32 of them; the rest is in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from aura.config import TrainConfig
from aura.corpus import chatml
from aura.corpus.special_tokens import TOKENS, is_tuned
from aura.errors import ConfigError
from aura.families.known import FAMILIES

FORMATS = ("F16", "Q8_0")
MODELFILE = "Modelfile"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens there


def name_of(kind: str) -> str:
    return f"model-{kind}.gguf"


def check(config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where llama.cpp has no such model, or would cut text in another way."""
    if not FAMILIES[config.family].names.gguf:
        raise ConfigError("no_gguf_of_family", family=config.family)
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    cut = made["pre_tokenizer"] or {}
    as_gpt2 = cut.get("type") == "ByteLevel" and cut.get("use_regex", True) and not cut["add_prefix_space"]
    if made["model"]["type"] != "BPE" or made["normalizer"] or not as_gpt2:
        raise ConfigError("no_gguf_of_tokenizer")


def write(
    path: Path,
    kind: str,
    config: TrainConfig,
    parameters: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    rows: int,
    special: Mapping[str, str],
) -> None:
    """`parameters`: ours, with `rows` for the words; `special`: what special_tokens says."""
    import gguf

    names = FAMILIES[config.family].names
    values = names.config(config)
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == names.model_type)
    writer = gguf.GGUFWriter(path, names.model_type)
    writer.add_name(config.preset or config.family)
    writer.add_context_length(config.seq_len)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_feed_forward_length(values.get("intermediate_size", 4 * config.d_model))
    writer.add_vocab_size(rows)
    for key, asked in names.gguf.items():
        getattr(writer, f"add_{asked}")(values[key])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    _add_tokenizer(writer, tokenizer, rows, special)
    theirs = gguf.get_tensor_name_map(architecture, config.layers)
    for name, tensor in parameters.items():
        numbers = tensor.detach().float().cpu().numpy()
        wanted = gguf.GGMLQuantizationType.F32
        # Positions are added and never multiplied: llama.cpp's own converter leaves them as they are.
        if tensor.dim() == 2 and name != "wpe.weight":
            eight = kind == "Q8_0" and tensor.shape[1] % 32 == 0
            wanted = gguf.GGMLQuantizationType.Q8_0 if eight else gguf.GGMLQuantizationType.F16
        called = theirs.get_name(names.of(name), try_suffixes=(".weight", ".bias"))
        writer.add_tensor(called, gguf.quants.quantize(numbers, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, rows: int, special: Mapping[str, str]) -> None:
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    words = {number: (word, NORMAL) for word, number in tokenizer.get_vocab(with_added_tokens=False).items()}
    for token in made["added_tokens"]:
        words[token["id"]] = (token["content"], CONTROL if token["special"] else USER_DEFINED)
    listed = [words.get(number, (f"[unused{number}]", UNUSED)) for number in range(rows)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([word for word, _ in listed])
    writer.add_token_types([kind for _, kind in listed])
    merges = made["model"]["merges"]  # older files have "a b" in place of ["a", "b"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name in TOKENS:
        if name in special:
            getattr(writer, f"add_{name}_id")(tokenizer.token_to_id(special[name]))
    if is_tuned(special):
        writer.add_eot_token_id(tokenizer.token_to_id(special["eos_token"]))
        writer.add_chat_template(special["chat_template"])
    # A document begins after the end of another, as `aura sample` has it too; a dialogue with nothing.
    writer.add_add_bos_token("bos_token" in special and not is_tuned(special))


def modelfile(file: str, special: Mapping[str, str]) -> str:
    """What `ollama create` reads, beside this file. In Go's template language the same as in chatml.py."""
    if not is_tuned(special):
        return f'FROM ./{file}\nTEMPLATE """{{{{ .Prompt }}}}"""\n'
    message = f"{chatml.BEGIN}{{{{ .Role }}}}\n{{{{ .Content }}}}{chatml.END}\n"
    template = f"{{{{- range .Messages }}}}{message}{{{{ end }}}}{chatml.opened('assistant')}"
    return f'FROM ./{file}\nTEMPLATE """{template}"""\nPARAMETER stop "{special["eos_token"]}"\n'
