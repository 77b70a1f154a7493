"""Which tokens of a tokenizer mean something: tokenizer_config.json beside tokenizer.json, as transformers has it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from aura.corpus.corpus import END_OF_TEXT, META, TOKENIZER_CONFIG, special_of
from aura.errors import ConfigError

PAD = "<|pad|>"
SPECIAL_TOKENS, TEMPLATE_FILE = "special_tokens_map.json", "chat_template.jinja"
TOKENS = ("bos_token", "eos_token", "pad_token")
# Under which names other tokenizers have these tokens, where no configuration tells.
ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
PADS = (PAD, "<pad>", "[PAD]", "<|padding|>")


def settings_of(directory: Path) -> dict[str, Any]:
    """What stands beside a tokenizer, a token always as its text; empty where nothing does. Raises ConfigError."""
    settings: dict[str, Any] = {}
    for name in (META, SPECIAL_TOKENS, TOKENIZER_CONFIG):
        file = directory / name
        if file.is_file():
            try:
                said = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError("no_json", file=file, error=error) from None
            if name != META:
                settings |= _checked(said, file)
            # Of a corpus, and not of something else by that name
            elif isinstance(said, dict) and "end_of_text" in said:
                settings |= special_of(said)
    if (directory / TEMPLATE_FILE).is_file():  # where today's transformers writes it
        settings["chat_template"] = (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
    return settings


def _checked(said: Any, file: Path) -> dict[str, Any]:
    """A token always as its text. Raises ConfigError."""
    if not isinstance(said, dict):
        raise ConfigError("tokens_are_no_texts", file=file)
    for name in TOKENS:
        if isinstance(token := said.get(name), dict):
            said[name] = token.get("content")
        if not isinstance(said.get(name), str | None):
            raise ConfigError("tokens_are_no_texts", file=file)
    return said


def special_tokens(directory: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """bos_token, eos_token, pad_token and chat_template, as far as this tokenizer has them. Raises ConfigError."""
    if not (directory / TOKENIZER_CONFIG).is_file():  # a run of an earlier release
        return _guessed(tokenizer)
    settings = settings_of(directory)
    template = settings.get("chat_template")
    found = {name: settings.get(name) for name in TOKENS}
    special = {
        name: token for name, token in found.items() if token and tokenizer.token_to_id(token) is not None
    }
    return special | ({"chat_template": template} if isinstance(template, str) else {})


def is_tuned(special: Mapping[str, Any]) -> bool:
    """Has a model with these learnt to answer? Its texts are dialogues then, and no token stands before them."""
    return {"chat_template", "eos_token"} <= special.keys()


def _guessed(tokenizer: Tokenizer) -> dict[str, str]:
    """A tokenizer without a padding token pads with the end of the text, as is usual for GPT-2."""

    def first(tokens: tuple[str, ...]) -> str | None:
        return next((token for token in tokens if tokenizer.token_to_id(token) is not None), None)

    end = first(ENDS)
    tokens = {"bos_token": end, "eos_token": end, "pad_token": first(PADS) or end}
    return {name: token for name, token in tokens.items() if token is not None}


def count_ids(tokenizer: Tokenizer) -> int:
    """The rows that it needs: its largest id and one, which is more than its tokens where its ids have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def with_special_tokens(tokenizer: Tokenizer, tokens: Iterable[str]) -> Tokenizer:
    """It, with these; a new one gets the id behind the largest.

    `tokenizers` gives it the number of tokens, which in a vocabulary with gaps is another token's id, but leaves it the
    id that it has in the model's vocabulary.
    """
    tokens = list(dict.fromkeys(tokens))
    free = count_ids(tokenizer)
    described = json.loads(tokenizer.to_str())
    has_gaps = free > tokenizer.get_vocab_size(with_added_tokens=True)
    if has_gaps and isinstance(described["model"]["vocab"], dict):  # a list has none
        new = [token for token in tokens if tokenizer.token_to_id(token) is None]
        described["model"]["vocab"] |= {token: free + number for number, token in enumerate(new)}
        tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens(tokens)
    return tokenizer
