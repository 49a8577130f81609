"""Writes models, tokenizers and processor files in the layout of the published folders.

transformers 5 has a layout of its own: `rope_parameters`, `extra_special_tokens`, an image processor inside
processor_config.json. transformers 4, which many servers still run, silently ignores those keys or fails on them.
Published folders of the Qwen families have the older layout, and both generations read that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.model.families import FAMILIES

PLAIN_ROPE = ("default", "axial")
"""Rope types without a scaling. transformers 5 calls that of vision towers `axial`; transformers 4 has no name for it.
"""

OLDER_KEYS = {"num_local_experts": "num_experts"}
"""Keys of transformers 5, with those of published files, which both generations read."""

TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Names of transformers 5, with those that both generations know."""

PROCESSOR_PARTS = {
    "image_processor": "preprocessor_config.json",
    "video_processor": "video_preprocessor_config.json",
}
"""Parts of processor_config.json, with the files that both generations read them from."""


def save_model(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Writes config and weights of a transformers model; `weights`, by the names of its modules, replace its own.

    In the configs of the whole and of the text model `tie_word_embeddings` is set to whether the head is the embedding.
    """
    mixture = FAMILIES[model.config.model_type].mixture
    if mixture is not None and mixture.transposed:
        # transformers' own way back finds the shapes of its modules, and so transposes nothing
        tensors = model.state_dict() if weights is None else weights
        published = {
            name: tensor.transpose(1, 2) if f".{mixture.experts}." in name else tensor
            for name, tensor in tensors.items()
        }
        model.save_pretrained(folder, state_dict=published, save_original_format=False)
    else:
        model.save_pretrained(folder, state_dict=weights)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    _rewrite(folder / "config.json", lambda config: published_config(config, tied))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer with its chat template."""
    tokenizer.save_pretrained(folder)
    _rewrite(folder / "tokenizer_config.json", published_tokenizer)


def split_processor(folder: Path) -> None:
    """Moves the parts of processor_config.json to files of their own, and replaces existing ones."""
    file = folder / "processor_config.json"
    if not file.is_file():
        return
    whole = json.loads(file.read_bytes())
    for part, name in PROCESSOR_PARTS.items():
        if isinstance(whole.get(part), dict):
            _write(folder / name, whole.pop(part))
    _write(file, whole)


def write_pixel_limits(folder: Path, processor: ImageProcessor) -> None:
    """Writes the limits of images, and the name of the class without a backend of transformers 5."""

    def change(settings: dict[str, Any]) -> dict[str, Any]:
        kind = settings["image_processor_type"].removesuffix("Pil")
        return settings | processor.limits() | {"image_processor_type": kind}

    _rewrite(folder / "preprocessor_config.json", change)


def published_config(config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """Converts a config.json of transformers 5 to the published layout."""
    published = dict(config)
    for name, part in config.items():
        if name.endswith("_config") and isinstance(part, dict):
            published[name] = {OLDER_KEYS.get(key, key): value for key, value in _without_rope_parameters(part).items()}
    if "text_config" in published:  # transformers 4 looks there, transformers 5 in the whole
        published["text_config"]["tie_word_embeddings"] = tied
    return _without_rope_parameters(published) | {"tie_word_embeddings": tied}


def published_tokenizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a tokenizer_config.json of transformers 5 to the published layout."""
    published = dict(settings)
    if isinstance(published.get("extra_special_tokens"), list):
        published["additional_special_tokens"] = published.pop("extra_special_tokens")
    name = published["tokenizer_class"]
    return published | {"tokenizer_class": TOKENIZER_CLASSES.get(name, name)}


def _without_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Moves base frequency and scaling from `rope_parameters` to keys of their own; without a scaling `rope_scaling` is
    null."""
    published = dict(config)
    rope = dict(published.pop("rope_parameters", None) or {})
    if not rope:
        return published
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            published[key] = rope.pop(key)
    plain = rope.keys() <= {"rope_type", "type"} and rope.get("rope_type", "default") in PLAIN_ROPE
    return published | {"rope_scaling": None if plain else rope}


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    _write(file, change(json.loads(file.read_bytes())))


def _write(file: Path, settings: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
