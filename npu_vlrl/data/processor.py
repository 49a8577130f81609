"""Image processor of the Qwen vision towers: resizes, normalises and cuts images into patches.

Bit-equal to transformers' `Qwen2VLImageProcessorPil` (a test compares them), without its dependencies, so that engine
and learner share one function for the number of tokens of an image.

P = patches of an image, ordered merge block by merge block, so that merge_size**2 neighbours form one token.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch

from npu_vlrl.data.images import check_size, padded
from npu_vlrl.types import Image, ImageInput

_FAMILIES = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
BACKENDS = ("", "Fast", "Pil")
"""Suffixes of the names of transformers' processor classes."""
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ImageProcessor:
    """Preprocessing of one model; the defaults are those of published Qwen2.5-VL models.

    Example: `ImageProcessor().describe(Image(np.zeros((56, 56, 3), np.uint8))).grid == (1, 4, 4)`
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 3136
    max_pixels: int = 12845056
    """Upper limit of the area; an image is resized to between min_pixels and max_pixels."""
    mean: tuple[float, ...] = _CLIP_MEAN
    std: tuple[float, ...] = _CLIP_STD
    """Standard deviations of red, green and blue, after `rescale`."""
    rescale: float = 1 / 255
    resample: int = 3
    """Number of a Pillow filter; 3 is bicubic."""
    position_scale: int | None = None
    """Coordinate of the right and lower border of any image in the model's text; None: pixels of the resized image."""
    cache_bytes: int = 256 << 20
    """Bytes of encoded images that are cached, evicted least recently used first; 0 caches none."""
    _cache: OrderedDict[str, torch.Tensor] = field(default_factory=OrderedDict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        for name in ("mean", "std"):
            value = getattr(self, name)
            if len(value) != 3 or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in value):
                raise ValueError(f"{name} needs a number for each of red, green, blue, got {value!r}")
        if 0 in self.std:
            raise ValueError(f"std must not hold a zero, got {self.std!r}")
        if type(self.resample) is not int or self.resample not in set(PIL.Image.Resampling):
            raise ValueError(f"resample must be one of Pillow's filters 0 to 5, got {self.resample!r}")

    @classmethod
    def from_folder(cls, path: Path) -> ImageProcessor | None:
        """Reads the settings stored beside a Hugging Face model; None for a folder without any (a text-only model).

        As in transformers, `image_processor` inside processor_config.json goes before preprocessor_config.json.
        Raises ValueError, naming file and key, for a file that cannot be read or asks for something else.
        """
        found = read_settings(path)
        return found and _from_settings(*found)

    def describe(self, image: Image) -> ImageInput:
        """Computes grid and token count of an image without reading a pixel. Raises DataError as `check_size` does."""
        check_size(*image.size, "an image")  # whoever made it: here it would first take the memory
        grid = self._grid(image)
        return ImageInput(image, grid, math.prod(grid) // self.merge_size**2)

    def patches(self, image_input: ImageInput) -> torch.Tensor:
        """Patches of an image, float32 [P, 3 * temporal_patch_size * patch_size**2]; the cache shares them: read-only.

        Raises ValueError when `image_input` was described under other settings.
        """
        expected = self.describe(image_input.image)
        if image_input != expected:
            raise ValueError(f"the image was described as {image_input.grid}, these settings give {expected.grid}")
        key = image_input.image.hash
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        encoded = self._encode(image_input.image)
        self._keep(key, encoded)
        return encoded

    def _keep(self, key: str, encoded: torch.Tensor) -> None:
        if encoded.nbytes <= self.cache_bytes:
            self._cache[key] = encoded
        while sum(kept.nbytes for kept in self._cache.values()) > self.cache_bytes:
            self._cache.popitem(last=False)

    def _grid(self, image: Image) -> tuple[int, int, int]:
        """Number of patches (time, height, width)."""
        height, width = self._size(*padded(*image.size))
        return 1, height // self.patch_size, width // self.patch_size

    def limits(self) -> dict[str, Any]:
        """Pixel limits in the form of preprocessor_config.json. Without torchvision, transformers 4.57 reads the first
        two and takes a default in the place of `size`.
        """
        size = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels, "size": size}

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """(height, width) in whole merge blocks, with an area inside the limits and nearly the same aspect ratio."""
        block = self.patch_size * self.merge_size
        rows, columns = round(height / block), round(width / block)
        if rows * columns * block**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / block))
            columns = max(1, math.floor(width / shrink / block))
        elif rows * columns * block**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / block), math.ceil(width * grow / block)
        return rows * block, columns * block

    def resized(self, image: Image) -> np.ndarray:
        """The image at the size that is cut into patches, uint8 [height, width, 3]; resizing is idempotent."""
        rgb = widened(image)
        height, width = self._size(rgb.shape[1], rgb.shape[0])
        return np.asarray(PIL.Image.fromarray(rgb).resize((width, height), PIL.Image.Resampling(self.resample)))

    def _encode(self, image: Image) -> torch.Tensor:
        """Patches of pixels, float32 [P, 3 * temporal * patch * patch]."""
        rgb = self.resized(image)
        patch, merge = self.patch_size, self.merge_size
        rows, columns = rgb.shape[0] // patch // merge, rgb.shape[1] // patch // merge
        blocks = rgb.reshape(rows, merge, patch, columns, merge, patch, 3)
        pixels_P = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)
        values_P = self._levels()[np.arange(3)[:, None, None], pixels_P]
        frames_P = np.repeat(values_P[:, :, None], self.temporal_patch_size, axis=2)
        return torch.from_numpy(frames_P.reshape(len(pixels_P), -1))

    def _levels(self) -> np.ndarray:
        """Normalised value of each level of each colour, float32 [3, 256]; rounded after each step, as in
        transformers.
        """
        levels = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = np.array(self.mean, np.float32)[:, None], np.array(self.std, np.float32)[:, None]
        return (levels - mean) / std


