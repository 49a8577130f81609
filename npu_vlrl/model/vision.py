"""Vision features: each distinct image goes through the tower once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from npu_vlrl.model.policy import Policy
from npu_vlrl.types import ImageInput


class Patches(Protocol):
    def patches(self, image: ImageInput) -> Tensor:
        """Patches of an image, float32 [P, D]."""
        ...


class VisionFeatures:
    """Cache of features by content hash, up to `cache_bytes`; the least recently used are evicted first. With a
    trainable tower they live until the weights change; with a frozen one they are kept across steps.
    """

    def __init__(self, policy: Policy, processor: Patches | None, cache_bytes: int) -> None:
        self.policy = policy
        self.processor = processor
        self.cache_bytes = cache_bytes
        self.encoded = 0
        """Number of images that went through the tower so far."""
        self.referenced = 0
        """Number of images that were requested so far."""
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def weights_changed(self) -> None:
        """Drops all features, unless the tower is frozen."""
        if not self.policy.vision_is_frozen:
            self.forget()

    def forget(self) -> None:
        self._kept.clear()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context in which requests and encodings do not count."""
        kept = self.referenced, self.encoded
        try:
            yield
        finally:
            self.referenced, self.encoded = kept

    def fixed(self, images: Sequence[ImageInput]) -> list[Tensor]:
        """Features without a graph, one tensor for each entry of `images`."""
        self.referenced += len(images)
        found = {i.image.hash: self._kept[i.image.hash] for i in images if i.image.hash in self._kept}
        new = list({i.image.hash: i for i in images if i.image.hash not in found}.values())
        if new:
            with torch.no_grad():
                for image, features in zip(new, self._encode(new, self.policy), strict=True):
                    found[image.image.hash] = self._kept[image.image.hash] = features
        for image in images:
            self._kept.move_to_end(image.image.hash)
        if new:
            self._evict()
        return [found[image.image.hash] for image in images]

    def differentiable(self, images: Sequence[ImageInput], policy: Policy | None = None) -> list[Tensor]:
        """Features with a graph when the tower is trained; `images` must be distinct. `policy` has the same weights as
        that of these features, perhaps sharded.
        """
        policy = policy or self.policy
        if policy.vision_is_frozen:
            return self.fixed(images)
        self.referenced += len(images)
        return self._encode(images, policy)

    def _encode(self, images: Sequence[ImageInput], policy: Policy) -> list[Tensor]:
        if not images:
            return []
        if self.processor is None:
            raise ValueError("the model folder has no image processor, but a sample has images; use a VL model")
        self.encoded += len(images)
        patches = torch.cat([self.processor.patches(image) for image in images])
        return policy.encode(patches, [image.grid for image in images])

    def _evict(self) -> None:
        size = sum(f.numel() * f.element_size() for f in self._kept.values())
        while self._kept and size > self.cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            size -= oldest.numel() * oldest.element_size()
