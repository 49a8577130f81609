"""Rotary positions against `get_rope_index` of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.model.positions import rotary_positions
from npu_vlrl.types import ImageInput
from tests.support.episodes import an_image
from tests.support.models import VISION_KINDS, plain, tiny_folder

PIXELS = an_image(28, 28, 0)
TEXT = 7

merged = st.tuples(st.integers(1, 6), st.integers(1, 6))
# runs of text between images; at least one token lies between two of them, as the templates write it
layouts = st.tuples(st.integers(0, 5), st.lists(st.tuples(merged, st.integers(1, 5)), max_size=4), st.booleans())


def build(layout: tuple, placeholder: int) -> tuple[list[int], list[ImageInput]]:
    start, parts, ends_with_image = layout
    ids, images = [TEXT] * start, []
    for index, ((height, width), text) in enumerate(parts):
        images.append(ImageInput(PIXELS, (1, 2 * height, 2 * width), height * width))
        ids += [placeholder] * (height * width)
        ids += [TEXT] * (0 if ends_with_image and index == len(parts) - 1 else text)
    return ids or [TEXT], images


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_equal_to_transformers(kind: str) -> None:
    core = plain(tiny_folder(kind)).model
    placeholder = core.config.image_token_id

    @settings(max_examples=60)
    @given(layouts)
    def check(layout: tuple) -> None:
        ids, images = build(layout, placeholder)
        tokens = torch.tensor([ids])
        expected, _ = core.get_rope_index(
            tokens,
            mm_token_type_ids=(tokens == placeholder).int(),
            image_grid_thw=torch.tensor([image.grid for image in images]) if images else None,
            attention_mask=torch.ones_like(tokens),
        )
        found = rotary_positions(ids, images, placeholder, 2)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, expected[:, 0].numpy())

    check()


def test_by_hand() -> None:
    """Two words, an image of 2 x 3 tokens, one word."""
    image = ImageInput(PIXELS, (1, 4, 6), 6)
    assert rotary_positions([TEXT, TEXT, *[9] * 6, TEXT], [image], 9, 2).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


def test_a_text_only_model_counts_tokens() -> None:
    assert rotary_positions([5, 9, 5], [], None, 2).tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("ids", [[TEXT, 9, 9, 9], [TEXT], [9] * 5])
def test_placeholders_that_do_not_fit_the_images(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"\d placeholder tokens for images of \[4\] tokens"):
        rotary_positions(ids, [ImageInput(PIXELS, (1, 4, 4), 4)], 9, 2)
