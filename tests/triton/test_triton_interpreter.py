"""The kernels run by Triton's interpreter, against log_softmax over the whole [T, V] in float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npu_vlrl.kernels import reference, triton_kernels, triton_logprob
from npu_vlrl.kernels.triton_logprob import Tiles, logprob_entropy

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter

Inputs = tuple[Tensor, Tensor, Tensor]


def make(n_rows: int, n_ids: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n_rows, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(n_ids, width, generator=generator) / 2).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(n_ids, (n_rows,), generator=generator)


def forbid(n_ids: int, ids: list[int]) -> Tensor:
    mask = torch.zeros(n_ids, dtype=torch.bool)
    mask[ids] = True
    return mask


@contextmanager
def sizes(tiles: Tiles, programs: int = 256, gradient_elements: int = 2**26) -> Iterator[None]:
    with (
        patch.object(triton_logprob, "tiles_for", lambda device, dtype: tiles),
        patch.object(triton_logprob, "PROGRAMS", programs),
        patch.object(triton_logprob, "GRADIENT_ELEMENTS", gradient_elements),
    ):
        yield


def check(inputs: Inputs, temperature: float, forbidden: Tensor | None, mix: Tensor) -> None:
    """Both outputs, and the gradients of Σ mix · logprob + (1 - mix) · entropy. No target may be forbidden."""
    hidden, weight, targets = inputs
    found = logprob_entropy(hidden, weight, targets, temperature, forbidden)
    assert found[0].dtype == found[1].dtype == torch.float32
    gradients = torch.autograd.grad((mix * found[0] + (1 - mix) * found[1]).sum(), (hidden, weight))

    x, w = hidden.detach().double(), weight.detach().double()
    logits = (x @ w.T).requires_grad_()
    ids = torch.arange(len(w)) if forbidden is None else (~forbidden).nonzero()[:, 0]  # no infinity enters
    logprobs = torch.log_softmax(logits[:, ids] / temperature, 1)
    column = torch.searchsorted(ids, targets)
    expected = logprobs.gather(1, column[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)
    (slope,) = torch.autograd.grad((mix * expected[0] + (1 - mix) * expected[1]).sum(), logits)

    rounding = 1e-6 * (1 + float(logits.detach().abs().max()) / temperature)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, atol=rounding, rtol=0)
    # A slope is a difference of weights, at most 2 each, times p: the error is theirs even where they cancel. bfloat16
    # keeps 8 bits besides: of each slope (the interpreter cuts the rest off), of each part's product, and of the sum.
    cut = 2.0**-6 if hidden.dtype == torch.bfloat16 else 0.0
    for value, factors in zip(gradients, ((slope, w), (slope.T, x)), strict=True):
        assert value.dtype == hidden.dtype
        error = (value.double() - factors[0] @ factors[1]).abs()
        allowed = (cut * factors[0].abs() + 4 * rounding / temperature) @ factors[1].abs()
        assert (error <= allowed).all(), f"{(error / allowed).max():.1f} times what is allowed"


@settings(max_examples=40, deadline=None)
@given(
    n_rows=st.integers(1, 35),
    n_ids=st.integers(2, 50),
    width=st.integers(1, 37),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tiles=st.sampled_from([Tiles(16, 16, 16), Tiles(32, 16, 16), Tiles(16, 32, 32)]),
    programs=st.sampled_from([1, 3, 256]),
    gradient_elements=st.sampled_from([1, 900, 2**26]),
    share_forbidden=st.sampled_from([None, 0.0, 0.5, 0.95]),
    seed=st.integers(0, 1000),
)
def test_equals_the_whole(
    n_rows: int,
    n_ids: int,
    width: int,
    temperature: float,
    dtype: torch.dtype,
    tiles: Tiles,
    programs: int,
    gradient_elements: int,
    share_forbidden: float | None,
    seed: int,
) -> None:
    hidden, weight, targets = make(n_rows, n_ids, width, seed, dtype)
    forbidden = None
    if share_forbidden is not None:
        forbidden = torch.rand(n_ids, generator=torch.Generator().manual_seed(seed)) < share_forbidden
        forbidden[targets] = False
    with sizes(tiles, programs, gradient_elements):
        check((hidden, weight, targets), temperature, forbidden, torch.linspace(-1, 2, n_rows))


@pytest.mark.parametrize("ids", [range(16), range(16, 48), range(48, 60)], ids=["first", "inner", "last"])
def test_a_part_of_the_vocabulary_may_be_forbidden_as_a_whole(ids: range) -> None:
    hidden, weight, _ = make(5, 60, 8)
    allowed = [i for i in range(60) if i not in ids]
    targets = torch.tensor([allowed[0], allowed[-1], allowed[3], allowed[20], allowed[11]])
    check((hidden, weight, targets), 0.7, forbid(60, list(ids)), torch.linspace(-1, 2, 5))


def test_a_forbidden_target_has_logprob_minus_infinity_and_gradient_zero() -> None:
    hidden, weight, targets = make(4, 40, 8)
    mask = forbid(40, [int(targets[1])])
    logprobs, entropy = logprob_entropy(hidden, weight, targets, 0.7, mask)
    assert logprobs[1] == -torch.inf and torch.isfinite(entropy).all()
    (gradient,) = torch.autograd.grad(logprobs[1:2].sum(), hidden)
    assert not gradient.any()
    wanted = reference.logprob_entropy(hidden, weight, targets, 0.7, mask)
    torch.testing.assert_close((logprobs, entropy), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("outside", [-1, -100, 40, 47, 48])
def test_a_target_outside_the_vocabulary_is_nan(outside: int) -> None:
    hidden, weight, targets = make(3, 40, 8)
    targets[1] = outside
    assert logprob_entropy(hidden, weight, targets)[0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone_has_its_gradient(output: int) -> None:
    inputs = make(6, 40, 8)
    found, wanted = (
        torch.autograd.grad(f(*inputs, 0.7)[output].sum(), inputs[:2])
        for f in (logprob_entropy, reference.logprob_entropy)
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient_and_the_other_the_same(frozen: int) -> None:
    inputs = make(6, 40, 8)
    both = torch.autograd.grad(logprob_entropy(*inputs)[0].sum(), inputs[:2])
    inputs[frozen].requires_grad_(False)
    logprob_entropy(*inputs)[0].sum().backward()
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[1 - frozen].grad, both[1 - frozen])


def test_large_logits_neither_overflow_nor_lose_the_entropy() -> None:
    """Two ids 10000 above all others and 0.5 apart: p = 1 / (1 + e^±0.5), and the entropy is that of a coin."""
    weight = torch.zeros(40, 1)
    weight[3], weight[30] = 10000.0, 10000.5
    logprobs, entropy = logprob_entropy(torch.ones(2, 1), weight, torch.tensor([3, 30]))
    p = torch.sigmoid(torch.tensor([-0.5, 0.5]))
    torch.testing.assert_close(logprobs, p.log(), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, -(p * p.log()).sum().expand(2), atol=1e-6, rtol=0)


def test_strided_inputs_give_what_their_copies_give() -> None:
    hidden, weight, targets = make(12, 40, 8)
    strided = hidden.detach()[::2], weight.detach().T.contiguous().T, targets[::2]
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous()
    mask = torch.stack([forbid(40, [1, 2]), forbid(40, [3])], 1)[:, 0]
    found = logprob_entropy(*strided, 1.0, mask)
    assert all(map(torch.equal, found, logprob_entropy(*(x.contiguous() for x in strided), 1.0, mask.contiguous())))


def test_the_same_inputs_give_the_same_bits() -> None:
    inputs = make(20, 60, 20)

    def once() -> tuple[Tensor, ...]:
        outputs = logprob_entropy(*inputs, 0.7)
        return (*outputs, *torch.autograd.grad(sum(outputs).sum(), inputs[:2]))

    assert all(map(torch.equal, once(), once()))


def test_bad_temperatures_are_refused_and_a_second_derivative_too() -> None:
    inputs = make(3, 20, 8)
    with pytest.raises(ValueError, match=r"temperature is 0.0, it must be positive"):
        logprob_entropy(*inputs, 0.0)
    (first,) = torch.autograd.grad(logprob_entropy(*inputs)[0].square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside has had."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **kwargs or {})
        if isinstance(made, Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_no_tensor_of_all_logits_is_ever_made() -> None:
    n_rows, n_ids, width = 32, 320, 4
    hidden, weight, targets = make(n_rows, n_ids, width)
    with sizes(Tiles(16, 16, 16), 4, n_rows * 48), Largest() as seen:
        outputs = logprob_entropy(hidden, weight, targets)
        forward = seen.elements
        sum(outputs).sum().backward()
    assert forward == n_ids * width  # the weight itself
    assert seen.elements == n_rows * 48
    with Largest() as seen:  # the check can fail
        reference.logprob_entropy(hidden, weight, targets)
    assert seen.elements == n_rows * n_ids


BREAKAGES = {
    "a tail of hidden columns is read": (" & (here < width)", ""),
    "a tail of ids is counted": ("valid = first_id + ids < n_ids", "valid = first_id + ids < n_ids + 16"),
    "forbidden ids are counted": ("mask=valid, other=1) == 0", "mask=valid, other=1) < 2"),
    "temperature is forgotten": ("return logits * inverse_temperature", "return logits"),
    "temperature is forgotten in the gradient": ("(gradient * inverse_temperature)", "gradient"),
    "the sum is not rescaled": ("total = fade * total", "total = total"),
    "the moment is not moved": ("moment + total * (maximum - above)", "moment"),
    "the entropy has the wrong sign": ("grad_entropy[:, None] * (logprobs", "grad_entropy[:, None] * -(logprobs"),
    "the target is one off": ("(first_id + ids)[None, :]", "(first_id + ids + 1)[None, :]"),
    "parts overlap": ("(part * tiles + tile)", "(part + tile)"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_kernel_is_noticed(name: str, tmp_path: Path) -> None:
    source = Path(triton_kernels.__file__).read_text()
    right, wrong = BREAKAGES[name]
    assert right in source
    file = tmp_path / "broken.py"
    file.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("broken", file)
    assert spec is not None and spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    hidden, weight, targets = make(20, 70, 20)
    forbidden = forbid(70, [i for i in range(0, 70, 3) if i not in targets.tolist()])
    arguments = (hidden, weight, targets), 0.5, forbidden, torch.linspace(-1, 2, 20)
    with sizes(Tiles(16, 16, 16), 4):
        check(*arguments)
        with (
            patch.dict(sys.modules, {triton_kernels.__name__: broken}),
            patch("npu_vlrl.kernels.triton_kernels", broken),
            pytest.raises(AssertionError),
        ):
            check(*arguments)
