"""The clipped surrogate and the KL estimates of single tokens, against plain Python arithmetic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_vlrl.learner.loss import KLKind, kl_per_token, ppo_loss_terms

torch.set_num_threads(1)

TOKEN = st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]), st.integers(0, 3))


def f64(values: list[float], grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def surrogate(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    clipped = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, clipped * advantage)
    if advantage < 0 and dual is not None:
        objective = max(objective, dual * advantage)
    return -objective


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(TOKEN, min_size=1, max_size=12),
    low=st.sampled_from([0.1, 0.2]),
    high=st.sampled_from([0.2, 0.28]),
    dual=st.sampled_from([None, 3.0]),
    sequence=st.booleans(),
)
def test_equals_the_definition(tokens: list, low: float, high: float, dual: float | None, sequence: bool) -> None:
    logprobs, behaviour, advantages, samples = (list(column) for column in zip(*tokens, strict=True))
    log_ratios = [p - b for p, b in zip(logprobs, behaviour, strict=True)]
    if sequence:
        own = {s: [r for r, t in zip(log_ratios, samples, strict=True) if t == s] for s in samples}
        log_ratios = [sum(own[s]) / len(own[s]) for s in samples]
    ratios = [math.exp(r) for r in log_ratios]
    found, stats = ppo_loss_terms(
        f64(logprobs),
        f64(behaviour),
        f64(advantages),
        low,
        high,
        dual,
        "sequence" if sequence else "token",
        torch.tensor(samples),
        4,
    )
    expected = [surrogate(r, a, low, high, dual) for r, a in zip(ratios, advantages, strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert stats["ratio_sum"].item() == pytest.approx(sum(ratios))
    assert stats["ratio_max"].item() == pytest.approx(max(ratios))
    pairs = list(zip(ratios, advantages, strict=True))
    assert stats["clip_low_sum"].item() == sum(a < 0 and r < 1 - low for r, a in pairs)
    assert stats["clip_high_sum"].item() == sum(a > 0 and r > 1 + high for r, a in pairs)
    assert stats["dual_clip_sum"].item() == sum(dual is not None and a < 0 and r > dual for r, a in pairs)


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
def test_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    logprob, behaviour = f64([-1.0], grad=True), f64([-1.0 - math.log(ratio)], grad=True)
    found, _ = ppo_loss_terms(logprob, behaviour, f64([advantage]), 0.2, 0.28, 3.0)
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert logprob.grad is not None and logprob.grad.item() == pytest.approx(slope)
    assert behaviour.grad is None


def test_without_dual_clip_a_far_likelier_bad_token_pulls_without_limit() -> None:
    logprob = f64([-1.0], grad=True)
    found, stats = ppo_loss_terms(logprob, f64([-1.0 - math.log(5)]), f64([-2.0]), 0.2, 0.28, None)
    found.sum().backward()
    assert logprob.grad is not None and logprob.grad.item() == pytest.approx(10.0)
    assert stats["dual_clip_sum"].item() == 0


def test_the_sequence_ratio_spreads_its_gradient_over_the_sample() -> None:
    """GSPO: s = exp(mean log-ratio); with weights 1/2 the gradient in each of two tokens is A · s / 2."""
    behaviour = f64([-1.0, -2.0, -3.0])
    logprobs = f64([-0.9, -2.0, -3.5], grad=True)
    samples = torch.tensor([0, 0, 1])
    found, _ = ppo_loss_terms(logprobs, behaviour, f64([2.0, 2.0, 1.0]), 0.2, 0.28, None, "sequence", samples, 2)
    s = math.exp(0.05)
    assert found.tolist() == pytest.approx([-2 * s, -2 * s, -math.exp(-0.5)])
    (found * f64([0.5, 0.5, 0.0])).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-s, -s, 0.0])


def test_one_token_of_a_clipped_sample_gets_no_gradient_though_its_own_ratio_is_one() -> None:
    logprobs = f64([-1.0, 0.0], grad=True)
    args = (f64([-1.0, -2.0]), f64([1.0, 1.0]), 0.2, 0.2, None)
    by_sample, _ = ppo_loss_terms(logprobs, *args, "sequence", torch.tensor([0, 0]), 1)
    (gradient,) = torch.autograd.grad(by_sample.sum(), logprobs)
    assert gradient.tolist() == [0.0, 0.0]
    (gradient,) = torch.autograd.grad(ppo_loss_terms(logprobs, *args)[0].sum(), logprobs)
    assert gradient.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_absurd_ratios_stay_finite(advantage: float, gap: float) -> None:
    logprob = torch.tensor([gap], requires_grad=True)
    found, stats = ppo_loss_terms(logprob, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2, None)
    found.sum().backward()
    assert found.isfinite().all() and stats["ratio_max"].isfinite()
    assert logprob.grad is not None and logprob.grad.item() == 0


def test_half_precision_logprobs_are_compared_in_float32() -> None:
    found, _ = ppo_loss_terms(
        torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-1.001]), torch.tensor([1.0]).double(), 0.2, 0.2, None
    )
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(-math.exp(0.001), abs=1e-6)


def test_the_sequence_ratio_needs_the_samples() -> None:
    with pytest.raises(AssertionError, match="which tokens are its own"):
        ppo_loss_terms(torch.zeros(1), torch.zeros(1), torch.zeros(1), 0.2, 0.2, None, "sequence")


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
        (gradient,) = torch.autograd.grad(estimate, logits)
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-9)


def test_kl_far_away_is_finite_and_the_reference_gets_no_gradient() -> None:
    logprobs, reference = torch.tensor([-500.0, -1.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    kl_per_token(logprobs, reference).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all() and reference.grad is None
    assert logprobs.grad[1].item() == pytest.approx(1 - math.e)


def test_unknown_kl() -> None:
    with pytest.raises(ValueError, match="'k4'; choose one of k1, k2, k3"):
        kl_per_token(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
