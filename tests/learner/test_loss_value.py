"""The critic's loss: by hand, against numpy, split into micro-batches, and what a clip does to the gradient."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_vlrl.algorithms import value as module
from npu_vlrl.algorithms.metrics import reduce_metrics
from npu_vlrl.algorithms.value import ValueOptions, reduce_value_metrics

torch.set_num_threads(1)


def value_loss(*tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`value.value_loss` with the clip last."""
    *states, clip = tensors
    return module.value_loss(*states, ValueOptions(value_clip=clip))


STATE = st.tuples(*[st.floats(-3, 3) for _ in range(3)], st.floats(0, 1))


def f64(values: list[float], grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


CASES = {
    # (value, old, return): (loss, gradient), clip 0.5
    "inside": (1.2, 1.0, 3.0, 0.5 * 1.8**2, -1.8),
    "moved far towards the return": (2.0, 1.0, 3.0, 0.5 * 1.5**2, 0.0),
    "moved far away from it": (0.0, 1.0, 3.0, 0.5 * 3.0**2, -3.0),
    "moved far past it": (5.0, 1.0, 2.0, 0.5 * 3.0**2, 3.0),
    "moved far down towards it": (-1.0, 1.0, -2.0, 0.5 * 2.5**2, 0.0),
    "right": (1.0, 1.0, 1.0, 0.0, 0.0),
}


@pytest.mark.parametrize(("value", "old", "target", "loss", "slope"), CASES.values(), ids=CASES.keys())
def test_value_loss_by_hand(value: float, old: float, target: float, loss: float, slope: float) -> None:
    values, olds, targets = f64([value], grad=True), f64([old], grad=True), f64([target], grad=True)
    found, metrics = value_loss(values, olds, targets, f64([2.0]), 0.5)
    found.backward()
    assert found.item() == pytest.approx(2 * loss) and metrics["value_loss_sum"].item() == pytest.approx(loss)
    assert values.grad is not None and values.grad.item() == pytest.approx(2 * slope)
    assert olds.grad is None and targets.grad is None
    assert metrics["value_clip_sum"].item() == (slope == 0 and loss > 0)
    assert not any(value.requires_grad for value in metrics.values())


def test_without_a_clip_every_value_may_move() -> None:
    values = f64([2.0], grad=True)
    found, metrics = value_loss(values, f64([1.0]), f64([3.0]), f64([1.0]), None)
    assert found.item() == 0.5 and torch.autograd.grad(found, values)[0].item() == -1.0
    assert metrics["value_clip_sum"].item() == 0


@settings(max_examples=40, deadline=None)
@given(states=st.lists(STATE, min_size=1, max_size=8), bound=st.sampled_from([None, 0.2, 1.0]))
def test_value_loss_equals_numpy(states: list[tuple[float, ...]], bound: float | None) -> None:
    value, old, target, weight = (np.array(column) for column in zip(*states, strict=True))
    total = clipped = 0.0
    for v, o, r, w in zip(value, old, target, weight, strict=True):
        plain = (v - r) ** 2
        near = plain if bound is None else (np.clip(v, o - bound, o + bound) - r) ** 2
        total += w * 0.5 * max(plain, near)
        clipped += near > plain
    v, o, r, w = (torch.from_numpy(column) for column in (value, old, target, weight))
    found, metrics = value_loss(v, o, r, w, bound)
    assert found.item() == pytest.approx(total, abs=1e-12)
    reduced = reduce_value_metrics([metrics])
    assert reduced["value"] == pytest.approx(value.mean(), abs=1e-12)
    assert reduced["return"] == pytest.approx(target.mean(), abs=1e-12)
    assert reduced["value_clip"] == pytest.approx(clipped / len(states))
    assert reduced["tokens"] == len(states)


def test_the_gradient_is_that_of_finite_differences() -> None:
    old, target, weight = f64([0.0, 0.1, -1.0, 2.0]), f64([1.0, -0.4, 0.3, -2.0]), f64([0.5, 1.0, 2.0, 0.1])
    values = f64([0.1, 0.9, 0.2, 2.05], grad=True)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, target, weight, 0.3)[0], (values,))


def test_a_value_inside_the_clip_is_never_counted_as_clipped() -> None:
    """In float32, old + (v - old) is not always v."""
    generator = torch.Generator().manual_seed(0)
    old, values, returns = (torch.randn(4000, generator=generator) * scale for scale in (1e-3, 0.1, 3.0))
    rounded = old + (values - old)
    assert (rounded != values).any()
    assert value_loss(values, old, returns, torch.ones(4000), 5.0)[1]["value_clip_sum"].item() == 0


