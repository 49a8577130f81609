"""The Triton kernels on a CUDA device, against the reference in float64 there, and at the size of Qwen2.5-VL-3B."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from npu_vlrl import kernels
from npu_vlrl.kernels import cuda, reference, triton_logprob

# Relative error of a whole gradient: each slope is rounded to the dtype, then each part's product and the sum.
PRECISION = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def make(n_rows: int, n_ids: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden, weight, targets, and a mask that forbids a third of the ids but no target. Logits are near ±4."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(n_rows, width, generator=generator, device="cuda", dtype=dtype).requires_grad_()
    weight = torch.randn(n_ids, width, generator=generator, device="cuda", dtype=dtype) * (4 * width**-0.5)
    targets = torch.randint(n_ids, (n_rows,), generator=generator, device="cuda")
    forbidden = torch.rand(n_ids, generator=generator, device="cuda") < 0.33
    forbidden[targets] = False
    return hidden, weight.requires_grad_(), targets, forbidden


def run(
    function: Callable[..., tuple[Tensor, Tensor]],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    forbidden: Tensor | None,
) -> tuple[Tensor, ...]:
    """Both outputs, and the gradients of a mixture of them that is negative for some rows."""
    logprobs, entropy = function(hidden, weight, targets, 0.7, forbidden)
    mix = torch.linspace(-1, 2, len(targets), device="cuda")
    return logprobs, entropy, *torch.autograd.grad((mix * logprobs + (1 - mix) * entropy).sum(), (hidden, weight))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture(autouse=True)
def _give_back_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def test_the_kernel_is_in_use() -> None:
    assert triton_logprob.available("nvidia")
    kernels.use("cuda")
    try:
        assert kernels.active()["logprob_entropy"] == "cuda"
        assert kernels.op("logprob_entropy") is cuda.logprob_entropy
    finally:
        kernels.use("reference")


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("size", [(300, 5000, 257), (1, 33, 16), (129, 1009, 64), (4100, 700, 96)], ids=str)
@pytest.mark.parametrize("with_forbidden", [True, False], ids=["some forbidden", "all allowed"])
def test_equals_the_reference_in_float64(size: tuple[int, int, int], dtype: torch.dtype, with_forbidden: bool) -> None:
    hidden, weight, targets, forbidden = make(*size, dtype)
    mask = forbidden if with_forbidden else None
    found = run(cuda.logprob_entropy, hidden, weight, targets, mask)
    wanted = run(reference.logprob_entropy, hidden.double(), weight.double(), targets, mask)
    for value, expected in zip(found[:2], wanted[:2], strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, atol=1e-4, rtol=0)
    for value, expected in zip(found[2:], wanted[2:], strict=True):
        assert value.dtype == dtype
        assert relative(value, expected) < PRECISION[dtype]


def test_the_same_inputs_give_the_same_bits() -> None:
    inputs = make(300, 5000, 256, torch.bfloat16)
    assert all(map(torch.equal, run(cuda.logprob_entropy, *inputs), run(cuda.logprob_entropy, *inputs)))


def peak(function: Callable[[], object]) -> int:
    """The most bytes that exist at a time while it runs, beyond those that exist before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_real_size_is_right_and_never_holds_all_logits() -> None:
    n_rows, n_ids, width = 2048, 151936, 2048
    hidden, weight, targets, forbidden = make(n_rows, n_ids, width, torch.bfloat16)
    results: list[Tensor] = []
    used = peak(lambda: results.extend(run(cuda.logprob_entropy, hidden, weight, targets, forbidden)))
    used -= sum(x.numel() * x.element_size() for x in results)
    logits = n_rows * n_ids * 4
    assert used < logits / 2
    with torch.no_grad():
        assert peak(lambda: cuda.logprob_entropy(hidden, weight, targets, 0.7, forbidden)) < logits / 50
        assert peak(lambda: torch.log_softmax((hidden @ weight.T).float(), 1)) > logits  # the check can fail
        wanted = reference.logprob_entropy(hidden.float(), weight.float(), targets, 0.7, forbidden, chunk=256)
    for value, expected in zip(results[:2], wanted, strict=True):
        torch.testing.assert_close(value, expected, atol=1e-3, rtol=0)
    wide = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    expected_gradients = run(reference.logprob_entropy, *wide, targets, forbidden)[2:]
    for value, expected in zip(results[2:], expected_gradients, strict=True):
        assert relative(value, expected) < PRECISION[torch.bfloat16]


def test_offsets_beyond_32_bits() -> None:
    n_ids, width = 1_060_000, 2048
    hidden, weight, targets, _ = make(16, n_ids, width, torch.bfloat16)
    assert weight.numel() > 2**31
    targets[:] = torch.arange(n_ids - 16, n_ids, device="cuda")  # the far end of the weight
    found = run(cuda.logprob_entropy, hidden, weight, targets, None)
    far = weight[-16:].double()
    logits = torch.cat([hidden.double() @ part.double().T for part in weight.detach().split(100_000)], 1) / 0.7
    wanted = (hidden.double() * far).sum(1) / 0.7 - logits.logsumexp(1)
    torch.testing.assert_close(found[0].double(), wanted, atol=1e-3, rtol=0)
    norms = found[3][-16:].float().norm(dim=1)  # every one of these ids is the target of a row
    assert norms[torch.arange(16) != 5].min() > 0.1  # and `run` gives the logprob of row 5 the weight zero
