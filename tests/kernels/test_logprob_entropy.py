"""Chunked log-probability and entropy against torch's log_softmax over the whole [T, V] in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npu_vlrl.kernels.reference import logprob_entropy

torch.set_num_threads(1)


def make(n_rows: int, n_ids: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n_rows, width, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(n_ids, width, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(n_ids, (n_rows,), generator=generator)


def whole(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: list[int]
) -> tuple[Tensor, Tensor]:
    """Keeps only the columns of allowed ids, so that no infinity enters."""
    logprobs = torch.log_softmax(hidden @ weight[allowed].T / temperature, dim=1)
    column = torch.tensor([allowed.index(int(t)) for t in targets])
    return logprobs.gather(1, column[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


@settings(max_examples=40, deadline=None)
@given(
    n_rows=st.integers(1, 9),
    n_ids=st.integers(2, 12),
    chunk=st.integers(1, 10),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    seed=st.integers(0, 1000),
    forbid=st.booleans(),
)
def test_equals_the_whole(n_rows: int, n_ids: int, chunk: int, temperature: float, seed: int, forbid: bool) -> None:
    hidden, weight, targets = make(n_rows, n_ids, 3, seed)
    unused = sorted(set(range(n_ids)) - set(targets.tolist()))[::2] if forbid else []
    forbidden = torch.zeros(n_ids, dtype=torch.bool)
    forbidden[unused] = True
    allowed = [i for i in range(n_ids) if i not in unused]
    found = logprob_entropy(hidden, weight, targets, temperature, forbidden if forbid else None, chunk)
    expected = whole(hidden, weight, targets, temperature, allowed)
    mix = torch.linspace(-1, 2, n_rows, dtype=torch.float64)
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, atol=1e-12, rtol=1e-12)
    gradients = torch.autograd.grad((mix * found[0] + (1 - mix) * found[1]).sum(), (hidden, weight))
    references = torch.autograd.grad((mix * expected[0] + (1 - mix) * expected[1]).sum(), (hidden, weight))
    for value, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(value, reference, atol=1e-11, rtol=1e-11)


def test_gradcheck_of_both_outputs() -> None:
    hidden, weight, targets = make(5, 7, 3)
    forbidden = torch.zeros(7, dtype=torch.bool)
    forbidden[[i for i in range(7) if i not in targets.tolist()][0]] = True
    assert torch.autograd.gradcheck(lambda h, w: logprob_entropy(h, w, targets, 0.7, forbidden, 2), (hidden, weight))


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone_has_its_gradient(output: int) -> None:
    hidden, weight, targets = make(4, 6, 3)
    logits = (hidden.detach() @ weight.detach().T).numpy()
    logprob_entropy(hidden, weight, targets, chunk=3)[output].sum().backward()
    expected = torch.zeros_like(hidden)
    for row, target in enumerate(targets.tolist()):
        exps = [math.exp(x) for x in logits[row]]
        p = [x / sum(exps) for x in exps]
        entropy = -sum(x * math.log(x) for x in p)
        for j in range(6):
            slope = (j == target) - p[j] if output == 0 else -p[j] * (math.log(p[j]) + entropy)
            expected[row] += slope * weight.detach()[j]
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, expected, atol=1e-12, rtol=1e-12)


def test_frozen_inputs_get_nothing() -> None:
    hidden, weight, targets = make(4, 6, 3)
    logprob_entropy(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    by_hidden = hidden.grad.clone()
    logprob_entropy(hidden.detach(), weight, targets)[0].sum().backward()
    assert weight.grad is not None and torch.equal(hidden.grad, by_hidden)


def test_uniform_by_hand() -> None:
    hidden, weight, targets = torch.zeros(2, 3), torch.randn(8, 3), torch.tensor([0, 5])
    forbidden = torch.tensor([False] * 6 + [True] * 2)
    logprobs, entropy = logprob_entropy(hidden, weight, targets, 1.0, forbidden)
    assert logprobs.tolist() == pytest.approx([-math.log(6)] * 2)
    assert entropy.tolist() == pytest.approx([math.log(6)] * 2)


def test_a_forbidden_target_is_minus_infinity_without_gradient() -> None:
    hidden, weight, targets = make(3, 5, 2)
    targets = torch.tensor([0, 1, 2])
    forbidden = torch.tensor([False, True, False, False, False])
    logprobs, entropy = logprob_entropy(hidden, weight, targets, 1.0, forbidden)
    assert logprobs.isinf().tolist() == [False, True, False]
    assert entropy.isfinite().all()
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad[1].tolist() == [0, 0] and hidden.grad[[0, 2]].abs().sum() > 0
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all() and weight.grad[1].tolist() == [0, 0]


def test_huge_logits_stay_finite() -> None:
    hidden, weight = torch.full((1, 1), 1e4, requires_grad=True), torch.tensor([[1.0], [-1.0], [0.5]])
    logprobs, entropy = logprob_entropy(hidden, weight, torch.tensor([1]), 1.0, torch.tensor([False, False, True]))
    assert logprobs.item() == pytest.approx(-2e4) and entropy.item() == 0
    (logprobs + entropy).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_half_precision_inputs_give_wide_outputs() -> None:
    hidden, weight, targets = (x.detach() for x in make(40, 50, 16))
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    logprobs, entropy = logprob_entropy(hidden, weight, targets, 1.0, None, 1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    wide_h, wide_w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = whole(wide_h, wide_w, targets, 1.0, list(range(50)))
    torch.testing.assert_close(logprobs.double(), expected[0], atol=0.05, rtol=0)
    logprobs.sum().backward()
    expected[0].sum().backward()
    assert weight.grad is not None and wide_w.grad is not None and weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad.double(), wide_w.grad, atol=0.1, rtol=0.02)


def test_half_precision_gradients_do_not_forget_later_chunks() -> None:
    """1024 rows push the target's weight by 1/2 each; a sum kept in bfloat16 would stop moving at 128."""
    hidden, weight = torch.ones(1024, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    logprob_entropy(hidden, weight, torch.zeros(1024, dtype=torch.long), chunk=1)[0].sum().backward()
    assert weight.grad is not None and weight.grad[:, 0].tolist() == [512.0, -512.0]


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.size = max(self.size, result.numel())
        return result


def test_the_whole_logits_never_exist() -> None:
    hidden, weight, targets = make(64, 100, 4)
    with Largest() as chunked:
        logprob_entropy(hidden, weight, targets, chunk=8)[0].sum().backward()
    with Largest() as at_once:
        whole(hidden, weight, targets, 1.0, list(range(100)))[0].sum().backward()
    assert chunked.size == 8 * 100
    assert at_once.size == 64 * 100


def test_no_rows() -> None:
    hidden, weight, _ = make(0, 4, 3)
    logprobs, entropy = logprob_entropy(hidden, weight, torch.zeros(0, dtype=torch.long))
    assert len(logprobs) == len(entropy) == 0
    logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() == 0


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_must_be_positive(temperature: float) -> None:
    hidden, weight, targets = make(2, 4, 3)
    with pytest.raises(ValueError, match="temperature is"):
        logprob_entropy(hidden, weight, targets, temperature)