@pytest.mark.parametrize("bound", [None, 0.5])
def test_any_split_of_the_states_gives_the_same_loss_gradient_and_metrics(bound: float | None) -> None:
    rng = np.random.default_rng(4)
    value, old, target, weight = (torch.from_numpy(rng.normal(size=12)) for _ in range(4))

    def run(parts: list[slice]) -> tuple[float, Tensor, dict[str, float]]:
        leaf = value.clone().requires_grad_()
        losses, metrics = zip(*(value_loss(leaf[p], old[p], target[p], weight[p], bound) for p in parts), strict=True)
        sum(losses).backward()
        assert leaf.grad is not None
        return sum(loss.item() for loss in losses), leaf.grad, reduce_value_metrics(metrics)

    whole = run([slice(0, 12)])
    for parts in ([slice(i, i + 1) for i in range(12)], [slice(0, 5), slice(5, 5), slice(5, 12)]):
        loss, gradient, metrics = run(parts)
        assert abs(loss - whole[0]) < 1e-12 and (gradient - whole[1]).abs().max() < 1e-12
        assert metrics == pytest.approx(whole[2], abs=1e-12)
    assert whole[2]["value_clip"] > 0 or bound is None


# --- explained variance ----------------------------------------------------------------------------------------------


def explained(values: list[float], returns: list[float]) -> float:
    metrics = value_loss(f64(values), f64(values), f64(returns), f64([1.0] * len(values)), None)[1]
    return reduce_value_metrics([metrics])["explained_variance"]


def test_explained_variance() -> None:
    rng = np.random.default_rng(0)
    returns = rng.normal(size=20)
    values = returns + 0.3 * rng.normal(size=20) + 1.0
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert 0.5 < expected < 1 and explained(values.tolist(), returns.tolist()) == pytest.approx(expected)
    assert explained([1.0, 2.0, 4.0], [1.0, 2.0, 4.0]) == pytest.approx(1)
    assert explained([6.0, 7.0, 9.0], [1.0, 2.0, 4.0]) == pytest.approx(1)  # a constant error explains the variance
    assert explained([0.0, 0.0, 0.0], [1.0, 2.0, 4.0]) == pytest.approx(0)
    assert explained([-1.0, -2.0, -4.0], [1.0, 2.0, 4.0]) == pytest.approx(-3)


def test_the_mean_over_micro_batches_of_explained_variance_would_not_do() -> None:
    """Perturbation: every half has constant returns, and all the variance is between the halves."""
    halves = [value_loss(f64([v] * 3), f64([v] * 3), f64([v] * 3), f64([1.0] * 3), None)[1] for v in (0.0, 1.0)]
    assert reduce_value_metrics(halves)["explained_variance"] == pytest.approx(1)
    assert [reduce_value_metrics([half])["explained_variance"] for half in halves] == [0.0, 0.0]


@pytest.mark.parametrize("constant", [0.0, 0.1, 7.0, -1e4])
def test_returns_that_do_not_vary_have_nothing_to_explain(constant: float) -> None:
    returns = torch.full((1000,), constant)
    noisy = returns + torch.linspace(-1, 1, 1000)
    metrics = value_loss(noisy, noisy, returns, torch.ones(1000), 0.5)[1]
    assert reduce_value_metrics([metrics])["explained_variance"] == 0


# --- edges -----------------------------------------------------------------------------------------------------------


def test_no_state_at_all() -> None:
    values, nothing = torch.zeros(0, requires_grad=True), torch.zeros(0)
    loss, metrics = value_loss(values, nothing, nothing, nothing, 0.5)
    loss.backward()
    assert loss.item() == 0 and values.grad is not None
    assert all(value.item() == 0 for value in metrics.values())
    assert reduce_value_metrics([metrics]) == {"tokens": 0.0}
    assert reduce_value_metrics([]) == {"tokens": 0.0}


@pytest.mark.parametrize("name", ["values", "old", "returns"])
def test_nan_in_a_value_is_not_hidden(name: str) -> None:
    given_N = {key: f64([0.0, 0.1]) for key in ("values", "old", "returns")}
    given_N[name][1] = math.nan
    loss, metrics = value_loss(given_N["values"], given_N["old"], given_N["returns"], f64([1.0, 1.0]), 0.5)
    assert loss.isnan() and metrics["value_loss_sum"].isnan()
    assert name == "old" or math.isnan(reduce_value_metrics([metrics])["explained_variance"])


def test_half_precision_values_are_compared_in_float32() -> None:
    values = torch.tensor([1.0], dtype=torch.bfloat16)
    loss, metrics = value_loss(values, values, torch.tensor([1.001], dtype=torch.float64), torch.ones(1), 0.5)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(0.5e-6, rel=1e-3)
    assert reduce_metrics([metrics])["value_loss"] == pytest.approx(loss.item())
