"""The parts of a vision tower, independent of the family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from npu_vlrl.model.families import Family, VisionFacts


class Tower:
    """The vision tower of a model with its head, and its projector."""

    def __init__(self, base: Any, family: Family, facts: VisionFacts) -> None:
        self.roots: list[nn.Module] = [base.get_submodule(name) for name in facts.roots]
        self.blocks: Any = base.get_submodule(facts.blocks)
        self.patches: Any = base.get_submodule(facts.patches)
        """The convolution whose kernel is a patch."""
        self.mergers: list[nn.Module] = [base.get_submodule(name) for name in facts.mergers]
        self.shape = family.tower_shape(base.config.vision_config)
        self.gated = facts.gated

    def parameters(self) -> Iterator[nn.Parameter]:
        for root in self.roots:
            yield from root.parameters()

    @property
    def patch_values(self) -> int:
        """Count of numbers in a patch."""
        return int(self.patches.weight[0].numel())

    @property
    def is_frozen(self) -> bool:
        return not any(parameter.requires_grad for parameter in self.parameters())

    def freeze(self) -> None:
        for root in self.roots:
            root.requires_grad_(False)
