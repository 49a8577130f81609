"""Image processor of a model folder: ours where it computes the same bits, and otherwise transformers' own."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import PIL.Image
import torch
import transformers

from npu_vlrl.data.processor import BACKENDS, ImageProcessor, check_kind, read_settings, widened
from npu_vlrl.model.families import Family
from npu_vlrl.model.families.base import Grid
from npu_vlrl.types import Image

KNOWN_GRIDS = 2**16
"""Number of images whose grids are cached; the oldest are evicted."""


def image_processor(folder: Path, family: Family) -> ImageProcessor | None:
    """Image processor with a folder's settings; None for a text-only model, and for a folder without settings.

    Raises ValueError, naming file and key, for a file that cannot be read or has unsupported settings.
    """
    facts = family.vision
    found = None if facts is None else read_settings(folder)
    if facts is None or found is None:
        return None
    if facts.fast_images:
        processor = ImageProcessor.from_folder(folder)
        assert processor is not None
        return dataclasses.replace(processor, position_scale=facts.position_scale)
    return transformers_images(folder, family, *found)


def transformers_images(folder: Path, family: Family, settings: dict[str, Any], file: Path) -> TransformersImages:
    """Image processor of transformers, with its settings in `file`. Raises ValueError as `image_processor` does."""
    assert family.vision is not None
    check_kind(settings, file, family.vision.image_processors)
    config = json.loads((folder / "config.json").read_bytes())
    try:
        sizes = family.image_sizes(settings, config)
        scale = family.vision.position_scale
        return TransformersImages(**sizes, position_scale=scale, family=family, settings=settings)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{file}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class TransformersImages(ImageProcessor):
    """Computes grid and patches with transformers' processor, both at the first call for an image."""

    family: Family = field(kw_only=True)
    settings: dict[str, Any] = field(kw_only=True, repr=False)
    """Content of preprocessor_config.json."""
    _grids: dict[str, Grid] = field(default_factory=dict, init=False, repr=False, compare=False)

    def _grid(self, image: Image) -> Grid:
        if image.hash not in self._grids:
            self._keep(image.hash, self._encode(image))
        return self._grids[image.hash]

    def _encode(self, image: Image) -> torch.Tensor:
        facts = self.family.vision
        assert facts is not None
        options = dict(facts.image_options) | self.limits()
        pixels = PIL.Image.fromarray(widened(image))
        output = self._processor(images=[pixels], return_tensors="pt", **options)
        patches_PD, self._grids[image.hash] = self.family.read_pixels(output, self.patch_size)
        if len(self._grids) > KNOWN_GRIDS:
            del self._grids[next(iter(self._grids))]
        return patches_PD

    def limits(self) -> dict[str, Any]:
        return self.family.image_limits(self.min_pixels, self.max_pixels, self.settings)

    @cached_property
    def _processor(self) -> Any:
        """Processor of transformers, with the backend that needs no torchvision."""
        kind = self.settings["image_processor_type"]
        for backend in BACKENDS[1:]:
            kind = kind.removesuffix(backend)
        return getattr(transformers, f"{kind}Pil")(**self.settings)
