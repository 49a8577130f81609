"""Inputs of vLLM: each image is one placeholder, which vLLM expands again, and has the size at which it is cut into
patches, so that vLLM does not resize it: other libraries round pixels differently.
"""

from __future__ import annotations

import PIL.Image

from npu_vlrl.data.images import MAX_ASPECT
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.engines.base import Request
from npu_vlrl.types import Image


def collapsed(request: Request, placeholder: int | None) -> list[int]:
    """The ids with one placeholder for each image.

    Raises ValueError when the runs of placeholders are not those to which the images expand.
    """
    ids, images, at = [], iter(request.images), 0
    while at < len(request.token_ids):
        token = request.token_ids[at]
        ids.append(token)
        size = 1
        if token == placeholder:
            image = next(images, None)
            size = image.n_tokens if image is not None else 0
            if not size or request.token_ids[at : at + size] != (placeholder,) * size:
                raise ValueError(f"the placeholders at token {at} of the context are not those of its next image")
        at += size
    if next(images, None) is not None:
        raise ValueError("the context has more images than runs of placeholders")
    return ids


def size_limits(processor: ImageProcessor) -> dict[str, int]:
    """Limits of the areas that vLLM does not resize; they include all results of `resized_image`."""
    block = processor.patch_size * processor.merge_size
    narrow = MAX_ASPECT * block**2  # an image one block wide is not shortened to max_pixels
    return {"shortest_edge": processor.min_pixels, "longest_edge": max(processor.max_pixels, narrow)}


def resized_image(processor: ImageProcessor, image: Image) -> PIL.Image.Image:
    """The image at the size at which it is cut into patches. Raises ValueError for one that vLLM takes at no size."""
    rgb = processor.resized(image)
    height, width = rgb.shape[:2]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(
            f"vLLM takes no image whose sides are as {max(height, width) // min(height, width)} to 1; crop it"
        )
    return PIL.Image.fromarray(rgb)
