"""One look at a model folder before anything is loaded: what it is, and whether its files fit each other.

Every command that takes `model.path` comes through here, so that a folder which cannot be trained is refused by all of
them, at once and in the same words. Read are JSON files, the tokenizer and the headers of the weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from npu_vlrl.config import ConfigError
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.model.identify import not_a_model
from npu_vlrl.model.tokens import IMAGE, special_tokens
from npu_vlrl.model.weight_files import AGAIN, check_head, check_names, read_headers, read_object

VISION_MODELS: dict[str, Any] = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}
TEXT_MODELS: dict[str, Any] = {"qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
SUPPORTED = VISION_MODELS | TEXT_MODELS
"""transformers' class by `model_type`."""

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""For everything that transformers reads from a folder: it neither runs the folder's code nor asks whether it may."""

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

QUANTISED = ("quantization_config", "compression_config", "quantization")
"""Keys of a config.json: transformers', that of older compressed-tensors, MLX's."""
QUANTISED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""What AutoGPTQ, AutoAWQ and ModelOpt write beside it."""

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")

OF_THE_TOWER = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Settings of the image processor, and what `vision_config` calls them."""

PLACEHOLDERS = {
    "image_token_id": IMAGE,
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def inspect_folder(path: str | Path, whole: bool = True) -> Path:
    """Checks that `path` is a model folder that can be trained, and returns it.

    With `whole=False` weights and tokenizer may be absent, and only what is there is checked: enough for shapes.

    Raises ConfigError that names the folder, the file, the cause and the remedy.
    """
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
    """Once for each state of the folder's files (`stamp`): a run asks several times."""
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
            check_names(folder, SUPPORTED[settings.model_type], settings, tensors)
        if settings.tie_word_embeddings:
            check_head(folder, tensors)
    elif whole:
        raise ConfigError(
            f"model.path: {folder} has no weights: neither model.safetensors nor model.safetensors.index.json; "
            "download them from the model's publisher"
        )
    if settings.model_type in VISION_MODELS:
        _check_processor(folder, settings)
    if whole or any(stamped[0] in ("tokenizer.json", "vocab.json") for stamped in stamp):
        _check_tokens(folder, settings)


def read_settings(folder: Path) -> Any:
    """transformers' configuration of a folder. Raises ConfigError for a model that is not supported, or quantised, or
    brings code of its own.
    """
    objects = {name: read_object(folder / name) for name in READ_AS_JSON if (folder / name).is_file()}
    config = objects["config.json"]
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"model.path: {folder / 'config.json'} has no `model_type`; {AGAIN}")
    if kind not in SUPPORTED:
        raise ConfigError(
            f"model.path: {folder} is a {kind}; supported are {', '.join(SUPPORTED)}, which are "
            "Qwen2.5-VL, Qwen3-VL and the text models Qwen2, Qwen2.5 and Qwen3"
        )
    _refuse_code(folder, objects)
    _refuse_quantised(folder, config)
    with explained(f"model.path: cannot read {folder / 'config.json'}"):
        settings = AutoConfig.from_pretrained(folder, **NO_CODE)
    if "sliding_attention" in (getattr(settings.get_text_config(), "layer_types", None) or ()):
        raise ConfigError(
            f"model.path: {folder / 'config.json'} sets `use_sliding_window`, which is not supported; write false if "
            "texts stay shorter than `sliding_window`, where it changes nothing"
        )
    return settings


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, with its chat template. Raises ConfigError."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ConfigError(f"model.path: {folder} has no tokenizer.json; download it from the model's publisher")
    with explained(f"model.path: cannot read the tokenizer of {folder}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **NO_CODE)
    file = folder / "chat_template.json"  # of processors; tokenizers do not read it
    if tokenizer.chat_template is None and file.is_file():
        tokenizer.chat_template = read_object(file).get("chat_template")
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.path: {folder} has no chat template; a base model has none, so give the folder of its Instruct "
            "model, or add the publisher's chat_template.jinja"
        )
    return tokenizer


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns whatever libraries raise about a folder's files into a ConfigError that begins with `what`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # a file of others can hold anything, and so any error comes back
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
    """Settings of a quantisation by dotted key, at any depth: some stand in `text_config`."""
    for key, value in config.items():
        if key in QUANTISED and value is not None:
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _quantisations(value, f"{prefix}{key}.")


def _check_processor(folder: Path, settings: Any) -> None:
    with explained(f"model.path: cannot read {folder}"):
        processor = ImageProcessor.from_folder(folder)
    if processor is None:
        raise ConfigError(
            f"model.path: {folder} holds a vision-language model but no preprocessor_config.json; add its publisher's"
        )
    tower, text = settings.vision_config, settings.get_text_config()
    for ours, theirs in OF_THE_TOWER.items():
        found, wanted = getattr(processor, ours), getattr(tower, theirs)
        if found != wanted:
            raise ConfigError(
                f"model.path: {folder}: the image processor cuts pictures by `{ours}` {found}, and config.json has "
                f"`vision_config.{theirs}` {wanted}; the preprocessor_config.json is of another model, so take that of "
                "the model's publisher"
            )
    if tower.out_hidden_size != text.hidden_size:
        raise ConfigError(
            f"model.path: {folder / 'config.json'}: `vision_config.out_hidden_size` {tower.out_hidden_size} is not the "
            f"language model's `hidden_size` {text.hidden_size}; {AGAIN}"
        )


def _check_tokens(folder: Path, settings: Any) -> None:
    """The vocabulary fits the embedding, and placeholders have the ids that config.json names."""
    tokenizer = load_tokenizer(folder)
    with_images = settings.model_type in VISION_MODELS
    with explained("model.path"):
        special_tokens(tokenizer, with_images, owner=str(folder))
    ids = tokenizer.get_vocab()
    rows = settings.get_text_config().vocab_size
    if max(ids.values()) >= rows:
        raise ConfigError(
            f"model.path: {folder}: the tokenizer has ids up to {max(ids.values())}, and the model's embedding {rows} "
            "rows (`vocab_size`); take the tokenizer that the model was trained with, or resize its embedding"
        )
    for key, token in PLACEHOLDERS.items() if with_images else ():
        if ids.get(token, getattr(settings, key)) != getattr(settings, key):
            raise ConfigError(
                f"model.path: {folder}: {token} is {ids[token]} in the tokenizer, and `{key}` {getattr(settings, key)} "
                "in config.json; take both from the same model"
            )
    with explained(f"model.path: the chat template of {folder} cannot be read"):
        _parse_template(tokenizer)


def _parse_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises jinja2.TemplateSyntaxError. Whether it can say what an episode says is found out where it is used."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except jinja2.TemplateSyntaxError:
        raise
    except Exception:  # other roles or parts may please it
        return
