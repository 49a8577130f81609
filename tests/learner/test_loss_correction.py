"""Off-policy corrections and the decoupled objective: weights by hand, what is left out, and what is refused."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from npu_vlrl.algorithms.metrics import reduce_metrics
from npu_vlrl.config import AlgorithmConfig
from tests.support.losses import policy_loss

torch.set_num_threads(1)

LOG2 = math.log(2)
ENGINE = [-1.0, -1.0, -1.0, -1.0]
PROXIMAL = [-1.0 + LOG2, -1.0 - 2 * LOG2, -1.0, -1.0 + 2 * LOG2]
"""Weights 2, 0.25, 1, 4."""


def f64(values: list[float], grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def run(
    loss: str, correction: Any = "off", current: list[float] | None = None, **settings: Any
) -> tuple[float, list[float], dict[str, float]]:
    """(loss, gradient, metrics) of the four tokens with advantage 1 and weight 1; the policy has not moved yet."""
    logprobs = f64(current or PROXIMAL, grad=True)
    settings = {"clip_low": 0.2, "clip_high": 0.2, "correction_low": 0.5, "correction_high": 3.0} | settings
    total, metrics = policy_loss(
        logprobs,
        torch.zeros(4),
        f64(ENGINE),
        f64([1.0] * 4),
        f64([1.0] * 4),
        loss=loss,
        proximal_N=f64(PROXIMAL),
        correction=correction,
        sample_N=torch.tensor([0, 0, 1, 1]),
        n_samples=2,
        **settings,
    )
    (gradient,) = torch.autograd.grad(total, logprobs)
    assert not any(value.requires_grad for value in metrics.values())
    return total.item(), gradient.tolist(), reduce_metrics([metrics])


# every one of these has the gradient -A · weight at a policy that has not moved
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
def test_tis_caps_the_weight(loss: str) -> None:
    _, gradient, metrics = run(loss, "tis")
    assert gradient == pytest.approx([-2.0, -0.25, -1.0, -3.0])
    assert metrics["correction_weight"] == pytest.approx((2 + 0.25 + 1 + 3) / 4)
    assert metrics["correction_capped"] == 1 / 4 and "correction_masked" not in metrics


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
def test_icepop_leaves_tokens_outside_the_bounds_out(loss: str) -> None:
    _, gradient, metrics = run(loss, "icepop")
    assert gradient == pytest.approx([-2.0, 0.0, -1.0, 0.0])
    assert metrics["correction_weight"] == pytest.approx(3 / 4)
    assert metrics["correction_masked"] == 2 / 4 and "correction_capped" not in metrics


def test_decoupled_ppo_leaves_out_what_is_above_the_cap_only() -> None:
    total, gradient, metrics = run("decoupled_ppo")
    assert gradient == pytest.approx([-2.0, -0.25, -1.0, 0.0])
    assert total == pytest.approx(-3.25) and metrics["pg_loss"] == pytest.approx(-3.25 / 4)
    assert metrics["correction_weight"] == pytest.approx(3.25 / 4) and metrics["correction_masked"] == 1 / 4


def test_decoupled_ppo_clips_at_the_proximal_policy_not_at_the_engine() -> None:
    """Current over proximal: 1.1, 1.5, 0.9, 1. Over the engine: 2.2, 0.375, 0.9, 4."""
    current = [p + math.log(r) for p, r in zip(PROXIMAL, (1.1, 1.5, 0.9, 1.0), strict=True)]
    total, gradient, metrics = run("decoupled_ppo", current=current)
    assert total == pytest.approx(-(2 * 1.1 + 0.25 * 1.2 + 0.9))
    assert gradient == pytest.approx([-2 * 1.1, 0.0, -0.9, 0.0])
    assert metrics["clip_high"] == 1 / 4 and metrics["clip_low"] == 0
    kl = sum(r - 1 - math.log(r) for r in (1.1, 1.5, 0.9, 1.0)) / 4
    assert metrics["anchor_kl"] == pytest.approx(kl)
    assert metrics["gap_max"] == pytest.approx(2 * LOG2)


def test_decoupled_ppo_with_a_wide_bound_is_icepop_without_a_lower_one() -> None:
    current = [p + 0.1 for p in PROXIMAL]
    decoupled = run("decoupled_ppo", current=current)
    icepop = run("ppo", "icepop", current, correction_low=1e-9)
    assert decoupled[1] == pytest.approx(icepop[1]) and decoupled[2] == pytest.approx(icepop[2])
    assert run("ppo", "icepop", current)[1] != pytest.approx(decoupled[1])


def test_a_corrected_ratio_is_still_that_to_the_proximal_policy() -> None:
    """TIS as published: min(w, C) · clipped surrogate of current / proximal; the weight does not move the clip."""
    current = [p + math.log(1.5) for p in PROXIMAL]
    total, gradient, metrics = run("ppo", "tis", current)
    assert total == pytest.approx(-1.2 * (2 + 0.25 + 1 + 3))
    assert gradient == [0.0] * 4 and metrics["clip_high"] == 1.0


def test_kl_and_entropy_are_not_corrected() -> None:
    """Only the policy's own loss was sampled from the engine; a left-out token is still held by the reference."""
    reference = f64([-1.5] * 4)
    _, gradient, _ = run("ppo", "icepop", reference_N=reference, kl_coef=0.5, kl_kind="k2")
    pull = [0.5 * (p + 1.5) for p in PROXIMAL]
    assert gradient == pytest.approx([g + k for g, k in zip([-2.0, 0.0, -1.0, 0.0], pull, strict=True)])


