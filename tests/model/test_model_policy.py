"""One forward pass, packed or continued from a cache, against plain transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_vlrl.config import LoraConfig
from npu_vlrl.engines.inprocess.kv_cache import KeyValues
from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.model.positions import rotary_positions
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Message
from npu_vlrl.workflow.render import Renderer
from tests.support.episodes import an_image
from tests.support.models import KINDS, is_vision, load, loaded, plain, plain_patches, tiny_folder

CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}


class Prompt:
    """A rendered prompt with everything the policy needs."""

    def __init__(self, kind: str, *sizes: tuple[int, int], text: str = "up?") -> None:
        self.kind, model = kind, loaded(tiny_folder(kind))
        self.policy = model.policy
        images = [an_image(*size, seed) for seed, size in enumerate(sizes if is_vision(kind) else ())]
        renderer = Renderer(model.tokenizer, model.processor, template_name="tiny")
        (segment,) = renderer.open([Message("user", (*images, text))]).context
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
def test_continued_in_pieces_of_unequal_length(kind: str) -> None:
    """Contexts of three rows; then rows are saved, loaded elsewhere, repeated and moved, and the rest follows."""
    parts = prompts(kind)
    policy = parts[0].policy
    kv = KeyValues(policy, 3, 90)
    starts = [len(part.ids) - keep for part, keep in zip(parts, (3, 5, 4), strict=True)]
    hidden = step(kv, parts, [0, 0, 0], starts)
    for part, start, found in zip(parts, starts, hidden, strict=True):
        torch.testing.assert_close(found, part.expected()[:start], **CLOSE)
    caches = [
        kv.save(row, tuple(part.ids[:start]), part.images)
        for row, (part, start) in enumerate(zip(parts, starts, strict=True))
    ]
    other = KeyValues(policy, 5, 80)
    other.kv_WBLKD.fill_(1e4)  # what another turn may have left there
    other.load(4, caches[2])
    other.move(4, 0)
    other.load(1, caches[0])
    other.load(3, caches[1])
    other.repeat(1, starts[0], [2])
    order = [2, 0, 0, 1]
    parts, starts = [parts[i] for i in order], [starts[i] for i in order]
    hidden = step(other, parts, starts, [len(part.ids) for part in parts])
    for part, start, found in zip(parts, starts, hidden, strict=True):
        torch.testing.assert_close(found, part.expected()[start:], **CLOSE)
    whole = other.save(1, tuple(parts[1].ids), parts[1].images)
    layers, heads, width = policy.kv_shape
    assert whole.kv_WTKD.shape == (2 * layers, len(parts[1].ids), heads, width)
    assert whole.n_bytes == len(parts[1].ids) * KeyValues.bytes_per_token(policy) == whole.kv_WTKD.numel() * 4


def step(kv: KeyValues, parts: list[Prompt], starts: list[int], ends: list[int]) -> list[torch.Tensor]:
    """Feeds the first rows their ids from start to end; returns the hidden states of each."""
    news = [end - start for start, end in zip(starts, ends, strict=True)]
    rows = CacheRows.of(torch.tensor(ends, dtype=torch.int32), news, kv.room, max(ends))
    hidden = parts[0].policy.hidden_continued(
        torch.tensor([i for part, a, b in zip(parts, starts, ends, strict=True) for i in part.ids[a:b]]),
        torch.cat([part.positions[:, a:b] for part, a, b in zip(parts, starts, ends, strict=True)], 1),
        kv.kept(rows),
        [features for part, start in zip(parts, starts, strict=True) if start == 0 for features in part.features],
    )
    return list(hidden.split(news))


def test_the_places_of_new_tokens_by_hand() -> None:
    """Rows with room for 10: one has 7 tokens, 3 of them new, the other 4, 2 of them new."""
    rows = CacheRows.of(torch.tensor([7, 4], dtype=torch.int32), [3, 2], 10, 7)
    assert rows.slots().tolist() == [4, 5, 6, 12, 13] and rows.cu_q == (0, 3, 5)
    alone = CacheRows.of(torch.tensor([7, 4], dtype=torch.int32), [1, 1], 10, 7)
    assert alone.slots().tolist() == [6, 13]


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
