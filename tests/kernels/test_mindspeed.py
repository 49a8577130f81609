"""MindSpeed's product is used only where its signature is the published one. A fake package stands in for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_vlrl import kernels
from npu_vlrl.kernels import mindspeed, npu, reference, table  # noqa: F401  (npu fills its column of the table)


class Published:
    """The signature of MindSpeed's documents, and what it computes: grad += grad_output.T @ total_input."""

    def __init__(self) -> None:
        self.calls = 0

    def npu_matmul_add_fp32(self, total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
        assert total_input.is_contiguous() and grad_output.is_contiguous() and grad.dtype == torch.float32
        self.calls += 1
        grad += grad_output.float().T @ total_input.float()


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
    return enter


def test_nothing_is_offered_without_mindspeed(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mindspeed", None)
    mindspeed.register_offers()
    assert kernels.active()["add_product"] == "reference" and not caplog.records


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_the_published_function_adds_without_rounding(install: Callable[..., None], narrow: torch.dtype) -> None:
    fake = Published()
    install(fake.npu_matmul_add_fp32)
    assert kernels.active()["add_product"] == "npu"
    left, right = torch.randn(300, 8).to(narrow), torch.randn(300, 5).to(narrow)
    total = torch.ones(8, 5)
    kernels.op("add_product")(total, left, right)
    assert fake.calls == 1
    torch.testing.assert_close(total, 1 + left.float().T @ right.float(), atol=1e-4, rtol=1e-5)


def test_what_it_does_not_take_goes_to_the_reference(install: Callable[..., None]) -> None:
    fake = Published()
    install(fake.npu_matmul_add_fp32)
    for total, factors in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        found = torch.zeros(2, 3, dtype=total)
        kernels.op("add_product")(found, torch.ones(4, 2, dtype=factors), torch.ones(4, 3, dtype=factors))
        assert found.unique().tolist() == [4]
    assert fake.calls == 0


def test_the_gradient_of_the_head_goes_through_it(install: Callable[..., None]) -> None:
    fake = Published()
    install(fake.npu_matmul_add_fp32)
    hidden, weight = torch.randn(10, 8).bfloat16(), torch.randn(20, 8).bfloat16().requires_grad_()
    logprobs, _ = reference.logprob_entropy(hidden, weight, torch.arange(10), chunk=4)
    logprobs.sum().backward()
    assert fake.calls == 3  # chunks of 4, 4 and 2 rows
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
