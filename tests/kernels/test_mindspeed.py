"""The product that MindSpeed and torch_npu offer, by stand-ins with the signatures that both publish."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_vlrl import kernels
from npu_vlrl.kernels import mindspeed, npu, parity, reference, table  # noqa: F401  (npu fills its column of the table)

SCHEMA = "_npu_matmul_add_fp32(Tensor x, Tensor weight, Tensor(a!) C) -> ()"
"""As torch_npu registers it in its library of ATB's operators."""


class Product:
    """What both compute, and what they refuse; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def npu_matmul_add_fp32(self, total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
        """MindSpeed's: grad += grad_output.T @ total_input."""
        assert total_input.is_contiguous() and grad_output.is_contiguous() and grad.dtype == torch.float32
        assert total_input.dtype == grad_output.dtype and grad_output.dtype in (torch.bfloat16, torch.float16)
        self.calls += 1
        grad += grad_output.float().T @ total_input.float()

    def _npu_matmul_add_fp32(self, x: Tensor, weight: Tensor, C: Tensor) -> None:
        """torch_npu's: C += x.T @ weight."""
        self.npu_matmul_add_fp32(weight, x, C)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a package into place with what it has, and lets the op table look again."""

    def enter(function: Any = None, file: str = mindspeed.MODULE) -> None:
        for name in ("mindspeed", "mindspeed.ops"):
            package = ModuleType(name)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, name, package)
        module = ModuleType(file)
        if function is not None:
            module.npu_matmul_add_fp32 = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, file, module)
        mindspeed.register_offers()

    monkeypatch.setattr(table, "_table", {name: dict(found) for name, found in table._table.items()})
    monkeypatch.setattr(table, "_platform", "npu")
    monkeypatch.setattr(mindspeed, "DEVICE", "cpu")  # where the stand-ins are
    return enter


@pytest.fixture
def atb() -> Iterator[Product]:
    """torch_npu's operator, as it is once torch_npu has found NNAL."""
    product = Product()
    with torch.library._scoped_library("atb", "FRAGMENT") as library:
        library.define(SCHEMA)
        library.impl(mindspeed.OPERATOR, product._npu_matmul_add_fp32, "CPU")
        yield product


@pytest.fixture(params=["mindspeed", "torch_npu"])
def product(request: pytest.FixtureRequest, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Product:
    """The one that the op table took."""
    if request.param == "torch_npu":
        monkeypatch.setitem(sys.modules, "mindspeed", None)
        product: Product = request.getfixturevalue("atb")
        mindspeed.register_offers()
    else:
        product = Product()
        install(product.npu_matmul_add_fp32)
    return product


def test_nothing_is_offered_without_either(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mindspeed", None)
    mindspeed.register_offers()
    assert kernels.active()["add_product"] == "reference" and not caplog.records


def test_an_installed_mindspeed_comes_first(install: Callable[..., None], atb: Product) -> None:
    ours = Product()
    install(ours.npu_matmul_add_fp32)
    kernels.op("add_product")(torch.zeros(2, 3), *(torch.ones(4, n, dtype=torch.bfloat16) for n in (2, 3)))
    assert (ours.calls, atb.calls) == (1, 0)


def test_a_mindspeed_of_another_signature_leaves_it_to_torch_npu(install: Callable[..., None], atb: Product) -> None:
    install(lambda total_input, grad_output, grad, beta: None)
    total = torch.zeros(2, 3)
    kernels.op("add_product")(total, *(torch.ones(4, n, dtype=torch.bfloat16) for n in (2, 3)))
    assert atb.calls == 1 and total.unique().tolist() == [4]


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_the_published_function_adds_without_rounding(product: Product, narrow: torch.dtype) -> None:
    assert kernels.active()["add_product"] == "npu"
    left, right = torch.randn(300, 8).to(narrow), torch.randn(300, 5).to(narrow)
    total = torch.ones(8, 5)
    kernels.op("add_product")(total, left, right)
    assert product.calls == 1
    torch.testing.assert_close(total, 1 + left.float().T @ right.float(), atol=1e-4, rtol=1e-5)


def test_the_check_of_the_doctor(product: Product) -> None:
    for dtype in parity.TOLERANCES:
        assert parity._compare("add_product", torch.device("cpu"), dtype).ok
    assert product.calls == 1  # that of bfloat16


def test_a_product_that_is_subtracted_would_be_found(install: Callable[..., None]) -> None:
    install(lambda total_input, grad_output, grad: grad.sub_(grad_output.float().T @ total_input.float()))
    assert not parity._compare("add_product", torch.device("cpu"), torch.bfloat16).ok


def test_what_it_does_not_take_goes_to_the_reference(product: Product) -> None:
    for total, factors in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        found = torch.zeros(2, 3, dtype=total)
        kernels.op("add_product")(found, torch.ones(4, 2, dtype=factors), torch.ones(4, 3, dtype=factors))
        assert found.unique().tolist() == [4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mindspeed, "DEVICE", "npu")  # as it is: the host's tensors are not the operator's
        kernels.op("add_product")(found, torch.ones(4, 2).bfloat16(), torch.ones(4, 3).bfloat16())
        assert found.unique().tolist() == [8]
    nothing = torch.ones(2, 3)
    kernels.op("add_product")(nothing, torch.ones(0, 2).bfloat16(), torch.ones(0, 3).bfloat16())
    assert nothing.unique().tolist() == [1] and product.calls == 0


def test_the_gradient_of_the_head_goes_through_it(product: Product) -> None:
    hidden, weight = torch.randn(10, 8).bfloat16(), torch.randn(20, 8).bfloat16().requires_grad_()
    logprobs, _ = reference.logprob_entropy(hidden, weight, torch.arange(10), chunk=4)
    logprobs.sum().backward()
    assert product.calls == 3  # chunks of 4, 4 and 2 rows
    exact = weight.detach().double().requires_grad_()
    reference.logprob_entropy(hidden.double(), exact, torch.arange(10))[0].sum().backward()
    assert weight.grad is not None and exact.grad is not None
    torch.testing.assert_close(weight.grad.double(), exact.grad, atol=0.02 * float(exact.grad.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("function", "file", "message"),
    [
        (
            lambda total_input, grad_output, grad, beta: None,
            mindspeed.MODULE,
            "it takes (total_input, grad_output, grad",
        ),
        (
            lambda grad_output, total_input, grad: None,
            mindspeed.MODULE,
            "it takes (grad_output, total_input, grad) and",
        ),
        (None, mindspeed.MODULE, "no attribute 'npu_matmul_add_fp32'"),
        (None, "mindspeed.ops.gmm", "No module named 'mindspeed.ops.npu_matmul_add'"),
    ],
    ids=["another argument", "another order", "no function", "no file"],
)
def test_another_mindspeed_is_named_and_not_used(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture, function: Any, file: str, message: str
) -> None:
    with caplog.at_level(logging.WARNING):
        install(function, file)
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("MindSpeed is installed but its npu_matmul_add_fp32 is not used: ") and message in said
    assert kernels.active()["add_product"] == "reference"
