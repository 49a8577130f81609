"""Parts for tests of rendering: real processors, and a reference render that does not go through `Renderer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import transformers
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from npu_vlrl.types import Image, ImageInput, Message, Segment, SegmentKind, SpecialTokens, StopReason
from npu_vlrl.workflow.render import Renderer
from tests.support.tokenizers import qwen_tokenizer, template

VISION_TEMPLATES = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_thinking": 16, "qwen3_5_think": 16}
"""Patch size by template; those of thinking models rewrite history."""
IMAGE_PAD = 151655


@cache
def image_processor(patch: int) -> Qwen2VLImageProcessorPil:
    unit = (2 * patch) ** 2
    return Qwen2VLImageProcessorPil(size={"shortest_edge": unit, "longest_edge": 16 * unit}, patch_size=patch)


class Describer:
    """Grids by the resizing rule of the transformers image processor."""

    def __init__(self, patch: int) -> None:
        self.patch = patch

    def describe(self, image: Image) -> ImageInput:
        width, height = image.size
        size = image_processor(self.patch).size
        high, wide = smart_resize(height, width, 2 * self.patch, size["shortest_edge"], size["longest_edge"])
        grid = (1, high // self.patch, wide // self.patch)
        return ImageInput(image, grid, grid[1] * grid[2] // 4)


@cache
def renderer(name: str) -> Renderer:
    describer = Describer(VISION_TEMPLATES[name]) if name in VISION_TEMPLATES else None
    return Renderer(qwen_tokenizer(), describer, template_name=name, chat_template=template(name))


def an_image(width: int = 56, height: int = 56, seed: int = 0) -> Image:
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def action(ids: Iterable[int], special: SpecialTokens) -> Segment:
    """An ACTION with made-up logprobs; whether it was cut is seen from its last id."""
    ids = tuple(ids)
    ended = ids[-1:] and ids[-1] in special.end_of_turn
    reason = StopReason.END_OF_TURN if ended else StopReason.TURN_BUDGET
    logprobs, versions = (-0.5,) * len(ids), (0,) * len(ids)
    return Segment(SegmentKind.ACTION, ids, special, logprobs=logprobs, weight_versions=versions, stop_reason=reason)


def words(text: str) -> list[int]:
    """The tokenizer's own ids of a text."""
    return qwen_tokenizer()(text, add_special_tokens=False)["input_ids"]


def flat(context: Sequence[Segment]) -> list[int]:
    return [token for segment in context for token in segment.token_ids]


def as_dicts(name: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the transformers documentation writes them: lists of parts for vision models, strings for others."""

    def part(item: str | Image) -> dict[str, str]:
        return {"type": "image"} if isinstance(item, Image) else {"type": "text", "text": item}

    if name in VISION_TEMPLATES:
        return [{"role": message.role, "content": [part(item) for item in message.parts]} for message in messages]
    return [{"role": message.role, "content": message.text} for message in messages]


def reference_ids(name: str, messages: Sequence[Message], tools: list[Any] | None = None, **options: Any) -> list[int]:
    """What transformers makes of the whole conversation, with each placeholder expanded by the processor's count."""
    rendered: Any = qwen_tokenizer().apply_chat_template(
        as_dicts(name, messages),
        tools=tools,
        chat_template=template(name),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **options,
    )
    sizes = [image.size for message in messages for image in message.images]
    assert rendered.count(IMAGE_PAD) == len(sizes)
    ids: list[int] = []
    for token in rendered:
        if token == IMAGE_PAD:
            width, height = sizes.pop(0)
            patches = image_processor(VISION_TEMPLATES[name]).get_number_of_image_patches(height, width, {})
            ids += [token] * (patches // 4)
        else:
            ids.append(token)
    return ids


@cache
def processor(name: str) -> Any:
    """The published processor class, for images only: its video half would need torchvision."""
    published: Any = transformers.Qwen2_5_VLProcessor if name == "qwen2_5_vl" else transformers.Qwen3VLProcessor

    class ImagesOnly(published):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is not None:
                return super().check_argument_for_proper_class(argument_name, argument)

    parts = {"image_processor": image_processor(VISION_TEMPLATES[name]), "tokenizer": qwen_tokenizer()}
    return ImagesOnly(**parts, video_processor=None, chat_template=template(name))
