"""Prefix tree of sequences: a shared prefix occurs once, and all sequences that begin with it see it.

The tokens are in depth-first order. A node is a run of tokens of the same sequences; it is visible to itself, causally,
and to all nodes below it. So a token is visible to all tokens from itself to the end of its subtree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

MOST_SEQUENCES = 1024
"""Largest number of sequences in one packed call of an NPU's operator: the smallest documented limit.

torch_npu's page about npu_fusion_attention (op-plugin 517f2e7d0f20) gives 2K and, for packed sequences, 1K. CANN's page
about aclnnFlashAttentionVarLenScore (ops-transformer c29bc1069d32) gives 2K, and 1K with a prefix. CANN's code does not
refuse more; it warns above 20,000.
"""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """A packed attention call: slices of the queries and of their keys, one of each a sequence."""

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    causal: bool

    @cached_property
    def cu_q(self) -> list[int]:
        return _cumulative(self.queries)

    @cached_property
    def cu_k(self) -> list[int]:
        return _cumulative(self.keys)


@dataclass(frozen=True)
class Tree:
    """Positions of the nodes of a packed batch, roots included, in depth-first order.

    Example: two sequences of 5 tokens that share their first 3 are `Tree(starts=(0, 3, 5), ends=(7, 5, 7))`.
    """

    starts: tuple[int, ...]
    """First token of each node, which extends to the next node's."""
    ends: tuple[int, ...]
    """One past the last token of each node's subtree."""

    def __post_init__(self) -> None:
        assert self.starts and self.starts[0] == 0 and len(self.starts) == len(self.ends)
        assert all(a < b for a, b in zip(self.starts, self.starts[1:], strict=False)), "a node without tokens"

    @classmethod
    def of_sequences(cls, cumulative: Sequence[int]) -> Tree:
        """Makes the tree of sequences that share nothing, from their cumulative lengths."""
        return cls(tuple(cumulative[:-1]), tuple(cumulative[1:]))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Starts of the nodes, and the end: cumulative lengths."""
        return (*self.starts, max(self.ends))

    @cached_property
    def shares(self) -> bool:
        return any(end != bound for end, bound in zip(self.ends, self.bounds[1:], strict=True))

    @cached_property
    def above(self) -> tuple[tuple[int, ...], ...]:
        """Ancestors of each node, from the root down."""
        found: list[tuple[int, ...]] = []
        line: list[int] = []
        for index, start in enumerate(self.starts):
            while line and self.ends[line[-1]] <= start:
                line.pop()
            found.append(tuple(line))
            line.append(index)
        return tuple(found)

    @cached_property
    def nodes(self) -> tuple[slice, ...]:
        """The tokens of each node."""
        return tuple(slice(a, b) for a, b in zip(self.bounds, self.bounds[1:], strict=False))

    @cached_property
    def path(self) -> Tensor:
        """int64: indices of the tokens that each node's last token sees, one node after the other."""
        runs = [self.nodes[i] for index, above in enumerate(self.above) for i in (*above, index)]
        return torch.cat([torch.arange(run.start, run.stop) for run in runs])

    def path_on(self, device: torch.device) -> Tensor:
        """Copy of `path` on a device, made once for all layers."""
        if device not in self._paths:
            self._paths[device] = self.path.to(device)
        return self._paths[device]

    @cached_property
    def _paths(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def path_bounds(self) -> list[int]:
        """Cumulative lengths of `path`."""
        lengths = [run.stop - run.start for run in self.nodes]
        return [0, *accumulate(sum(lengths[i] for i in (*above, n)) for n, above in enumerate(self.above))]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Packed calls whose results, merged by their log-sum-exp, are the attention.

        First each node attends to itself. Then, for each depth, the tokens below the nodes of that depth attend to
        them. No call has more than `MOST_SEQUENCES` sequences.
        """
        found = [Part(some, some, causal=True) for some in _batched(self.nodes)]
        by_depth: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            if self.ends[index] > node.stop:
                by_depth.setdefault(len(self.above[index]), []).append(index)
        for _, members in sorted(by_depth.items()):
            for some in _batched(members):
                below = tuple(slice(self.nodes[i].stop, self.ends[i]) for i in some)
                found.append(Part(below, tuple(self.nodes[i] for i in some), causal=False))
        return tuple(found)


def _batched(items: Sequence[Item]) -> list[tuple[Item, ...]]:
    return [tuple(items[i : i + MOST_SEQUENCES]) for i in range(0, len(items), MOST_SEQUENCES)]


def _cumulative(slices: Sequence[slice]) -> list[int]:
    ends = [0]
    for one in slices:
        ends.append(ends[-1] + one.stop - one.start)
    return ends
