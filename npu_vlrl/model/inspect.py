"""Inspection of a model folder before anything is loaded: its kind, and whether its files are consistent.

Every command that takes `model.path` calls it, so that all commands refuse an unsupported folder, at once and with the
same message. It reads JSON files and the headers of the weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

from npu_vlrl.config import ConfigError
from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.identify import not_a_model
from npu_vlrl.model.images import image_processor
from npu_vlrl.model.versions import normalised
from npu_vlrl.model.weight_files import AGAIN, NO_CODE, check_names, read_headers, read_object

READ_AS_JSON = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

SUFFIXES = (".safetensors", ".json", ".jinja", ".model")
TEXTS = ("merges.txt", "vocab.txt")

ELSEWHERE = (
    ("config.json", "transformers_weights"),
    ("config.json", "configuration_files"),
    ("tokenizer_config.json", "fast_tokenizer_files"),
)
"""Keys by which a file refers to another one."""

QUANTISED = ("quantization_config", "compression_config", "quantization")
"""Keys of a quantised model's config.json: of transformers, of older compressed-tensors, of MLX."""
QUANTISED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that AutoGPTQ, AutoAWQ and ModelOpt write beside config.json."""

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")

TOKENIZER, VOCABULARY = "tokenizer.json", "vocab.json"

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the length of the sequence."""


def model_files(folder: Path) -> dict[str, Path]:
    """The files of a Hugging Face folder that determine its results, by their names in it: weights, configuration,
    tokenizer, templates and processor. Links, as in caches, are followed.
    """
    there = [*folder.glob("*"), *folder.glob("*chat_templates/*")]
    found = sorted(path for path in there if path.suffix in SUFFIXES or path.name in TEXTS)
    return {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}


def quieten() -> None:
    """Turns off transformers' progress bars, and its warnings about problems that are errors here."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def inspect_folder(path: str | Path, whole: bool = True) -> Path:
    """Checks that `path` is a model folder that can be trained, and returns it.

    With `whole=False` weights and tokenizer may be absent, and only the files that exist are checked, which is enough
    for shapes.

    Raises ConfigError that names the folder, the file, the cause and the remedy.
    """
    quieten()
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {not_a_model(str(path))}")
    try:
        with os.scandir(folder) as files:
            states = ((file.name, file.stat()) for file in files if file.is_file())
            stamp = tuple(sorted((name, state.st_size, state.st_mtime_ns) for name, state in states))
    except OSError as error:
        raise ConfigError(f"model.path: cannot read {folder}: {error}; give the rights to read it") from error
    _inspect(folder, whole, stamp)
    return folder


@lru_cache(maxsize=16)
def _inspect(folder: Path, whole: bool, stamp: tuple[tuple[str, int, int], ...]) -> None:
    """Inspects a folder once for each state of its files (`stamp`), since a run inspects it several times."""
    settings = read_settings(folder)
    if adapters := [name for name in ADAPTERS if (folder / name).exists()]:
        raise ConfigError(
            f"model.path: {folder} holds an adapter ({adapters[0]}) beside the weights of a model, and programs differ "
            "in whether they add it; merge it (`merge_and_unload` of peft), or move its files elsewhere to train "
            "without it"
        )
    tensors = read_headers(folder)
    if tensors is not None:
        with explained(f"model.path: cannot make a model of {folder}"):
            check_names(folder, model_class(settings), settings, tensors)
    elif whole:
        raise ConfigError(
            f"model.path: {folder} has no weights: neither model.safetensors nor model.safetensors.index.json; "
            "download them from the model's publisher"
        )
    if FAMILIES[settings.model_type].vision is not None:
        _check_processor(folder, settings)
    if whole or any((folder / name).is_file() for name in (TOKENIZER, VOCABULARY)):
        with explained(f"model.path: cannot read the tokenizer of {folder}"):
            check_tokens(folder, settings, _tokens(folder))
        _check_template(folder)


def read_settings(folder: Path) -> Any:
    """Configuration of a folder, as transformers reads it. Raises ConfigError for a model that is not supported, is
    quantised, or contains code.
    """
    objects = {name: read_object(folder / name) for name in READ_AS_JSON if (folder / name).is_file()}
    config = objects["config.json"]
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"model.path: {folder / 'config.json'} has no `model_type`; {AGAIN}")
    if kind not in FAMILIES:
        raise ConfigError(
            f"model.path: {folder} is of the model type {kind}; supported are {', '.join(FAMILIES)}, which are "
            f"{', '.join(family.title for family in FAMILIES.values())}"
        )
    for name, key in ELSEWHERE:
        if objects.get(name, {}).get(key):
            raise ConfigError(
                f"model.path: {folder / name} names other files by `{key}`, which only some programs read; give what "
                "it names the usual name, and remove the key"
            )
    _refuse_code(folder, objects)
    _refuse_quantised(folder, config)
    with explained(f"model.path: cannot read {folder / 'config.json'}"):
        settings = normalised(AutoConfig.from_pretrained(folder, **NO_CODE))
    if problem := FAMILIES[kind].problem(settings):
        raise ConfigError(f"model.path: {folder / 'config.json'}: {problem}")
    rope = (getattr(settings.get_text_config(), "rope_parameters", None) or {}).get("rope_type")
    if rope in LENGTH_DEPENDENT:
        raise ConfigError(
            f"model.path: {folder / 'config.json'} scales rotary positions by `{rope}`, whose frequencies depend on "
            "the longest sequence of a pass, so engine and learner would disagree; use yarn or linear, or no scaling"
        )
    if "sliding_attention" in (getattr(settings.get_text_config(), "layer_types", None) or ()):
        raise ConfigError(
            f"model.path: {folder / 'config.json'} sets `use_sliding_window`, which is not supported; write false if "
            "texts stay shorter than `sliding_window`, where it changes nothing"
        )
    return settings


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns any error of libraries about a folder's files into a ConfigError that begins with `what`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # a foreign file can hold anything, and so raise any error
        raise ConfigError(f"{what}: {error or type(error).__name__}") from error


def _refuse_code(folder: Path, objects: Mapping[str, Mapping[str, Any]]) -> None:
    for name, content in objects.items():
        if content.get("auto_map"):
            raise ConfigError(
                f"model.path: {folder / name} asks for code of the folder (`auto_map`), which is never run; if the "
                "model is a plain one that needs none, remove `auto_map` from that file"
            )


def _refuse_quantised(folder: Path, config: Mapping[str, Any]) -> None:
    asked = [(f"config.json has `{key}`", value) for key, value in _quantisations(config)]
    asked += [(f"it has {name}", read_object(folder / name)) for name in QUANTISED_FILES if (folder / name).is_file()]
    if asked:
        where, settings = asked[0]
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        raise ConfigError(
            f"model.path: {folder} is quantised{f' ({method})' if method else ''}: {where}; quantised weights cannot "
            "be trained, so give the folder of the model that it was made from"
        )


def _quantisations(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings of a quantisation by dotted key, at any depth: some are in `text_config`."""
    for key, value in config.items():
        if key in QUANTISED and value is not None:
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _quantisations(value, f"{prefix}{key}.")


