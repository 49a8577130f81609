"""Weights of 16 bits learn through masters in float32: what a step does to both, with gradients made by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from npu_vlrl.config import OptimConfig
from npu_vlrl.learner.optimizer import master, new_optimizer, step_or_skip, stepped

torch.set_num_threads(1)

NARROW = [torch.bfloat16, torch.float16]
WIDE = [torch.float32, torch.float64]
Weights = dict[str, nn.Parameter]


def make(dtype: torch.dtype, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 5), "b": (7,), "c": ()}
    return {name: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for name, s in shapes.items()}


def backward(weights: Weights, slopes: list[Tensor]) -> None:
    """A backward pass that gives each weight its slope as gradient, rounded to the weight's dtype."""
    products = [(weight * slope.to(weight.dtype)).sum() for weight, slope in zip(weights.values(), slopes, strict=True)]
    torch.stack(products).sum().backward()


def slopes(seed: int, scale: float = 1.0) -> list[Tensor]:
    """Values that each dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator).bfloat16() * scale).float() for shape in ((3, 5), (7,), ())]


def kept(weights: Weights, optimizer: torch.optim.AdamW) -> list[Tensor]:
    """A copy of all that a step changes."""
    moments = [t for state in optimizer.state.values() for t in state.values()]
    return [t.detach().clone() for p in weights.values() for t in (p, master(p))] + [t.clone() for t in moments]


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor.grad for tensor in stepped(optimizer) if tensor.grad is not None]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


# --- what gets lost without masters ----------------------------------------------------------------------------------


def test_small_steps_add_up_in_the_master_and_are_lost_without() -> None:
    """A gradient that is always the same moves AdamW by the learning rate: 1000 steps of 1e-6 are 1e-3."""
    learning, old = (nn.Parameter(torch.full((4,), 0.02).bfloat16()) for _ in range(2))
    start = float(old[0].detach())
    optimizer = new_optimizer({"w": learning}, OptimConfig(lr=1e-6))
    directly = torch.optim.AdamW([old], lr=1e-6, weight_decay=0.0, fused=True)
    for step in range(1000):
        learning.sum().backward()
        assert step_or_skip(optimizer, 10.0, 1e-6) == 2.0  # the norm of four ones
        old.sum().backward()
        directly.step()
        directly.zero_grad()
        if step == 0:
            assert torch.equal(learning, old)  # one step is below half a unit in the last place, and nobody sees it
    assert torch.allclose(master(learning), torch.tensor(start - 1e-3), rtol=0, atol=2e-6)
    assert torch.equal(learning, torch.full((4,), start - 1e-3).bfloat16())
    assert torch.equal(old, torch.full((4,), start).bfloat16())


@pytest.mark.parametrize("dtype", NARROW)
def test_gradients_of_many_passes_add_up_in_float32(dtype: torch.dtype) -> None:
    """Beyond 2^8, and 2^11 in float16, 16 bits hold no odd number, and a sum of ones stays where it is."""
    weight, old = nn.Parameter(torch.ones(2, dtype=dtype)), nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = new_optimizer({"w": weight}, OptimConfig())
    for _ in range(3000):
        weight.sum().backward()
        old.sum().backward()
        assert weight.grad is None  # 16 bits of gradient are gone at once
    (total,) = gradients(optimizer)
    assert total.dtype == torch.float32 and total.tolist() == [3000.0, 3000.0]
    assert old.grad is not None and old.grad.tolist() == [256.0 if dtype == torch.bfloat16 else 2048.0] * 2


# --- a step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
@settings(max_examples=30, deadline=None)
@given(
    passes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    skipped=st.lists(st.booleans(), min_size=5, max_size=5),
    norm=st.sampled_from([0.5, 1e6]),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_a_master_steps_as_a_float32_weight_does(
    dtype: torch.dtype, passes: list[int], skipped: list[bool], norm: float, decay: float
) -> None:
    """Bit by bit that of plain AdamW with the sum of the gradients, whatever is skipped; and the weight is rounded."""
    weights = make(dtype)
    plain = [p.detach().float().requires_grad_() for p in weights.values()]
    places = [p.data_ptr() for p in weights.values()]
    optimizer = new_optimizer(weights, OptimConfig(weight_decay=decay))
    reference = torch.optim.AdamW(plain, lr=1.0, weight_decay=decay, fused=True)
    for step, (count, skip) in enumerate(zip(passes, skipped, strict=False)):
        parts = [slopes(10 * step + number, 0.25) for number in range(count)]
        for part in parts:
            backward(weights, part)
        found = step_or_skip(optimizer, norm, 1e-3, skip)
        if not skip:
            for tensor, *gradient in zip(plain, *parts, strict=True) if parts else []:
                tensor.grad = torch.stack(gradient).cumsum(0)[-1]
            total = math.sqrt(sum(float(t.grad.double().square().sum()) for t in plain if t.grad is not None))
            assert found == pytest.approx(total, rel=1e-6)
            for tensor in plain:
                if tensor.grad is not None:
                    tensor.grad *= torch.clamp(norm / (torch.tensor(found) + 1e-6), max=1.0)
            reference.param_groups[0]["lr"] = 1e-3
            reference.step()
            reference.zero_grad()
        else:
            assert found is None
        assert all(torch.equal(master(p), tensor) for p, tensor in zip(weights.values(), plain, strict=True))
        assert all(torch.equal(p, master(p).to(dtype)) for p in weights.values())
    assert [p.data_ptr() for p in weights.values()] == places  # engines and captured graphs read there


@pytest.mark.parametrize("dtype", [*NARROW, *WIDE])
@pytest.mark.parametrize("how", ["asked", "nan", "inf"])
def test_a_skipped_step_changes_nothing(dtype: torch.dtype, how: str) -> None:
    weights = make(dtype)
    optimizer = new_optimizer(weights, OptimConfig())
    backward(weights, slopes(1))
    step_or_skip(optimizer, 1.0, 1e-2)  # moments exist
    before = kept(weights, optimizer)
    backward(weights, [slope if how == "asked" else slope * float(how) for slope in slopes(2)])
    assert step_or_skip(optimizer, 1.0, 1e-2, skip=how == "asked") is None
    assert same(kept(weights, optimizer), before)
    assert all(p.grad is None and master(p).grad is None for p in weights.values())
    backward(weights, slopes(3))
    assert step_or_skip(optimizer, 1.0, 1e-2) is not None
    assert not same(kept(weights, optimizer), before)  # so the comparison above would see a step


@pytest.mark.parametrize("dtype", NARROW)
def test_only_what_was_stepped_is_written_and_counts_as_changed(dtype: torch.dtype) -> None:
    """What counts is what is sent to the engines."""
    weights = make(dtype)
    optimizer = new_optimizer(weights, OptimConfig())
    before = {name: (p.detach().clone(), p._version) for name, p in weights.items()}
    weights["b"].sum().backward()
    step_or_skip(optimizer, 1.0, 0.1)
    for name, weight in weights.items():
        value, version = before[name]
        assert torch.equal(weight, value) == (name != "b") == (weight._version == version)
    count = weights["b"]._version
    step_or_skip(optimizer, 1.0, 0.1)  # without any gradient
    assert weights["b"]._version == count


def test_a_copy_that_does_not_count_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is on some devices, with what writes lists of tensors."""

    def silent(targets: list[Tensor], sources: list[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.data.copy_(source)

    weights = make(torch.bfloat16)
    optimizer = new_optimizer(weights, OptimConfig())
    backward(weights, slopes(1))
    monkeypatch.setattr(torch, "_foreach_copy_", silent)
    step_or_skip(optimizer, 1.0, 0.1)
    assert all(weight._version == 1 for weight in weights.values())


# --- the place of the gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*NARROW, *WIDE])
def test_gradients_stand_in_the_order_of_the_parameters(dtype: torch.dtype) -> None:
    weights = make(dtype)
    optimizer = new_optimizer(weights, OptimConfig())
    (weights["c"] * 3 + weights["a"].sum() * 2).backward()
    found = gradients(optimizer)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [g.dtype for g in found] == [wide] * 2  # "b" got none, and stays out of the step
    expected = [torch.full((3, 5), 2.0), torch.tensor(3.0)]
    assert all(torch.equal(g, e.to(wide)) for g, e in zip(found, expected, strict=True))
    assert all(t is master(p) for t, p in zip(stepped(optimizer), weights.values(), strict=True))


@pytest.mark.parametrize("dtype", [*NARROW, *WIDE])
def test_what_is_written_into_them_is_what_steps(dtype: torch.dtype) -> None:
    """As the sum over ranks does."""
    alone, summed = make(dtype), make(dtype)
    for weights, parts in ((alone, (slopes(1), slopes(2))), (summed, (slopes(1),))):
        optimizer = new_optimizer(weights, OptimConfig())
        for part in parts:
            backward(weights, part)
        if weights is summed:
            for gradient, other in zip(gradients(optimizer), slopes(2), strict=True):
                gradient += other
        assert step_or_skip(optimizer, 1.0, 0.1) == pytest.approx(
            math.sqrt(sum(float((a + b).square().sum()) for a, b in zip(slopes(1), slopes(2), strict=True))), rel=1e-5
        )
    assert all(torch.equal(master(alone[name]), master(summed[name])) for name in alone)
    unchanged = make(dtype)
    assert not any(torch.equal(alone[name], unchanged[name]) for name in alone)


# --- who has a master ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_weights_are_stepped_themselves_as_ever(dtype: torch.dtype) -> None:
    weights, plain = make(dtype), make(dtype)
    optimizer = new_optimizer(weights, OptimConfig(weight_decay=0.1))
    reference = torch.optim.AdamW(plain.values(), lr=1e-6, betas=(0.9, 0.999), weight_decay=0.1, fused=True)
    assert all(master(p) is p and not p._post_accumulate_grad_hooks for p in weights.values())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], weights.values(), strict=True))
    for step in range(3):
        for some in (weights, plain):
            backward(some, slopes(step))
        torch.nn.utils.clip_grad_norm_(plain.values(), 1.0)
        reference.param_groups[0]["lr"] = 1e-2
        reference.step()
        reference.zero_grad()
        step_or_skip(optimizer, 1.0, 1e-2)
    assert all(torch.equal(weights[name], plain[name]) for name in weights)


