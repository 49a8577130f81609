"""The loss of the critic, with the clip of the PPO code that came with the paper (baselines, ppo2, OpenAI 2017)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from npu_vlrl.algorithms.component import Options
from npu_vlrl.algorithms.loss_tokens import wide
from npu_vlrl.algorithms.metrics import Metrics, reduce_metrics
from npu_vlrl.common.fields import Positive

if TYPE_CHECKING:
    from torch import Tensor

RESOLUTION = 1e-6
"""Share of the mean square below which a variance is rounding of float32 sums."""


class ValueOptions(Options):
    value_clip: Positive | None = 0.5
    """Largest move of a value in one step that the loss rewards; null disables."""


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, weights_N: Tensor, options: ValueOptions
) -> tuple[Tensor, Metrics]:
    """Σ weight · ½ max((v - R)², (clip(v, old ± value_clip) - R)²) over N states; None switches the clip off.

    Only `values_N` gets a gradient. A state passes none when its value has moved towards R by more than `value_clip`.
    NaN goes through. No state gives 0, still tied to `values_N`.

    Metrics as of `policy_loss`; `tokens_sum` counts states, `value_clip_sum` those whose gradient is cut off. See
    `reduce_value_metrics`.
    """
    import torch

    clip = options.value_clip
    values_N = values_N.to(torch.promote_types(values_N.dtype, torch.float32))
    old_N, returns_N = wide(old_values_N, like=values_N), wide(returns_N, like=values_N)
    error_N = worst_N = (values_N - returns_N).square()
    if clip is not None:
        worst_N = torch.maximum(error_N, (values_N.clamp(old_N - clip, old_N + clip) - returns_N).square())
    loss_N = 0.5 * worst_N
    metrics = {
        "tokens_sum": torch.tensor(len(values_N), device=values_N.device),
        "value_loss_sum": loss_N.sum(),
        "value_clip_sum": (worst_N > error_N).sum(),
        "value_sum": values_N.sum(),
        "return_sum": returns_N.sum(),
        "return_square_sum": returns_N.square().sum(),
        "error_square_sum": error_N.sum(),
    }
    return (weights_N * loss_N).sum(), {name: value.detach().to(loss_N.dtype) for name, value in metrics.items()}


def reduce_value_metrics(parts: Iterable[Metrics]) -> dict[str, float]:
    """Means over the states of all micro-batches: `value_loss`, `value_clip`, `value`, `return`; and their number,
    `tokens`; and `explained_variance` = 1 - Var(R - v) / Var(R), 0 where the returns do not vary.
    """
    means = reduce_metrics(parts)
    if "return_square" in means:  # there was a micro-batch
        square, error_square = means.pop("return_square"), means.pop("error_square")
        bias = means["return"] - means["value"]
        variance = square - means["return"] ** 2
        flat = variance <= RESOLUTION * square
        means["explained_variance"] = 0.0 if flat else 1 - (error_square - bias**2) / variance
    return means
