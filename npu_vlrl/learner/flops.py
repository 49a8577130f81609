"""Floating-point operations of a pass through a model, from its shapes.

A multiply-add counts as two. Only matrix products and attention count, as is usual for utilisation (Chowdhery et al.
2022, arXiv 2204.02311, appendix B): a product of n rows with a weight takes 2 · n · |weight| forward, as much again for
the gradient of its input and as much for that of the weight, if it is trained. Only the chosen experts of a mixture
count for a token. Attention takes 4 · width for each pair of a query and a visible key, and twice that backward.
Recomputation by checkpointing does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from npu_vlrl.kernels.tree import Tree
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.tower import Tower
from npu_vlrl.types import ImageInput


def seen_pairs(tree: Tree) -> int:
    """Number of pairs of a token and a token that it sees, itself included."""
    bounds = zip(tree.nodes, tree.path_bounds, tree.path_bounds[1:], strict=False)
    lengths = [(node.stop - node.start, end - start) for node, start, end in bounds]
    return sum(own * path - own * (own - 1) // 2 for own, path in lengths)


class ModelFlops:
    """Operations of passes through a policy. A frozen part has no gradient of weights; a frozen tower has no backward
    pass at all.
    """

    def __init__(self, policy: Policy) -> None:
        settings = policy.text.config
        heads = settings.num_attention_heads
        head_width = getattr(settings, "head_dim", None) or settings.hidden_size // heads
        self._layers = _Weights(policy.shares_met())
        self._attention = len(policy.text.layers) * heads * head_width
        self._head = _Weights([(policy.base.lm_head.weight, 1.0)])
        self._tower = None if policy.vision is None else _Tower(policy.vision, not policy.vision_is_frozen)

    def layers(self, tokens: int, pairs: int, train: bool) -> float:
        """Operations of the language model's layers, for that many tokens and `seen_pairs`; `train`: with backward."""
        return self._layers.products(tokens, train) + _attention(pairs, self._attention, train)

    def head(self, scored: int, train: bool) -> float:
        """Operations of the head, which scores the whole vocabulary for that many tokens."""
        return self._head.products(scored, train)

    def tower(self, images: Sequence[ImageInput], train: bool) -> float:
        """Operations of the vision tower, for the images that go through it."""
        return 0.0 if self._tower is None else sum(self._tower.image(image.grid, train) for image in images)


class _Tower:
    def __init__(self, vision: Tower, trained: bool) -> None:
        self._trained = trained
        self._blocks = _Weights((p, 1.0) for p in vision.blocks.parameters())
        self._mergers = _Weights((p, 1.0) for merger in vision.mergers for p in merger.parameters())
        self._patches = _Weights((p, 1.0) for p in vision.patches.parameters())
        self._shape = vision.shape
        self._windowed = len(vision.blocks) - vision.shape.full

    def image(self, grid: tuple[int, int, int], train: bool) -> float:
        train = train and self._trained
        time, height, width = grid
        shape, patches = self._shape, time * height * width
        seen = height * width + shape.class_tokens
        pairs = shape.full * time * seen**2
        if self._windowed:
            windows = _window_squares(height, shape.window) * _window_squares(width, shape.window)
            pairs += self._windowed * time * windows
        return (
            self._patches.products(patches, train, of_input=False)
            + self._blocks.products(time * seen, train)
            + self._mergers.products(patches // shape.merge**2, train)
            + _attention(pairs, shape.hidden, train)
        )


class _Weights:
    """Matrices of a part of a model, each with the share of it by which a row is multiplied."""

    def __init__(self, parameters: Iterable[tuple[nn.Parameter, float]]) -> None:
        met = [(p.numel() * share, p.requires_grad) for p, share in parameters if p.dim() > 1]
        self._all = sum(count for count, _ in met)
        self._trained = sum(count for count, trained in met if trained)

    def products(self, rows: int, train: bool, of_input: bool = True) -> float:
        """Operations of the products of `rows` rows. `of_input`: the input needs a gradient."""
        forward = 2.0 * rows * self._all
        return forward + (of_input * forward + 2.0 * rows * self._trained if train else 0.0)


def _attention(pairs: int, width: int, train: bool) -> float:
    return 4.0 * pairs * width * (3 if train else 1)


def _window_squares(length: int, window: int) -> int:
    """Σ of the squares of the windows' sides along one axis; the last window may be cut."""
    return length // window * window**2 + (length % window) ** 2