def test_wide_and_narrow_weights_step_together() -> None:
    """A critic has a head in float32 on a backbone of 16 bits. One norm clips both."""
    weights = {"head": nn.Parameter(torch.ones(2)), "body": nn.Parameter(torch.ones(2).bfloat16())}
    optimizer = new_optimizer(weights, OptimConfig())
    (weights["head"].sum() * 3 + weights["body"].sum() * 4).backward()
    assert step_or_skip(optimizer, 1.0, 0.25) == pytest.approx(math.sqrt(2 * 9 + 2 * 16))
    means = [optimizer.state[master(p)]["exp_avg"] for p in weights.values()]
    expected = [0.1 * slope / math.sqrt(50) for slope in (3, 4)]  # (1 - beta1) of the clipped gradient
    assert [float(m[0]) for m in means] == pytest.approx(expected, rel=1e-5)
    assert [float(p.detach()[0]) for p in weights.values()] == pytest.approx([0.75, 0.75], rel=1e-6)


def test_a_master_is_that_of_the_newest_optimizer() -> None:
    """A warm start is trained by another one before. What it left in a master but not in the weight is gone, as it is
    for a run that is resumed from the weights.
    """
    weights = make(torch.bfloat16)
    first = new_optimizer(weights, OptimConfig())
    backward(weights, slopes(1))
    step_or_skip(first, 1.0, 1e-4)
    assert not all(torch.equal(master(p), p.float()) for p in weights.values())
    second = new_optimizer(weights, OptimConfig())
    assert all(torch.equal(master(p), p.float()) for p in weights.values())
    backward(weights, slopes(2))
    for gradient, slope in zip(gradients(second), slopes(2), strict=True):
        assert torch.equal(gradient, slope)  # once, though two optimisers were made
    assert step_or_skip(second, 1.0, 1e-2) is not None
    with pytest.raises(AssertionError, match="a newer optimiser has these weights"):
        step_or_skip(first, 1.0, 1e-2)


def test_a_copy_of_a_weight_has_no_master() -> None:
    """References and critics are copies of the policy."""
    weights = make(torch.bfloat16)
    optimizer = new_optimizer(weights, OptimConfig())
    copied = copy.deepcopy(nn.ParameterDict(weights))
    assert all(master(p) is p for p in copied.values())
    copied["a"].sum().backward()
    assert copied["a"].grad is not None and copied["a"].grad.dtype == torch.bfloat16
    assert not gradients(optimizer)