def _check_processor(folder: Path, settings: Any) -> None:
    family = FAMILIES[settings.model_type]
    assert family.vision is not None
    with explained(f"model.path: cannot read {folder}"):
        processor = image_processor(folder, family)
    if processor is None:
        raise ConfigError(
            f"model.path: {folder} holds a vision-language model but no preprocessor_config.json; add its publisher's"
        )
    tower, text = settings.vision_config, settings.get_text_config()
    for ours, theirs in family.vision.tower_keys.items():
        found, wanted = getattr(processor, ours), getattr(tower, theirs)
        if found != wanted:
            raise ConfigError(
                f"model.path: {folder}: the image processor cuts images by `{ours}` {found}, and config.json has "
                f"`vision_config.{theirs}` {wanted}; the preprocessor_config.json is of another model, so take that of "
                "the model's publisher"
            )
    key = family.vision.width_key
    if key is not None and getattr(tower, key) != text.hidden_size:
        raise ConfigError(
            f"model.path: {folder / 'config.json'}: `vision_config.{key}` {getattr(tower, key)} is not the "
            f"language model's `hidden_size` {text.hidden_size}; {AGAIN}"
        )


def _tokens(folder: Path) -> dict[str, int]:
    """The id of each token, from the folder's files, in a fraction of the time that making a tokenizer takes.

    Raises ConfigError for a folder without a tokenizer, or with a damaged one.
    """
    if (folder / TOKENIZER).is_file():
        tokenizer = read_object(folder / TOKENIZER)
        base, added = tokenizer.get("model"), tokenizer.get("added_tokens")
        ids = dict(base["vocab"]) if isinstance(base, dict) and isinstance(base.get("vocab"), dict) else {}
        listed = {token["content"]: token["id"] for token in added if isinstance(token, dict)} if added else {}
    elif (folder / VOCABULARY).is_file():
        ids = read_object(folder / VOCABULARY)
        file = folder / "tokenizer_config.json"
        by_id = read_object(file).get("added_tokens_decoder", {}) if file.is_file() else {}
        listed = {token["content"]: int(number) for number, token in by_id.items()}
    else:
        raise ConfigError(f"model.path: {folder} has no {TOKENIZER}; download it from the model's publisher")
    return ids | listed


def _check_template(folder: Path) -> None:
    named_in = ("tokenizer_config.json", "chat_template.json")
    files = [folder / name for name in named_in if (folder / name).is_file()]
    own = folder / "chat_template.jinja"  # takes precedence, even where it is empty
    texts = [own.read_bytes()] if own.is_file() else [read_object(file).get("chat_template") for file in files]
    if not any(texts):
        raise ConfigError(no_template(folder))


def no_template(folder: Path) -> str:
    return (
        f"model.path: {folder} has no chat template; a base model has none, so give the folder of its Instruct model, "
        "or add the publisher's chat_template.jinja"
    )


def check_tokens(folder: Path, settings: Any, ids: Mapping[str, int]) -> None:
    """Raises ConfigError for a vocabulary that the embedding has no rows for, without the family's control tokens, or
    with placeholders under other ids than config.json names.
    """
    family = FAMILIES[settings.model_type]
    chat, keys = family.chat, {} if family.vision is None else family.vision.token_ids
    if missing := [name for name in (chat.end_of_turn[0], *([chat.image] if keys else [])) if name not in ids]:
        raise ConfigError(
            f"model.path: {folder}: the tokenizer has no token {missing[0]}; use one of a {chat.title} model"
        )
    rows = settings.get_text_config().vocab_size
    if max(ids.values()) >= rows:
        raise ConfigError(
            f"model.path: {folder}: the tokenizer has ids up to {max(ids.values())}, and the model's embedding {rows} "
            "rows (`vocab_size`); take the tokenizer that the model was trained with, or resize its embedding"
        )
    for key, name in keys.items():
        token = getattr(chat, name)
        if ids.get(token, getattr(settings, key)) != getattr(settings, key):
            raise ConfigError(
                f"model.path: {folder}: {token} is {ids[token]} in the tokenizer, and `{key}` {getattr(settings, key)} "
                "in config.json; take both from the same model"
            )


def model_class(settings: Any) -> Any:
    """Class of transformers for a configuration of a known family."""
    return getattr(transformers, FAMILIES[settings.model_type].model_class)
