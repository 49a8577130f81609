"""The check that `npu-vlrl doctor` makes finds what is wrong, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_vlrl import kernels
from npu_vlrl.kernels import parity, reference, table

CPU = torch.device("cpu")


def failed() -> dict[str, parity.Parity]:
    return {line.op: line for line in parity.check(CPU) if not line.ok}


def test_the_reference_equals_itself() -> None:
    lines = parity.check(CPU)
    names = sorted(kernels.active())
    assert [line.op for line in lines] == names + [f"{name} in bfloat16" for name in names]
    assert all(line.ok and line.forward == line.backward == 0 for line in lines)


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Enters an implementation of an op into a platform's column, in which there is nothing else."""
    monkeypatch.setattr(table, "_platform", "cuda")
    monkeypatch.setattr(table, "_table", {name: {table.REFERENCE: table.reference_of(name)} for name in table._table})

    def enter(name: str, implementation: Any) -> None:
        table._table[name]["cuda"] = implementation

    return enter


def test_a_factor_of_one_percent_is_found(replace: Callable[[str, Any], None]) -> None:
    replace("rms_norm", lambda *args: reference.rms_norm(*args) * 1.01)
    found = failed()["rms_norm"]
    assert found.forward == pytest.approx(0.01, rel=1e-3) and found.backward == pytest.approx(0.01, rel=1e-3)
    assert set(failed()) == {"rms_norm"}


def test_a_wrong_gradient_alone_is_found(replace: Callable[[str, Any], None]) -> None:
    def half(gate: Tensor, up: Tensor) -> Tensor:
        out = reference.swiglu(gate, up)
        return out.detach() + (out - out.detach()) / 2

    replace("swiglu", half)
    found = failed()["swiglu"]
    assert found.forward == 0 and found.backward == pytest.approx(0.5)


def test_what_is_not_a_number_is_found(replace: Callable[[str, Any], None]) -> None:
    replace("rotary", lambda *args: reference.rotary(*args) * math.nan)
    assert failed()["rotary"].forward == math.inf


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, cu_q, cu_k, causal, scale: (q, k, v, cu_q, cu_k, not causal, scale),
        lambda q, k, v, cu_q, cu_k, causal, scale: (q, k, v, [0, cu_q[-1]], [0, cu_k[-1]], causal, scale),
        lambda q, k, v, cu_q, cu_k, causal, scale: (q, k, v, cu_q, cu_k, causal, scale / 2),
        lambda q, k, v, cu_q, cu_k, causal, scale: (q, k.flip(0), v, cu_q, cu_k, causal, scale),
    ],
    ids=["causality", "boundaries", "scale", "heads"],
)
def test_each_mistake_of_packed_attention_is_found(replace: Callable[[str, Any], None], wrong: Any) -> None:
    replace("varlen_attention", lambda *args: reference.varlen_attention(*wrong(*args)))
    assert set(failed()) == {"varlen_attention", "varlen_attention in bfloat16"}


def test_a_mask_turned_round_is_found(replace: Callable[[str, Any], None]) -> None:
    replace("masked_attention", lambda q, k, v, mask, scale: reference.masked_attention(q, k, v, ~mask, scale))
    assert "masked_attention" in failed()
