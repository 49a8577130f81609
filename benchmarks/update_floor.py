"""The least time an update can take on a device: its multiplications, and the bytes of its optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.setup import Limits
from npu_vlrl.learner.flops import ModelFlops
from npu_vlrl.model.policy import Policy
from npu_vlrl.types import ImageInput, Sample

ADAMW_BYTES = 30
"""Of each parameter: the gradient is read (4), both moments and the float32 weight are read and written (24), and the
rounded weight is written (2)."""


@dataclass(frozen=True)
class Work:
    """What an update must at least compute: every prompt, with its picture, once."""

    prompts: Sequence[int]
    """[groups]: length of each group's prompt."""
    responses: Sequence[Sequence[int]]
    """[groups][members]"""
    images: Sequence[ImageInput]
    """Distinct ones."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Work:
        """Of samples that are a prompt and a response each."""
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        return cls(
            prompts=tuple(len(members[0].segments[0]) for members in groups.values()),
            responses=tuple(tuple(len(sample.segments[1]) for sample in members) for members in groups.values()),
            images=tuple({image.image.hash: image for sample in samples for image in sample.images}.values()),
        )

    @property
    def trained(self) -> int:
        return sum(map(sum, self.responses))

    @property
    def tokens(self) -> int:
        return self.trained + sum(self.prompts)

    @property
    def referenced(self) -> int:
        """Tokens of the samples, prompts counted for each member."""
        return self.trained + sum(p * len(own) for p, own in zip(self.prompts, self.responses, strict=True))

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it sees, itself among them."""
        total = sum(n * (n + 1) // 2 for n in self.prompts)
        for prompt, own in zip(self.prompts, self.responses, strict=True):
            total += sum(n * prompt + n * (n + 1) // 2 for n in own)
        return total

    @property
    def patches(self) -> int:
        return sum(time * height * width for time, height, width in (image.grid for image in self.images))


def floor(policy: Policy, work: Work, limits: Limits) -> dict[str, float]:
    """Operations, and seconds at the measured rates, with and without a second forward pass that recomputes.

    A frozen tower costs nothing: its features are kept from step to step.
    """
    model = ModelFlops(policy)
    images = () if policy.vision_is_frozen else work.images
    forward, whole = (
        (model.layers(work.tokens, work.pairs, train), model.tower(images, train), model.head(work.trained, train))
        for train in (False, True)
    )
    optimizer = ADAMW_BYTES * sum(p.numel() for p in policy.trainable().values()) / limits.bandwidth
    return {
        **dict(zip(("layers_tflop", "tower_tflop", "head_tflop"), (part / 1e12 for part in whole), strict=True)),
        "optimizer_seconds": optimizer,
        "seconds": sum(whole) / limits.flops + optimizer,
        "seconds_with_recomputation": (sum(whole) + sum(forward)) / limits.flops + optimizer,
    }