def widened(image: Image) -> np.ndarray:
    """The image padded with white where it is too narrow, uint8 [height, width, 3]. The padding is right and below, so
    that a box in pixels keeps its coordinates.
    """
    width, height = padded(*image.size)
    if (width, height) == image.size:
        return image.rgb
    rgb = np.full((height, width, 3), 255, np.uint8)
    rgb[: image.size[1], : image.size[0]] = image.rgb
    return rgb


def read_settings(path: Path) -> tuple[dict[str, Any], Path] | None:
    """Settings of a folder's image processor, and their file; None where there are none.

    As in transformers, `image_processor` inside processor_config.json goes before preprocessor_config.json. Raises
    ValueError for a file that cannot be read.
    """
    for name in ("processor_config.json", "preprocessor_config.json"):
        file = path / name
        if not file.is_file():
            continue
        settings = _read_json(file)
        if name == "processor_config.json":
            if "image_processor" not in settings:
                continue
            settings = settings["image_processor"]
        if not isinstance(settings, dict):
            raise ValueError(f"{file}: `image_processor` must be an object, got {settings!r}")
        return settings, file
    return None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error}); copy the file from the model's publisher again") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: an object is expected; copy the file from the model's publisher again")
    return settings


def check_kind(settings: Mapping[str, Any], file: Path, families: Sequence[str]) -> None:
    """Raises ValueError for a processor class that is none of `families`, with or without a backend's name."""
    kind, known = settings.get("image_processor_type"), [name + backend for name in families for backend in BACKENDS]
    if kind not in known:
        raise ValueError(f"{file}: `image_processor_type` is {kind!r}; supported are {', '.join(known)}")


def _from_settings(settings: dict[str, Any], file: Path) -> ImageProcessor:
    check_kind(settings, file, _FAMILIES)
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if settings.get(key, True) is not True:
            raise ValueError(f"{file}: `{key}` is {settings[key]!r}; only true is supported")
    rescale = settings.get("rescale_factor", 1 / 255)
    if isinstance(rescale, bool) or not isinstance(rescale, (int, float)):
        raise ValueError(f"{file}: `rescale_factor` must be a number, got {rescale!r}")
    for key in ("image_mean", "image_std"):
        if not isinstance(settings.get(key, []), list):
            raise ValueError(f"{file}: `{key}` must be a list of three numbers, got {settings[key]!r}")
    smallest, largest = _pixel_limits(settings, file)
    try:
        return ImageProcessor(
            patch_size=settings.get("patch_size", 14),
            temporal_patch_size=settings.get("temporal_patch_size", 2),
            merge_size=settings.get("merge_size", 2),
            min_pixels=smallest,
            max_pixels=largest,
            mean=tuple(settings.get("image_mean", _CLIP_MEAN)),
            std=tuple(settings.get("image_std", _CLIP_STD)),
            rescale=rescale,
            resample=settings.get("resample", 3),
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _pixel_limits(settings: Mapping[str, Any], file: Path) -> tuple[Any, Any]:
    """(min_pixels, max_pixels) of the settings. Older files name them, and these win; newer ones hold areas, called
    edges, in `size`.
    """
    size = settings.get("size") or {}
    if not isinstance(size, dict) or not set(size) <= {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}:
        raise ValueError(f"{file}: `size` is {size!r}; it needs `shortest_edge` and `longest_edge` (areas in pixels)")
    limits = []
    for old, new, default in (("min_pixels", "shortest_edge", 3136), ("max_pixels", "longest_edge", 1003520)):
        given = [value for value in (settings.get(old), size.get(new), size.get(old)) if value is not None]
        limits.append(given[0] if given else default)
    return limits[0], limits[1]
