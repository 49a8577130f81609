"""Aggregation of the losses of tokens: a weight for each token, so that the loss is a plain sum of weight · loss.

The weights hold *global* counts. Sums over micro-batches and ranks therefore add up to the loss of the whole batch,
however it was split, and nothing is averaged twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from npu_vlrl.algorithms.component import FIXED, Chosen, Component, Options
from npu_vlrl.common.fields import Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Counts:
    """The N trained tokens of a micro-batch, and counts of the whole update."""

    sample_N: Tensor
    """int64: the sample of each token."""
    trained_S: Tensor
    """Trained tokens of each sample of the micro-batch, in the dtype of the weights."""
    tokens: int
    """Trained tokens of all micro-batches of all ranks in the optimiser step."""
    samples: int
    """Samples of all micro-batches of all ranks in the optimiser step."""

    def filled(self, weight: float) -> Tensor:
        """The same weight for every token, [N]."""
        return self.trained_S.new_full(self.sample_N.shape, weight)


class ConstantOptions(Options):
    loss_constant: Annotated[Positive, FIXED] = 1024.0
    """Divisor of the `constant` aggregation, in tokens per sample."""


def _token_mean(counts: Counts) -> Tensor:
    return counts.filled(1 / counts.tokens)


def _sample_mean_of_token_means(counts: Counts) -> Tensor:
    return 1 / (counts.trained_S[counts.sample_N] * counts.samples)


def _sample_mean_of_token_sums(counts: Counts) -> Tensor:
    return counts.filled(1 / counts.samples)


def _constant(counts: Counts, options: ConstantOptions) -> Tensor:
    """Divides by a number of tokens that does not depend on the data, such as a sample's budget (Dr. GRPO, arXiv
    2503.20783)."""
    return counts.filled(1 / (options.loss_constant * counts.samples))


AGGREGATIONS: dict[str, Component] = {
    "token-mean": Component(_token_mean),
    "seq-mean-token-mean": Component(_sample_mean_of_token_means),
    "seq-mean-token-sum": Component(_sample_mean_of_token_sums),
    "constant": Component(_constant, ConstantOptions),
}


def token_weights(
    aggregation: Chosen[Component], sample_N: Tensor, trained_S: Tensor, tokens: int, samples: int
) -> Tensor:
    """Weights [N] of the trained tokens of one micro-batch, see `Counts`.

    token-mean: 1 / tokens. seq-mean-token-mean: 1 / (the sample's tokens · samples). seq-mean-token-sum: 1 / samples.
    constant: 1 / (loss_constant · samples).
    """
    assert tokens > 0 and samples > 0
    weights: Tensor = aggregation(Counts(sample_N, trained_S, tokens, samples))
    return weights
