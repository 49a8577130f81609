"""One forward pass, packed or continued from a cache, against plain transformers."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from npu_vlrl.config import LoraConfig
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.model.positions import rotary_positions
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.rollout.kv import BatchCache
from npu_vlrl.types import Message
from npu_vlrl.workflow.render import Renderer
from tests.support.episodes import picture
from tests.support.models import KINDS, is_vision, load, loaded, plain, plain_patches, tiny_folder

CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}


class Prompt:
    """A rendered prompt with everything the policy needs."""

    def __init__(self, kind: str, *sizes: tuple[int, int], text: str = "up?") -> None:
        self.kind, model = kind, loaded(tiny_folder(kind))
        self.policy = model.policy
        pictures = [picture(*size, seed) for seed, size in enumerate(sizes if is_vision(kind) else ())]
        renderer = Renderer(model.tokenizer, model.processor, template_name="tiny")
        (segment,) = renderer.open([Message("user", (*pictures, text))]).context
        self.images, self.ids = segment.images, list(segment.token_ids)
        self.features = VisionFeatures(model.policy, model.processor, 0).fixed(self.images)
        self.positions = torch.from_numpy(rotary_positions(self.ids, self.images, self.policy.special.image, 2))

    def expected(self) -> torch.Tensor:
        """Hidden states by the untouched model, which finds positions by itself."""
        folder, ids = tiny_folder(self.kind), torch.tensor([self.ids])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.images:
            inputs |= plain_patches(folder, [image.image.rgb for image in self.images])
            inputs["mm_token_type_ids"] = torch.eq(ids, self.policy.special.image or -1).int()
        with torch.no_grad():
            return plain(folder).model(**inputs, use_cache=False).last_hidden_state[0]


def prompts(kind: str) -> list[Prompt]:
    return [Prompt(kind, (60, 90), (30, 30)), Prompt(kind, text="Which way?"), Prompt(kind, (112, 56))]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_packed(kind: str) -> None:
    parts = prompts(kind)
    hidden = parts[0].policy.hidden_packed(
        torch.tensor([token for part in parts for token in part.ids]),
        torch.cat([part.positions for part in parts], 1),
        Tree.of_sequences([0, *accumulate(len(part.ids) for part in parts)]),
        [features for part in parts for features in part.features],
    )
    torch.testing.assert_close(hidden, torch.cat([part.expected() for part in parts]), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_continued_in_pieces_of_unequal_length(kind: str) -> None:
    """Rows are padded on both sides of the cached part, and rows are dropped, repeated and reordered in between."""
    parts = prompts(kind)
    first = parts[0]
    cache = BatchCache([None] * 3, torch.device("cpu"))
    starts = [len(part.ids) - keep for part, keep in zip(parts, (3, 5, 4), strict=True)]
    hidden = [step(cache, parts, [0, 0, 0], starts)]
    cache.select(torch.tensor([2, 0, 1, 0]))
    parts = [parts[2], parts[0], parts[1], parts[0]]
    starts = [starts[2], starts[0], starts[1], starts[0]]
    rows = [
        cache.row(index, tuple(part.ids[:start]), part.images)
        for index, (part, start) in enumerate(zip(parts, starts, strict=True))
    ]
    cache = BatchCache(rows, torch.device("cpu"))
    ends = [len(part.ids) for part in parts]
    hidden.append(step(cache, parts, starts, ends))
    for index, (part, start) in enumerate(zip(parts, starts, strict=True)):
        expected = part.expected()[start:]
        torch.testing.assert_close(hidden[1][index, : len(expected)], expected, **CLOSE)
    whole = cache.row(1, tuple(first.ids), first.images)
    assert whole.kv.shape[2] == len(first.ids) and whole.images == first.images


def step(cache: BatchCache, parts: list[Prompt], starts: list[int], ends: list[int]) -> torch.Tensor:
    """Feeds each row its ids from start to end, padded on the right."""
    news = [end - start for start, end in zip(starts, ends, strict=True)]
    ids = torch.zeros(len(parts), max(news), dtype=torch.long)
    positions = torch.zeros(3, len(parts), max(news), dtype=torch.long)
    valid = torch.zeros(len(parts), max(news), dtype=torch.bool)
    features: list[torch.Tensor] = []
    for row, (part, start, end) in enumerate(zip(parts, starts, ends, strict=True)):
        ids[row, : end - start] = torch.tensor(part.ids[start:end])
        positions[:, row, : end - start] = part.positions[:, start:end]
        valid[row, : end - start] = True
        features += part.features if start == 0 else []
    return parts[0].policy.hidden_cached(ids, positions, features, cache.mask_for(valid), cache.cache)


def test_the_mask_of_a_batch_by_hand() -> None:
    """Row 0 holds two columns, row 1 one; then two and one new tokens come."""
    kv = torch.zeros(2, 1, 2, 4)
    rows: list[Any] = [
        type("Row", (), {"token_ids": (1, 2), "kv": kv})(),
        type("Row", (), {"token_ids": (1,), "kv": kv[:, :, :1]})(),
    ]
    cache = BatchCache(rows, torch.device("cpu"))
    assert cache.valid_BK.tolist() == [[True, True], [False, True]]
    mask = cache.mask_for(torch.tensor([[True, True], [True, False]]))
    assert mask.int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]], [[0, 1, 1, 0], [0, 1, 1, 0]]]
    cache.select(torch.tensor([1]))
    assert cache.valid_BK.tolist() == [[False, True, True, False]]


def test_features_that_do_not_fit_the_placeholders() -> None:
    part = Prompt("qwen2_5_vl", (60, 90))
    with pytest.raises(ValueError, match="6 image placeholder tokens, but features of 5"):
        part.policy.hidden_packed(
            torch.tensor(part.ids),
            part.positions,
            Tree.of_sequences([0, len(part.ids)]),
            [features[:-1] for features in part.features],
        )


@pytest.mark.parametrize("kind", KINDS)
def test_forbidden_ids_are_placeholders_and_padding(kind: str) -> None:
    model = loaded(tiny_folder(kind))
    words = ("<|image_pad|>", "<|video_pad|>") if is_vision(kind) else ()
    expected = {model.tokenizer.convert_tokens_to_ids(word) for word in words}
    expected |= set(range(len(model.tokenizer), model.policy.base.config.get_text_config().vocab_size))
    assert set(model.policy.forbidden_V.nonzero()[:, 0].tolist()) == expected


@torch.no_grad()
def test_the_policy_without_its_adapter_is_the_model_before_it() -> None:
    part = Prompt("qwen3_vl", (60, 90))
    policy = load(tiny_folder("qwen3_vl"), lora=LoraConfig(rank=2)).policy
    inputs = (torch.tensor(part.ids), part.positions, Tree.of_sequences([0, len(part.ids)]), part.features)
    for parameter in policy.trainable().values():
        parameter.fill_(0.1)
    with policy.without_adapter():
        torch.testing.assert_close(policy.hidden_packed(*inputs), part.expected(), **CLOSE)
    assert (policy.hidden_packed(*inputs) - part.expected()).abs().max() > 0.1
