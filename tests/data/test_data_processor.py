"""Our image path against transformers' own, bit for bit."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.tasks.photo import load_photos
from npu_vlrl.types import Image, ImageInput

torch.set_num_threads(1)

HALF = (0.5, 0.5, 0.5)
QWEN25 = ImageProcessor()
QWEN25_SMALL = ImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 12)
QWEN3 = ImageProcessor(patch_size=16, min_pixels=65536, max_pixels=16777216, mean=HALF, std=HALF)
QWEN3_SMALL = ImageProcessor(patch_size=16, min_pixels=32 * 32 * 2, max_pixels=32 * 32 * 16, mean=HALF, std=HALF)


def theirs(ours: ImageProcessor) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=ours.patch_size,
        size={"shortest_edge": ours.min_pixels, "longest_edge": ours.max_pixels},
        image_mean=list(ours.mean),
        image_std=list(ours.std),
    )


def noise(width: int, height: int, seed: int = 0) -> Image:
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def assert_equal(ours: ImageProcessor, image: Image, seen: np.ndarray) -> None:
    """`seen` is what transformers is given: the same image, or the same padded with white."""
    expected = theirs(ours)(images=[seen], return_tensors="pt", input_data_format="channels_last")
    described = ours.describe(image)
    assert [list(described.grid)] == expected["image_grid_thw"].tolist()
    assert described.n_tokens == described.grid[1] * described.grid[2] // 4
    patches = ours.patches(described)
    assert patches.dtype == torch.float32 and patches.shape[0] == described.grid[1] * described.grid[2]
    assert torch.equal(patches, expected["pixel_values"])


@pytest.mark.parametrize("ours", [QWEN25, QWEN25_SMALL, QWEN3_SMALL], ids=["qwen25", "qwen25_small", "qwen3_small"])
@given(width=st.integers(1, 230), height=st.integers(1, 230))
@settings(max_examples=25, deadline=None)
@example(width=42, height=70)  # 1.5 and 2.5 blocks: rounding goes to even
@example(width=56, height=56)
def test_any_size_equals_transformers(ours: ImageProcessor, width: int, height: int) -> None:
    ratio = max(width, height) / min(width, height)
    if ratio <= 200:
        image = noise(width, height, width * 1000 + height)
        assert_equal(ours, image, image.rgb)


def test_published_qwen3_limits_and_a_real_photograph() -> None:
    for photo in load_photos()[1:2]:
        assert_equal(QWEN3, photo, photo.rgb)
        assert_equal(QWEN25, photo, photo.rgb)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (27, 257), (257, 27), (1, 200), (2000, 11)])
def test_extreme_but_legal_shapes(width: int, height: int) -> None:
    assert_equal(QWEN25_SMALL, noise(width, height), noise(width, height).rgb)


@pytest.mark.parametrize(
    ("width", "height", "padded"),
    # The shorter side grows to longest / 200, rounded up.
    [(2275, 10, (2275, 12)), (10, 2275, (12, 2275)), (1, 201, (2, 201)), (1, 1000, (5, 1000)), (401, 2, (401, 3))],
)
def test_shapes_over_200_are_padded_with_white(width: int, height: int, padded: tuple[int, int]) -> None:
    image = noise(width, height)
    with pytest.raises(ValueError, match="aspect ratio"):
        theirs(QWEN25)(images=[image.rgb], input_data_format="channels_last")
    white = np.full((padded[1], padded[0], 3), 255, np.uint8)
    white[:height, :width] = image.rgb
    for ours in (QWEN25, QWEN3_SMALL):
        assert_equal(ours, image, white)


def test_the_comparison_can_fail() -> None:
    image, other = noise(60, 60, 1), noise(60, 60, 1).rgb.copy()
    other[30, 30] ^= 128
    with pytest.raises(AssertionError):
        assert_equal(QWEN25, image, other)
    with pytest.raises(AssertionError):
        assert_equal(ImageProcessor(resample=2), image, image.rgb)


def test_patch_values_by_hand() -> None:
    """Two tokens side by side; the first row of the fifth patch is the top left corner of the second token."""
    rgb = np.zeros((28, 56, 3), np.uint8)
    rgb[0, 28] = (255, 51, 0)
    ours = ImageProcessor(min_pixels=28 * 56, mean=HALF, std=HALF)
    described = ours.describe(Image(rgb))
    assert (described.grid, described.n_tokens) == ((1, 2, 4), 2)
    values = ours.patches(described).reshape(8, 3, 2, 14, 14)  # patch, colour, time, row, column
    assert values[4, :, 0, 0, 0].tolist() == pytest.approx([1.0, -0.6, -1.0])
    assert values[4, :, 1, 0, 0].tolist() == pytest.approx([1.0, -0.6, -1.0])
    assert (values == -1).sum() == values.numel() - 4


def test_a_56_pixel_image_is_four_tokens_and_limits_bound_the_area() -> None:
    assert QWEN25.describe(noise(56, 56)) == ImageInput(noise(56, 56), (1, 4, 4), 4)
    rows, columns = QWEN25_SMALL.describe(noise(400, 300)).grid[1:]
    assert rows * columns * 14 * 14 <= 28 * 28 * 12 and columns > rows


def test_patches_of_another_models_description_are_refused() -> None:
    with pytest.raises(ValueError, match=r"described as \(1, 4, 4\), these settings give"):
        QWEN3.patches(QWEN25.describe(noise(56, 56)))


def test_pixels_are_encoded_once_for_equal_content() -> None:
    ours = ImageProcessor()
    first, again, other = noise(56, 56, 1), noise(56, 56, 1), noise(56, 56, 2)
    tensor = ours.patches(ours.describe(first))
    assert ours.patches(ours.describe(again)) is tensor
    assert not torch.equal(ours.patches(ours.describe(other)), tensor)


def test_the_cache_is_bounded_least_recently_used_first_and_keeps_no_image() -> None:
    one = 16 * 3 * 2 * 14 * 14 * 4  # bytes of a 56x56 image
    ours = ImageProcessor(cache_bytes=2 * one)
    a, b, c = (noise(56, 56, seed) for seed in range(3))
    tensor_a, tensor_b = ours.patches(ours.describe(a)), ours.patches(ours.describe(b))
    assert ours.patches(ours.describe(a)) is tensor_a  # b is now the oldest
    ours.patches(ours.describe(c))
    assert ours.patches(ours.describe(a)) is tensor_a
    assert ours.patches(ours.describe(b)) is not tensor_b
    dying = weakref.ref(c)
    del c
    gc.collect()
    assert dying() is None


@pytest.mark.parametrize("cache_bytes", [0, 1000])
def test_an_image_larger_than_the_cache_is_not_kept(cache_bytes: int) -> None:
    ours = ImageProcessor(cache_bytes=cache_bytes)
    described = ours.describe(noise(56, 56))
    assert torch.equal(ours.patches(described), ours.patches(described)) and not ours._cache


def test_memory_stays_flat_over_many_large_images() -> None:
    ours = ImageProcessor(max_pixels=28 * 28 * 64, cache_bytes=4 << 20)
    refs = []
    for seed in range(64):
        image = noise(300, 300, seed)
        ours.patches(ours.describe(image))
        refs.append(weakref.ref(image))
        assert sum(tensor.nbytes for tensor in ours._cache.values()) <= 4 << 20
    del image
    gc.collect()
    assert len(ours._cache) >= 2 and not any(ref() for ref in refs)


OLD = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
NEW = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def folder(tmp_path: Path, settings: object, name: str = "preprocessor_config.json") -> Path:
    (tmp_path / name).write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return tmp_path


def test_published_settings(tmp_path: Path) -> None:
    assert ImageProcessor.from_folder(folder(tmp_path, OLD)) == QWEN25
    assert ImageProcessor.from_folder(folder(tmp_path, NEW)) == QWEN3


def test_what_transformers_writes_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    theirs(QWEN25_SMALL).save_pretrained(tmp_path)
    assert ImageProcessor.from_folder(tmp_path) == QWEN25_SMALL
    bare = folder(tmp_path, {"image_processor_type": "Qwen2VLImageProcessor"})
    expected = Qwen2VLImageProcessorPil.from_pretrained(bare)
    ours = ImageProcessor.from_folder(bare)
    assert ours is not None
    assert (ours.min_pixels, ours.max_pixels) == (expected.size["shortest_edge"], expected.size["longest_edge"])
    assert (ours.patch_size, ours.resample, ours.mean) == (14, expected.resample, tuple(expected.image_mean))


def test_old_limits_win_over_size(tmp_path: Path) -> None:
    both = OLD | {"size": {"shortest_edge": 1, "longest_edge": 2}}
    assert ImageProcessor.from_folder(folder(tmp_path, both)) == QWEN25
    assert Qwen2VLImageProcessorPil.from_pretrained(tmp_path).size["longest_edge"] == 12845056


def test_nested_settings_win(tmp_path: Path) -> None:
    folder(tmp_path, OLD)
    folder(tmp_path, {"image_processor": NEW, "processor_class": "Qwen3VLProcessor"}, "processor_config.json")
    assert ImageProcessor.from_folder(tmp_path) == QWEN3
    folder(tmp_path, {"processor_class": "Qwen2_5_VLProcessor"}, "processor_config.json")
    assert ImageProcessor.from_folder(tmp_path) == QWEN25


def test_a_text_only_folder_has_none(tmp_path: Path) -> None:
    assert ImageProcessor.from_folder(tmp_path) is None
    folder(tmp_path, {"processor_class": "X"}, "processor_config.json")
    assert ImageProcessor.from_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "an object is expected"),
        (OLD | {"image_processor_type": "CLIPImageProcessor"}, "`image_processor_type` is 'CLIPImageProcessor'"),
        ({"patch_size": 14}, "`image_processor_type` is None"),
        (OLD | {"do_resize": False}, "`do_resize` is False"),
        (OLD | {"do_normalize": None}, "`do_normalize` is None"),
        (OLD | {"size": {"height": 224, "width": 224}}, "`size` is .*shortest_edge"),
        (OLD | {"size": 224}, "`size` is 224"),
        (OLD | {"patch_size": "14"}, "patch_size must be a positive integer, got '14'"),
        (OLD | {"merge_size": 0}, "merge_size must be a positive integer"),
        (OLD | {"min_pixels": 99999999}, "min_pixels 99999999 is above max_pixels"),
        (OLD | {"image_mean": [0.5]}, "mean needs a number for each"),
        (OLD | {"image_std": [0.5, "x", 1]}, "std needs a number for each"),
        (OLD | {"image_std": [0.5, 0, 1]}, "std must not hold a zero"),
        (OLD | {"image_std": 0.5}, "`image_std` must be a list"),
        (OLD | {"resample": 9}, "resample must be one of"),
        (OLD | {"rescale_factor": "x"}, "`rescale_factor` must be a number"),
    ],
)
def test_unsupported_settings_name_file_and_key(tmp_path: Path, settings: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {words}"):
        ImageProcessor.from_folder(folder(tmp_path, settings))


def test_a_broken_nested_object(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="processor_config.json: `image_processor` must be an object"):
        ImageProcessor.from_folder(folder(tmp_path, {"image_processor": 3}, "processor_config.json"))
