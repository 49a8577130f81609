"""Filters against a float64 brute force and transformers' processors; drawn tokens against their probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from npu_vlrl.engines.inprocess.sampling import Filters, draw, processed_logprobs, uniforms
from npu_vlrl.types import SamplingParams

NOTHING = torch.zeros(12, dtype=torch.bool)


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    return SamplingParams(1, temperature, top_p, top_k)


def brute_force(logits: list[float], p: SamplingParams, forbidden: set[int]) -> list[float]:
    """Probabilities: forbid, divide by the temperature, keep the k largest, then the fewest that reach top_p."""
    greedy = p.temperature == 0
    temperature, top_k, top_p = (1.0, 0, 1.0) if greedy else (p.temperature, p.top_k, p.top_p)
    allowed = [i for i in range(len(logits)) if i not in forbidden]
    weights = {i: math.exp((logits[i] - max(logits[j] for j in allowed)) / temperature) for i in allowed}
    order = sorted(allowed, key=lambda i: (-weights[i], i))
    order = order[: top_k or None]
    total = math.fsum(weights[i] for i in order)
    kept: list[int] = []
    reached = 0.0
    for i in order:
        if reached >= top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def filters(*params: SamplingParams) -> Filters:
    return Filters.of(params, torch.device("cpu"))


# distinct logits, and limits away from sums of probabilities: ties and rounding decide neither side differently
distinct = st.lists(st.integers(-400, 400), min_size=12, max_size=12, unique=True).map(lambda x: [i / 60 for i in x])
sampling = st.builds(
    params,
    st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    st.sampled_from([0.1234567, 0.512345, 0.87654321, 1.0]),
    st.sampled_from([0, 1, 2, 5, 11, 12, 40]),
)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(distinct, sampling), min_size=1, max_size=4),
    forbidden=st.sets(st.integers(0, 11), max_size=4),
)
def test_rows_with_their_own_settings_equal_a_brute_force(
    rows: list[tuple[list[float], SamplingParams]], forbidden: set[int]
) -> None:
    mask = NOTHING.clone()
    mask[sorted(forbidden)] = True
    found = processed_logprobs(torch.tensor([logits for logits, _ in rows]), filters(*(p for _, p in rows)), mask)
    expected = torch.tensor([brute_force(logits, p, forbidden) for logits, p in rows])
    torch.testing.assert_close(found.exp(), expected, atol=2e-6, rtol=0)
    assert found.dtype == torch.float32


@settings(max_examples=40)
@given(logits=distinct, p=sampling.filter(lambda p: p.temperature > 0))
def test_filters_equal_those_of_transformers(logits: list[float], p: SamplingParams) -> None:
    scores: Tensor = torch.tensor([logits])
    ids = torch.zeros(1, 1, dtype=torch.long)
    expected = TemperatureLogitsWarper(p.temperature)(ids, scores)
    if p.top_k:
        expected = TopKLogitsWarper(p.top_k)(ids, expected)
    if p.top_p < 1:
        expected = TopPLogitsWarper(p.top_p)(ids, expected)
    torch.testing.assert_close(
        processed_logprobs(scores, filters(p), NOTHING), expected.log_softmax(-1), atol=1e-5, rtol=0
    )


def test_ties_keep_the_first_tokens() -> None:
    found = processed_logprobs(torch.zeros(1, 12), filters(params(top_k=3)), NOTHING)
    assert found.exp()[0].tolist() == pytest.approx([1 / 3] * 3 + [0.0] * 9)


def test_bfloat16_logits_are_scored_in_float32() -> None:
    logits = torch.linspace(-3, 3, 12, dtype=torch.bfloat16)[None]
    found = processed_logprobs(logits, filters(params(0.7)), NOTHING)
    torch.testing.assert_close(found, (logits.float() / 0.7).log_softmax(-1))


@pytest.mark.parametrize("p", [params(), params(0.6), params(1.0, 0.8), params(1.4, 1.0, 4)])
def test_frequencies_follow_the_probabilities(p: SamplingParams) -> None:
    """Pearson's chi-square is below its 99.9 % quantile for 11 degrees of freedom, 31.26."""
    logits = [0.3, -1.0, 2.0, 0.1, -0.5, 1.2, 0.0, -2.0, 0.7, 1.6, -0.2, 0.9]
    draws = 20_000
    logprobs = processed_logprobs(torch.tensor([logits]), filters(p), NOTHING)
    random = torch.rand(draws, generator=torch.Generator().manual_seed(11))
    tokens = draw(logprobs.expand(draws, -1), random, torch.zeros(draws, dtype=torch.bool))
    observed = np.bincount(tokens.numpy(), minlength=12)
    expected = np.array(brute_force(logits, p, set())) * draws
    assert (observed[expected == 0] == 0).all()
    likely = expected > 0
    assert ((observed - expected)[likely] ** 2 / expected[likely]).sum() < 31.26


def test_the_ends_of_the_uniform_range_draw_possible_tokens() -> None:
    logprobs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).log().expand(4, -1)
    below_one = float(np.nextafter(np.float32(1), np.float32(0)))
    tokens = draw(logprobs, torch.tensor([0.0, 0.2499, 0.2501, below_one]), torch.zeros(4, dtype=torch.bool))
    assert tokens.tolist() == [1, 1, 3, 3]
    # the sum of many probabilities may come out a little below one
    short = torch.tensor([[0.0, 0.25, 0.0, 0.749, 0.0]]).log()
    assert draw(short, torch.tensor([below_one]), torch.tensor([False])).tolist() == [3]


def test_greedy_rows_take_the_largest_beside_sampled_ones() -> None:
    logprobs = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(2, -1)
    assert draw(logprobs, torch.tensor([0.0, 0.0]), torch.tensor([True, False])).tolist() == [1, 0]


def test_a_row_without_a_finite_number_draws_an_id_of_the_vocabulary() -> None:
    logprobs = torch.full((2, 5), torch.nan)
    tokens = draw(logprobs, torch.tensor([0.5, 0.5]), torch.tensor([True, False]))
    assert all(0 <= token < 5 for token in tokens.tolist())


def test_uniforms_belong_to_the_seed_and_a_longer_request_begins_with_the_same() -> None:
    short, long = uniforms(SamplingParams(5, seed=3)), uniforms(SamplingParams(9, seed=3))
    assert torch.equal(short, long[:5])
    assert not torch.equal(short, uniforms(SamplingParams(5, seed=4)))
    assert short.min() >= 0 and short.max() < 1
