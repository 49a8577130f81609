"""Weights of tokens: by hand, and what is refused."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from npu_vlrl.config import AlgorithmConfig
from tests.support.losses import token_weights

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")


def weigh(sample_N: Tensor, n: int, mode: Any, tokens: int, samples: int) -> Tensor:
    counts = torch.bincount(sample_N, minlength=n)
    return token_weights(sample_N, counts, mode, tokens, samples, 7.0, torch.float64)


def test_weights_by_hand() -> None:
    """Two samples of 3 and 1 tokens, alone in the batch; then the same ones in a batch of 10 tokens and 4 samples."""
    sample_N = torch.tensor([0, 0, 0, 1])
    assert weigh(sample_N, 2, "token-mean", 4, 2).tolist() == [1 / 4] * 4
    assert weigh(sample_N, 2, "seq-mean-token-mean", 4, 2).tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert weigh(sample_N, 2, "seq-mean-token-sum", 4, 2).tolist() == [1 / 2] * 4
    assert weigh(sample_N, 2, "constant", 4, 2).tolist() == pytest.approx([1 / 14] * 4)
    assert weigh(sample_N, 2, "token-mean", 10, 4).tolist() == [1 / 10] * 4
    assert weigh(sample_N, 2, "seq-mean-token-mean", 10, 4).tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 12, 1 / 4])
    assert weigh(sample_N, 2, "seq-mean-token-sum", 10, 4).tolist() == [1 / 4] * 4
    assert weigh(sample_N, 2, "constant", 10, 4).tolist() == pytest.approx([1 / 28] * 4)


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_a_batch_without_tokens_and_of_an_idle_sample(mode: str) -> None:
    assert weigh(torch.zeros(0, dtype=torch.long), 0, mode, 5, 2).shape == (0,)
    assert weigh(torch.tensor([1, 1]), 3, mode, 5, 2).isfinite().all()  # samples 0 and 2 have no trained token


@pytest.mark.parametrize("constant", [0.0, -1.0])
def test_constant_needs_a_positive_constant(constant: float) -> None:
    with pytest.raises(ValidationError, match="loss_constant"):
        AlgorithmConfig(aggregation="constant", loss_constant=constant)


def test_unknown_mode() -> None:
    with pytest.raises(ValidationError, match="'token-mean', 'seq-mean-token-mean'"):
        AlgorithmConfig(aggregation="mean")
