"""Features: encoded once, forgotten with the weights, kept within their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import ImageInput
from tests.support.episodes import an_image
from tests.support.models import VISION_KINDS, load, loaded, plain, plain_patches, tiny_folder

SIZES = [(60, 90), (112, 40), (28, 28), (56, 56)]


def make(kind: str, cache_bytes: int = 2**24, **settings: bool) -> tuple[VisionFeatures, list[ImageInput]]:
    model = load(tiny_folder(kind), **settings)
    assert model.processor is not None
    images = [model.processor.describe(an_image(*size, seed)) for seed, size in enumerate(SIZES)]
    return VisionFeatures(model.policy, model.processor, cache_bytes), images


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_features_equal_those_of_transformers(kind: str) -> None:
    vision, images = make(kind)
    with torch.no_grad():
        output = plain(tiny_folder(kind)).model.get_image_features(
            **plain_patches(tiny_folder(kind), [image.image.rgb for image in images]), return_dict=True
        )
    deep = getattr(output, "deepstack_features", None) or []
    assert len(deep) == (kind == "qwen3_vl")
    width = output.pooler_output[0].shape[1]
    for part, of_images in enumerate([output.pooler_output, *deep]):
        found = torch.cat([features[:, part * width : (part + 1) * width] for features in vision.fixed(images)])
        expected = torch.cat(tuple(of_images)).view(-1, width)  # of each image, or in 5.10 of all of them
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for features, image in zip(vision.fixed(images), images, strict=True):
        assert features.shape == (image.n_tokens, width * (1 + len(deep)))


@pytest.mark.parametrize("cut", [False, True])
def test_deep_features_of_all_images_or_of_each(monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    """transformers 5.10 gives one tensor of all, 5.24 cuts it into images."""
    vision, images = make("qwen3_vl", cache_bytes=0)
    expected = vision.fixed(images)
    published = vision.policy.core.get_image_features

    def otherwise(*arguments: Any, **keywords: Any) -> Any:
        output = published(*arguments, **keywords)
        (deep,) = output.deepstack_features
        whole = deep if isinstance(deep, torch.Tensor) else torch.cat(list(deep))
        output.deepstack_features = [whole.split([image.n_tokens for image in images]) if cut else whole]
        return output

    monkeypatch.setattr(vision.policy.core, "get_image_features", otherwise)
    assert all(torch.equal(a, b) for a, b in zip(vision.fixed(images), expected, strict=True))


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_each_image_is_encoded_once(kind: str) -> None:
    vision, (a, b, c, _) = make(kind)
    first = vision.fixed([a, b, a])
    assert vision.encoded == 2 and vision.referenced == 3
    second = vision.fixed([c, b, a])
    assert vision.encoded == 3 and vision.referenced == 6
    assert torch.equal(first[0], first[2]) and torch.equal(first[0], second[2]) and torch.equal(first[1], second[1])
    assert [len(features) for features in second] == [image.n_tokens for image in (c, b, a)]
    assert not any(features.requires_grad for features in first)
    assert vision.fixed([]) == [] and vision.encoded == 3


def test_a_trained_tower_forgets_when_the_weights_change() -> None:
    vision, (a, *_) = make("qwen2_5_vl")
    (old,) = vision.fixed([a])
    assert vision.policy.vision is not None
    with torch.no_grad():
        for parameter in vision.policy.vision.parameters():
            parameter.mul_(1.1)
    assert torch.equal(vision.fixed([a])[0], old)
    vision.weights_changed()
    (new,) = vision.fixed([a])
    assert vision.encoded == 2 and (new - old).abs().max() > 1e-3


def test_a_frozen_tower_keeps_features_across_steps() -> None:
    vision, images = make("qwen2_5_vl", freeze_vision=True)
    assert vision.policy.vision_is_frozen
    old = vision.fixed(images)
    vision.weights_changed()
    for before, now in zip(old, vision.differentiable(images), strict=True):
        assert torch.equal(before, now) and not now.requires_grad
    assert vision.encoded == len(images) and vision.referenced == 2 * len(images)


@pytest.mark.parametrize("freeze_vision", [True, False])
def test_memory_is_bounded_least_recently_used_first(freeze_vision: bool) -> None:
    vision, (a, b, c, d) = make("qwen2_5_vl", freeze_vision=freeze_vision)
    size = {image.image.hash: image.n_tokens * 64 * 4 for image in (a, b, c, d)}
    vision.cache_bytes = size[a.image.hash] + size[b.image.hash] + size[c.image.hash]
    vision.fixed([a, b, c])
    vision.fixed([a])
    assert vision.encoded == 3
    found = vision.fixed([d, a])  # b, not seen for longest, has to go
    assert [len(features) for features in found] == [d.n_tokens, a.n_tokens]
    assert vision.encoded == 4
    kept = sum(features.numel() * features.element_size() for features in vision._kept.values())
    assert 0 < kept <= vision.cache_bytes
    vision.fixed([a, c, d])
    assert vision.encoded == 4
    vision.fixed([b])
    assert vision.encoded == 5


def test_nothing_is_kept_with_a_bound_of_zero() -> None:
    vision, (a, b, *_) = make("qwen2_5_vl", cache_bytes=0, freeze_vision=True)
    once = vision.fixed([a, b, a])
    assert vision.encoded == 2
    torch.testing.assert_close(vision.fixed([a])[0], once[0], atol=1e-5, rtol=1e-5)
    assert vision.encoded == 3


def test_a_trained_tower_gets_gradients_for_each_image() -> None:
    vision, images = make("qwen3_vl")
    features = vision.differentiable(images[:2])
    torch.cat(features).square().sum().backward()
    assert vision.policy.vision is not None
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in vision.policy.vision.parameters())
    assert vision.encoded == vision.referenced == 2


def test_images_for_a_text_only_model_are_refused() -> None:
    model = loaded(tiny_folder("qwen3"))
    image = ImageInput(an_image(28, 28, 0), (1, 2, 2), 1)
    with pytest.raises(ValueError, match="use a VL model"):
        VisionFeatures(model.policy, model.processor, 0).fixed([image])
    with pytest.raises(AssertionError, match="text-only"):
        model.policy.encode(torch.zeros(4, 1176), [image.grid])
