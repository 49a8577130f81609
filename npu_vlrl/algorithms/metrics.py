"""Metrics of micro-batches, which are reduced to metrics of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, "Tensor"]
"""Scalars without gradient; a name ends in its reduction, `_sum` or `_max`. `NAME_tokens` is the number of tokens of a
sum or maximum; `tokens_sum` is the number for all metrics without a `NAME_tokens`.
"""


def clip_metrics(
    ratio_N: Tensor, low_N: Tensor | None = None, high_N: Tensor | None = None, dual_N: Tensor | None = None
) -> Metrics:
    """Mean and largest ratio, and how many tokens (bool [N] each, None: no such bound) every bound acts on."""
    ratio_N = ratio_N.detach()
    never = ratio_N.new_zeros(())
    bounds = {"clip_low_sum": low_N, "clip_high_sum": high_N, "dual_clip_sum": dual_N}
    counts = {name: never if acts_N is None else acts_N.sum() for name, acts_N in bounds.items()}
    return {"ratio_sum": ratio_N.sum(), "ratio_max": largest(ratio_N), **counts}


def largest(values_N: Tensor) -> Tensor:
    """The maximum of values that are not negative; 0, which changes no maximum, when there are none."""
    return values_N.max() if len(values_N) else values_N.new_zeros(())


def reduce_metrics(parts: Iterable[Metrics]) -> dict[str, float]:
    """The metrics of all micro-batches as numbers: `x_sum` becomes the mean `x` over its tokens, `x_max` stays.

    A mean or maximum over no token at all is left out. `tokens` is the number of tokens.
    """
    import torch

    collected: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.items():
            collected.setdefault(name, []).append(value)
    totals = {
        name: float(torch.stack(values).max() if name.endswith("_max") else torch.stack(values).sum())
        for name, values in collected.items()
    }
    tokens = totals.pop("tokens_sum", 0.0)
    counts = {name: totals.pop(name) for name in list(totals) if name.endswith("_tokens")}
    reduced = {"tokens": tokens} | counts
    for key, total in totals.items():
        name = key.removesuffix("_sum")
        measured = counts.get(f"{name}_tokens", tokens)
        if measured:
            reduced[name] = total / measured if key.endswith("_sum") else total
    return reduced


RESERVED = frozenset(
    [
        *("tokens", "pg_loss", "entropy", "gap", "gap_max", "anchor_kl", "kl", "skipped_updates", "grad_norm", "lr"),
        *("correction_weight", "correction_capped", "correction_masked", "logprob_gap", "router_changed"),
        *("seconds", "rollout_seconds"),
    ]
)
"""Names of a step's metrics that no component may take for its own."""
