"""Builds the configured model as names and shapes on the device `meta`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from npu_vlrl.config import ConfigError, ModelConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.estimate import PUBLISHED
from npu_vlrl.model.families import FAMILIES, TINY
from npu_vlrl.model.load import DTYPES, arranged, limited, load_processor, model_folder, outline
from npu_vlrl.model.policy import Policy
from npu_vlrl.types import SpecialTokens


@dataclass(frozen=True)
class Outline:
    policy: Policy
    """Policy on the device `meta`, with frozen parts and adapters as configured."""
    processor: ImageProcessor | None
    """Image processor; None for a text-only model."""


def published_models() -> list[str]:
    return sorted(folder.name for folder in PUBLISHED.iterdir() if folder.is_dir())


def outline_of(config: ModelConfig) -> Outline:
    """Outline of the model in the config.json of `model.path`. A missing folder with the name of a published model has
    that model's shapes.

    Raises ConfigError for any other missing folder.
    """
    whole = config.model_copy(update={"min_pixels": None, "max_pixels": None})
    policy, processor = _outline(whole)
    return Outline(policy, processor and limited(processor, config))


@lru_cache(maxsize=16)
def _outline(config: ModelConfig) -> tuple[Policy, ImageProcessor | None]:
    """Outline by cached configuration: pixel limits change no shape of a model, which takes a second to build."""
    with tempfile.TemporaryDirectory(prefix="npu_vlrl_") as scratch:
        folder = shapes_folder(config.path, Path(scratch))
        model = arranged(outline(folder, DTYPES[config.dtype]), config)
        settings = model.config
        family = FAMILIES[settings.model_type]
        processor = load_processor(config, folder, family)
    # which ids end a turn changes no shape either
    special = SpecialTokens(end_of_turn=(0,), image=getattr(settings, "image_token_id", None))
    merge = processor.merge_size if processor else 2
    return Policy(model, special, settings.get_text_config().vocab_size, merge), processor


def shapes_folder(path: str, scratch: Path) -> Path:
    """Folder with the config.json of `path`. Raises ConfigError."""
    if path.startswith(TINY) or Path(path).exists():
        return model_folder(path, scratch, seed=0, whole=False)
    if Path(path).name in published_models():
        return PUBLISHED / Path(path).name
    raise ConfigError(
        f"model.path: {path} has no config.json, and is not called like a model whose shapes are known here "
        f"({', '.join(published_models())}); give the folder of a downloaded model, or one of these names"
    )
