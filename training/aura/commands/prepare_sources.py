"""What `aura prepare --input` and `--dataset` name, as sources (aura/corpus/sources.py, mixture.py)."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from pathlib import Path

from aura.corpus.catalogue import DATASETS
from aura.corpus.corpus import META
from aura.corpus.mixture import Mixture, Part
from aura.corpus.shards import Workplace
from aura.corpus.sources import HubDataset, LocalFiles, Source
from aura.errors import ConfigError
from aura.texts.console import put

# A judgement: nobody has measured these for Spanish. Up to 65,536, a token id takes two bytes.
ONE_LANGUAGE, MORE_LANGUAGES = 32_768, 49_152
OF_DATASETS = ("dataset_config", "dataset_split", "dataset_revision")


def source_of(arguments: Namespace) -> Source:
    """Raises ConfigError, DataError."""
    if arguments.input:
        _refuse_flags(arguments, "flag_of_datasets", *OF_DATASETS)
        return _files(arguments, arguments.input)
    if len(arguments.dataset) > 1:
        _refuse_flags(arguments, "flag_of_one_dataset", "dataset_config", "dataset_revision")
        return Mixture([_part(arguments, *_weighed(word)) for word in arguments.dataset])
    (name,) = arguments.dataset
    _refuse_flags(arguments, "flag_of_files", "documents_per_line")
    return _dataset(arguments, name, arguments.dataset_config, arguments.dataset_revision)


def _refuse_flags(arguments: Namespace, key: str, *names: str) -> None:
    """Raises ConfigError where one of them is given."""
    for name in names:
        if getattr(arguments, name):
            raise ConfigError(key, flag=f"--{name.replace('_', '-')}")


def usual_vocabulary(names: list[str]) -> int:
    """Of a tokenizer that is trained on this. The datasets with a name are Spanish; others may be in any language."""
    known = [
        _weighed(name)[0].partition("@")[0].partition(":")[0] in DATASETS for name in names if len(names) > 1
    ]
    return ONE_LANGUAGE if all(known) else MORE_LANGUAGES


def _weighed(word: str) -> tuple[str, float]:
    """'fineweb2-es=0.7' in two. Raises ConfigError."""
    name, equals, number = word.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = 0
    if not (equals and name and 0 < weight < math.inf):
        raise ConfigError("part_without_weight", part=word)
    return name, weight


def _part(arguments: Namespace, name: str, weight: float) -> Part:
    """Files or directories, read as --input reads them, or NAME:CONFIG@COMMIT, both of which may be left out."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111  # Path's own raises where there is no home
    if name not in DATASETS and path.exists():
        return Part(path.name, weight, _files(arguments, [path]))
    name, _, revision = name.partition("@")
    dataset, _, config = name.partition(":")
    return Part(name, weight, _dataset(arguments, dataset, config or None, revision or None))


def _files(arguments: Namespace, paths: list[Path]) -> LocalFiles:
    place = Workplace(arguments.output)
    # A directory of text may hold the corpus; one that is named for both is refused when the corpus is made.
    made = [] if place.output in [path.resolve() for path in paths] else [place.output, place.path]
    column, per_line = arguments.dataset_column, arguments.documents_per_line
    return LocalFiles(paths, column, per_line, put, strict=_needs_all(arguments), made=made)


def _needs_all(arguments: Namespace) -> bool:
    """Otherwise some of the text need not be used, or a corpus may be there that was made without some of it."""
    some = arguments.dataset or arguments.max_errors or arguments.dataset_max_tokens
    return not (some or (arguments.output / META).exists())


def _dataset(arguments: Namespace, name: str, config: str | None, revision: str | None) -> HubDataset:
    """Raises ConfigError where it would read what is written into it."""
    output, path = arguments.output.resolve(), Path(name).resolve()
    if path.is_dir() and output.is_relative_to(path):
        raise ConfigError("output_in_input", output=output, path=path)
    return HubDataset(name, config, arguments.dataset_split, arguments.dataset_column, revision)
