"""A trained model as one file that llama.cpp reads, and what is built on it: ollama (with a Modelfile), LM Studio.

Matrices are in 16 bits, or in 8 with a scale for 32 of them; the rest is in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor

from aura.config import TrainConfig
from aura.corpus.corpus import read_corpus
from aura.corpus.special_tokens import TOKENS, is_tuned
from aura.errors import ConfigError, DataError
from aura.families.known import FAMILIES
from aura.model import llama_cpp

FORMATS = ("F16", "Q8_0")
MODELFILE = "Modelfile"
SAMPLE, PIECE = 100_000, 500  # tokens of a file of the corpus, and of one text that is compared
SHOWN = 80  # characters of a text
KNOWN_OF_MODEL = ("model.type", "model.vocab", "model.merges")  # all else has to be off
AS_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens there


def name_of(kind: str) -> str:
    return f"model-{kind}.gguf"


def check(config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where llama.cpp has no such model, or is not known to make the same ids of every text."""
    if not FAMILIES[config.family].names.gguf:
        raise ConfigError("no_gguf_of_family", family=config.family)
    if unknown := sorted(not_known_there(json.loads(tokenizer.to_str()))):
        raise ConfigError("no_gguf_of_tokenizer", parts=", ".join(unknown))


def not_known_there(made: dict[str, Any]) -> set[str]:
    """The parts of a tokenizer.json that are other than llama.cpp's "gpt-2" is known to have them.

    Known: tried with every character that Unicode 15 has. Letters that are newer are cut in other places.
    """
    model, cut = made["model"], made["pre_tokenizer"] or {}
    unlike = {f"model.{name}" for name, value in model.items() if value} - set(KNOWN_OF_MODEL)
    vocabulary = model["vocab"] if model["type"] == "BPE" else {}
    if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        unlike.add("model.vocab")  # it lacks bytes, or is of another kind
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    if len(set(merges)) < len(merges):
        unlike.add("model.merges")  # the first of two counts there, the last here
    if {"use_regex": True, **cut, "trim_offsets": True} != AS_GPT2:
        unlike.add("pre_tokenizer")
    if made["normalizer"]:
        unlike.add("normalizer")
    odd = [
        repr(token["content"])
        for token in made["added_tokens"]
        if {name for name, value in token.items() if value is True} - {"normalized"} != {"special"}
    ]
    if odd:
        unlike.add(f"added_tokens ({', '.join(odd[:3])}{', …' if len(odd) > 3 else ''})")
    return unlike


def compare_ids(file: Path, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Those that llama.cpp makes of these texts with this GGUF, where it is installed. Raises ConfigError where one is
    another."""
    if not (texts and llama_cpp.is_installed()):
        return
    try:
        theirs = llama_cpp.token_ids(file, texts)
    except ValueError as error:
        raise ConfigError("gguf_not_read", error=error) from None
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    ours = [encoding.ids for encoding in plain.encode_batch(list(texts), add_special_tokens=False)]
    if unlike := [text for text, one, other in zip(texts, ours, theirs, strict=True) if one != other]:
        raise ConfigError("gguf_ids_differ", count=len(unlike), of=len(texts), text=repr(unlike[0][:SHOWN]))


def sample_of_corpus(path: Path, fingerprint: str, tokenizer: Tokenizer) -> list[str]:
    """The beginning of the validation text, of every part, in pieces; none where the corpus is not there any more."""
    try:
        corpus = read_corpus(path)
    except (DataError, OSError):
        return []
    if corpus.fingerprint != fingerprint:
        return []
    pieces = []
    for entry in corpus.files["validation"]:
        ids = np.fromfile(path / entry["name"], f"<u{corpus.bytes_per_token}", SAMPLE)
        pieces += [ids[begin : begin + PIECE].tolist() for begin in range(0, len(ids), PIECE)]
    return tokenizer.decode_batch(pieces)


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
    """What `ollama create` reads, beside this file. How a dialogue is written down it finds in the file."""
    template = "" if is_tuned(special) else 'TEMPLATE """{{ .Prompt }}"""\n'
    return f"FROM ./{file}\n{template}"