def test_a_bound_itself_is_inside() -> None:
    low, high = (f64(PROXIMAL) - f64(ENGINE)).exp()[[1, 3]].tolist()
    assert run("ppo", "icepop", correction_low=low, correction_high=high)[2]["correction_masked"] == 0
    assert run("ppo", "icepop", correction_low=low * 1.001, correction_high=high)[2]["correction_masked"] == 1 / 4
    assert run("ppo", "icepop", correction_low=low, correction_high=high * 0.999)[2]["correction_masked"] == 1 / 4


def test_the_weight_of_equal_policies_is_one() -> None:
    """Then a correction changes nothing; it would with other logprobs, above."""
    logprobs = f64(ENGINE, grad=True)
    weights = f64([0.1, 0.2, 0.3, 0.4])
    found = []
    kinds: list[tuple[str, Any]] = [("ppo", "off"), ("ppo", "tis"), ("ppo", "icepop"), ("decoupled_ppo", "off")]
    for loss, correction in kinds:
        total, _ = policy_loss(
            logprobs + 0.1,
            torch.zeros(4),
            f64(ENGINE),
            f64([1.0, -1.0, 2.0, 0.5]),
            weights,
            loss=loss,
            clip_low=0.2,
            clip_high=0.2,
            proximal_N=f64(ENGINE),
            correction=correction,
        )
        found.append((total.item(), *torch.autograd.grad(total, logprobs)[0].tolist()))
    assert found[1] == found[0] and found[2] == found[0] and found[3] == found[0]


@pytest.mark.parametrize("correction", ["tis", "icepop"])
def test_weights_and_engine_logprobs_get_no_gradient(correction: Any) -> None:
    logprobs, behaviour, proximal = (f64([-1.0], grad=True) for _ in range(3))
    total, _ = policy_loss(
        logprobs,
        torch.zeros(1),
        behaviour,
        f64([1.0]),
        f64([1.0]),
        loss="ppo",
        clip_low=0.2,
        clip_high=0.2,
        proximal_N=proximal,
        correction=correction,
    )
    total.backward()
    assert logprobs.grad is not None and behaviour.grad is None and proximal.grad is None


@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize(("loss", "correction"), [("ppo", "tis"), ("ppo", "icepop"), ("decoupled_ppo", "off")])
def test_absurd_weights_stay_finite(loss: str, correction: Any, gap: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    total, metrics = policy_loss(
        logprobs,
        torch.zeros(1),
        logprobs.detach() - gap,
        torch.ones(1),
        torch.ones(1),
        loss=loss,
        clip_low=0.2,
        clip_high=0.2,
        proximal_N=logprobs.detach(),
        correction=correction,
    )
    assert total.isfinite() and metrics["correction_weight_sum"] <= 2
    assert torch.autograd.grad(total, logprobs)[0].isfinite().all()


@pytest.mark.parametrize("name", ["proximal", "behaviour"])
@pytest.mark.parametrize(("loss", "correction"), [("ppo", "tis"), ("ppo", "icepop"), ("decoupled_ppo", "off")])
def test_nan_is_not_masked_away(loss: str, correction: Any, name: str) -> None:
    values = {"proximal": f64([-1.0, -1.0]), "behaviour": f64([-1.0, -1.0])}
    values[name][1] = math.nan
    total, metrics = policy_loss(
        f64([-1.0, -1.0]),
        torch.zeros(2),
        values["behaviour"],
        f64([1.0, 1.0]),
        f64([1.0, 1.0]),
        loss=loss,
        clip_low=0.2,
        clip_high=0.2,
        proximal_N=values["proximal"],
        correction=correction,
    )
    assert total.isnan() and metrics["correction_weight_sum"].isnan()


def refused(match: str, **settings: Any) -> None:
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match=match):
        policy_loss(zero, zero, zero, zero, zero, clip_low=0.2, clip_high=0.2, **settings)


def test_what_is_refused_and_what_to_do_about_it() -> None:
    for settings in ({"correction": "tis"}, {"correction": "icepop"}, {"loss": "decoupled_ppo"}):
        refused(r"needs the learner's logprobs from before the first update .* score the samples first", **settings)
    with pytest.raises(ValidationError, match="'off', 'tis' or 'icepop'"):
        AlgorithmConfig(correction="mask")
    with pytest.raises(ValidationError, match="choose one of ppo, decoupled_ppo, gspo, cispo, reinforce, or write pa"):
        AlgorithmConfig(loss="a2c")
