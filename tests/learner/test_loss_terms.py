"""Every loss of single tokens, and the KL estimates, against plain Python arithmetic."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_vlrl.algorithms import LOSSES
from npu_vlrl.algorithms.kl import KLKind, kl_per_token
from npu_vlrl.algorithms.loss_tokens import LossTokens
from tests.support.losses import Bounds, call

torch.set_num_threads(1)

TOKEN = st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]), st.integers(0, 3))


def f64(values: list[float], grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    objective = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if advantage < 0 and dual is not None:
        objective = max(objective, dual * advantage)
    return -objective


def gradient(loss_N: Tensor, logprobs_N: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    return found.tolist()


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.lists(TOKEN, min_size=1, max_size=12),
    low=st.sampled_from([0.1, 0.2]),
    high=st.sampled_from([0.2, 0.28]),
    dual=st.sampled_from([None, 3.0]),
    kind=st.sampled_from(["ppo", "gspo", "cispo", "reinforce"]),
)
def test_equals_the_definition(
    tokens: list[tuple[float, float, float, int]], low: float, high: float, dual: float | None, kind: str
) -> None:
    logprobs, behaviour, advantages, samples = (list(column) for column in zip(*tokens, strict=True))
    logs = [p - b for p, b in zip(logprobs, behaviour, strict=True)]
    if kind == "gspo":
        own = {s: [log for log, t in zip(logs, samples, strict=True) if t == s] for s in samples}
        logs = [sum(own[s]) / len(own[s]) for s in samples]
    ratios = [math.exp(log) for log in logs]
    pairs = list(zip(ratios, advantages, strict=True))
    given_N = LossTokens(f64(logprobs), f64(behaviour), f64(advantages), None, torch.tensor(samples), 4)
    found, metrics = call(kind, given_N, Bounds(low, high, dual))
    counts = [0, 0, 0]
    if kind == "cispo":
        expected = [-clip(r, 1 - low, 1 + high) * a * p for (r, a), p in zip(pairs, logprobs, strict=True)]
        counts = [sum(r < 1 - low for r in ratios), sum(r > 1 + high for r in ratios), 0]
    elif kind == "reinforce":
        expected = [-a * p for a, p in zip(advantages, logprobs, strict=True)]
    else:
        expected = [surrogate(r, a, low, high, dual) for r, a in pairs]
        counts = [
            sum(a < 0 and r < 1 - low for r, a in pairs),
            sum(a > 0 and r > 1 + high for r, a in pairs),
            sum(dual is not None and a < 0 and r > dual for r, a in pairs),
        ]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert metrics["ratio_sum"].item() == pytest.approx(sum(ratios))
    assert metrics["ratio_max"].item() == pytest.approx(max(ratios))
    assert [int(metrics[f"{name}_sum"]) for name in ("clip_low", "clip_high", "dual_clip")] == counts


# --- ppo -------------------------------------------------------------------------------------------------------------

CASES = {
    # (ratio, advantage): (loss, gradient of the loss in the logprob), for clip 0.2 / 0.28 and dual clip 3
    "inside, good": (1.1, 2.0, -2.2, -2.2),
    "inside, bad": (0.9, -2.0, 1.8, 1.8),
    "good and already likelier": (1.5, 2.0, -2.56, 0.0),
    "between 1.2 and 1.28 is still open": (1.25, 2.0, -2.5, -2.5),
    "bad and already unlikelier": (0.5, -2.0, 1.6, 0.0),
    "good and unlikelier": (0.5, 2.0, -1.0, -1.0),
    "bad and likelier": (2.0, -2.0, 4.0, 4.0),
    "bad and far likelier": (5.0, -2.0, 6.0, 0.0),
    "indifferent": (5.0, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope"), CASES.values(), ids=CASES.keys())
def test_ppo_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    logprob = f64([-1.0], grad=True)
    found, _ = call("ppo", LossTokens(logprob, f64([-1.0 - math.log(ratio)]), f64([advantage])), Bounds(0.2, 0.28, 3.0))
    assert found.item() == pytest.approx(loss)
    assert gradient(found, logprob) == pytest.approx([slope])


def test_without_dual_clip_a_far_likelier_bad_token_pulls_without_limit() -> None:
    logprob = f64([-1.0], grad=True)
    found, metrics = call("ppo", LossTokens(logprob, f64([-1.0 - math.log(5)]), f64([-2.0])), Bounds(0.2, 0.28))
    assert gradient(found, logprob) == pytest.approx([10.0])
    assert metrics["dual_clip_sum"].item() == 0


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
def test_the_anchor_is_the_proximal_policy_where_there_is_one(kind: str) -> None:
    """Ratio 1.1 to the learner's own word and 0.5 to the engine's."""
    logprobs, engine, own = f64([-1.0]), f64([-1.0 + math.log(2)]), f64([-1.0 - math.log(1.1)])
    found = [
        call(kind, LossTokens(logprobs, engine, f64([1.0]), proximal), Bounds(0.2, 0.2))[1]["ratio_sum"].item()
        for proximal in (own, None)
    ]
    assert found == pytest.approx([1.1, 0.5])


def test_each_bound_counts_the_tokens_that_it_stops() -> None:
    """Ratios 5 and 0.1, each with an advantage above, below and at zero."""
    logs = [math.log(5)] * 3 + [math.log(0.1)] * 3
    tokens = LossTokens(f64(logs), f64([0.0] * 6), f64([1.0, -1.0, 0.0] * 2))
    _, metrics = call("ppo", tokens, Bounds(0.2, 0.28, 3.0))
    assert [int(metrics[f"{name}_sum"]) for name in ("clip_low", "clip_high", "dual_clip")] == [1, 1, 1]
    _, metrics = call("cispo", tokens, Bounds(0.2, 0.28, 3.0))
    assert [int(metrics[f"{name}_sum"]) for name in ("clip_low", "clip_high", "dual_clip")] == [3, 3, 0]


# --- gspo ------------------------------------------------------------------------------------------------------------


def test_the_sequence_ratio_spreads_its_gradient_over_the_sample() -> None:
    """GSPO: s = exp(mean log-ratio); with weights 1/2 the gradient in each of two tokens is A · s / 2."""
    behaviour = f64([-1.0, -2.0, -3.0])
    logprobs = f64([-0.9, -2.0, -3.5], grad=True)
    tokens = LossTokens(logprobs, behaviour, f64([2.0, 2.0, 1.0]), None, torch.tensor([0, 0, 1]), 2)
    found, _ = call("gspo", tokens, Bounds(0.2, 0.28))
    s = math.exp(0.05)
    assert found.tolist() == pytest.approx([-2 * s, -2 * s, -math.exp(-0.5)])
    assert gradient(found * f64([0.5, 0.5, 0.0]), logprobs) == pytest.approx([-s, -s, 0.0])


def test_gspo_keeps_the_advantage_of_each_token() -> None:
    """Turns of one sample with their own advantages: A s for each, not the mean of them (GSPO-token)."""
    logprobs = f64([-0.9, -2.0, -3.0], grad=True)
    tokens = LossTokens(logprobs, f64([-1.0, -2.0, -3.0]), f64([2.0, -1.0, 0.0]), None, torch.tensor([0, 0, 0]), 1)
    found, _ = call("gspo", tokens, Bounds(0.2, 0.28))
    s = math.exp(0.1 / 3)
    assert gradient(found, logprobs) == pytest.approx([-2 * s, s, 0.0])


def test_one_token_of_a_clipped_sample_gets_no_gradient_though_its_own_ratio_is_one() -> None:
    logprobs = f64([-1.0, 0.0], grad=True)
    tokens = LossTokens(logprobs, f64([-1.0, -2.0]), f64([1.0, 1.0]), None, torch.tensor([0, 0]), 1)
    assert gradient(call("gspo", tokens, Bounds(0.2, 0.2))[0], logprobs) == [0.0, 0.0]
    assert gradient(call("ppo", tokens, Bounds(0.2, 0.2))[0], logprobs) == [-1.0, 0.0]


def test_gspo_of_a_sample_of_one_token_is_ppo() -> None:
    logprobs, behaviour, advantages = f64([-1.0, -0.5, -3.0]), f64([-1.1, -1.5, -1.0]), f64([1.0, -1.0, -2.0])
    tokens = LossTokens(logprobs, behaviour, advantages, None, torch.tensor([2, 0, 1]), 3)
    found, expected = (call(kind, tokens, Bounds(0.2, 0.28, 3.0)) for kind in ("gspo", "ppo"))
    assert found[0].tolist() == pytest.approx(expected[0].tolist())
    assert {k: v.item() for k, v in found[1].items()} == pytest.approx({k: v.item() for k, v in expected[1].items()})


def test_the_sequence_ratio_needs_the_samples() -> None:
    zero = torch.zeros(1)
    with pytest.raises(AssertionError, match="which tokens are its own"):
        call("gspo", LossTokens(zero, zero, zero), Bounds(0.2, 0.2))


# --- cispo, reinforce ------------------------------------------------------------------------------------------------


def test_cispo_clips_the_weight_and_never_the_gradient() -> None:
    """Ratios 4, 1, 0.25: the weights 1.28, 1, 0.8 multiply A ∇logprob, where ppo passes nothing for the first."""
    logprobs = f64([-1.0, -2.0, -3.0], grad=True)
    behaviour = f64([-1.0 - math.log(4), -2.0, -3.0 + math.log(4)])
    tokens = LossTokens(logprobs, behaviour, f64([1.0, -2.0, 3.0]))
    found, _ = call("cispo", tokens, Bounds(0.2, 0.28, 3.0))
    assert found.tolist() == pytest.approx([1.28 * 1.0 * 1.0, -2.0 * 2.0, 0.8 * 3.0 * 3.0])
    assert gradient(found, logprobs) == pytest.approx([-1.28, 2.0, -2.4])
    assert gradient(call("ppo", tokens, Bounds(0.2, 0.28, 3.0))[0], logprobs)[0] == 0


def test_cispo_without_a_lower_bound_as_in_the_paper() -> None:
    logprobs = f64([-3.0], grad=True)
    found, metrics = call("cispo", LossTokens(logprobs, f64([-3.0 + math.log(8)]), f64([1.0])), Bounds(1.0, 0.28))
    assert gradient(found, logprobs) == pytest.approx([-1 / 8])
    assert metrics["clip_low_sum"].item() == 0


def test_inside_the_bounds_cispo_and_ppo_have_one_gradient() -> None:
    logprobs = f64([-1.0, -2.0], grad=True)
    tokens = LossTokens(logprobs, f64([-1.1, -1.9]), f64([1.5, -0.5]))
    first, second = (gradient(call(kind, tokens, Bounds(0.2, 0.2))[0], logprobs) for kind in ("cispo", "ppo"))
    assert first == pytest.approx(second)


def test_reinforce_does_not_look_at_the_ratio() -> None:
    logprobs = f64([-1.0, -2.0], grad=True)
    found, metrics = call("reinforce", LossTokens(logprobs, f64([-9.0, 0.0]), f64([2.0, -1.0])), Bounds(0.2, 0.2, 3.0))
    assert found.tolist() == [2.0, -2.0]
    assert gradient(found, logprobs) == [-2.0, 1.0]
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(8))


# --- absurd input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("kind", LOSSES)
def test_absurd_ratios_stay_finite(kind: str, advantage: float, gap: float) -> None:
    logprob, zero = torch.tensor([gap], requires_grad=True), torch.zeros(1)
    tokens = LossTokens(logprob, zero, torch.tensor([advantage]), zero, torch.tensor([0]), 1)
    found, metrics = call(kind, tokens, Bounds(0.2, 0.2))
    assert found.isfinite().all() and metrics["ratio_max"].isfinite()
    weight = {"cispo": 1.2 if gap > 0 else 0.8, "reinforce": 1.0}.get(kind, 0.0)  # the others pass no gradient
    assert gradient(found, logprob) == pytest.approx([-weight * advantage])


# --- KL --------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(pairs=st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=8))
def test_kl_formulas(pairs: list[tuple[float, float]]) -> None:
    logprobs, reference = f64([p for p, _ in pairs]), f64([q for _, q in pairs])
    differences = [p - q for p, q in pairs]
    assert kl_per_token(logprobs, reference, "k1").tolist() == pytest.approx(differences)
    assert kl_per_token(logprobs, reference, "k2").tolist() == pytest.approx([d * d / 2 for d in differences])
    expected = [math.exp(-d) - 1 + d for d in differences]
    assert kl_per_token(logprobs, reference).tolist() == pytest.approx(expected, abs=1e-9)
    assert (kl_per_token(logprobs, reference, "k3") >= 0).all()


def test_k1_and_k3_have_the_expectation_of_the_kl() -> None:
    p, q = f64([0.5, 0.3, 0.2]), f64([0.2, 0.2, 0.6])
    true = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    unbiased: list[KLKind] = ["k1", "k3"]
    for kind in unbiased:
        assert (p * kl_per_token(p.log(), q.log(), kind)).sum().item() == pytest.approx(true)
    assert (p * kl_per_token(p.log(), q.log(), "k2")).sum().item() != pytest.approx(true)


def test_k2_has_the_gradient_of_the_kl_and_k1_has_none_on_average() -> None:
    logits, q = f64([0.3, -0.2, 0.5], grad=True), f64([0.2, 0.2, 0.6])
    p = logits.softmax(0)
    (true,) = torch.autograd.grad((p * (p / q).log()).sum(), logits, retain_graph=True)
    cases: list[tuple[KLKind, Tensor]] = [("k1", torch.zeros(3).double()), ("k2", true)]
    for kind, expected in cases:
        estimate = (p.detach() * kl_per_token(logits.log_softmax(0), q.log(), kind)).sum()
        (found,) = torch.autograd.grad(estimate, logits)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", get_args(KLKind))
def test_gradients_of_the_kl_estimates(kind: KLKind) -> None:
    logprobs, reference = f64([-0.3, -2.0, -1.0], grad=True), f64([-1.0, -0.1, -1.0])
    assert torch.autograd.gradcheck(lambda x: kl_per_token(x, reference, kind), (logprobs,))


def test_kl_far_away_is_finite_and_the_reference_gets_no_gradient() -> None:
    logprobs, reference = torch.tensor([-500.0, -1.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    kl_per_token(logprobs, reference).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all() and reference.grad is None
    assert logprobs.grad[1].item() == pytest.approx(1 - math.e)


def test_unknown_kl() -> None:
    with pytest.raises(ValueError, match="'k4'; choose one of k1, k2, k3"):
        kl_per_token(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
