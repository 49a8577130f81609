"""Fused product that accumulates into a float32 sum, without an intermediate tensor or rounding: MindSpeed's or
torch_npu's.

Both call the linear operation of ATB, the library of transformer operators in NNAL. MindSpeed compiles its caller at
the first use, for which it needs a compiler; torch_npu contains it compiled. docs/ascend.md explains why nothing else
of MindSpeed is used.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from npu_vlrl.kernels import reference
from npu_vlrl.kernels.table import register

MODULE, FUNCTION = "mindspeed.ops.npu_matmul_add", "npu_matmul_add_fp32"
PARAMETERS = ["total_input", "grad_output", "grad"]
"""Parameters of the published function: grad += grad_output.T @ total_input."""

OPERATOR = "_npu_matmul_add_fp32"
"""Name of torch_npu's operator. Its parameters have another order: x = grad_output, weight = total_input, C = grad."""

DEVICE, NARROW = "npu", (torch.bfloat16, torch.float16)
"""Device and dtypes of the factors. They are checked, since a reference on the host calls the op, too."""

Product = Callable[[Tensor, Tensor, Tensor], Any]

_log = logging.getLogger(__name__)


def register_offers() -> None:
    """Registers MindSpeed's product for NPUs, or else torch_npu's. Warns where an installed MindSpeed is not used."""
    fused = _of_mindspeed() or _of_torch_npu()
    if fused is None:
        return

    @register("add_product", "npu")
    def add_product(total_VH: Tensor, left_CV: Tensor, right_CH: Tensor) -> None:
        taken = left_CV.device.type == DEVICE and left_CV.dtype in NARROW and total_VH.dtype == torch.float32
        if taken and len(left_CV):
            fused(right_CH.contiguous(), left_CV.contiguous(), total_VH)
        else:
            reference.add_product(total_VH, left_CV, right_CH)


def _of_torch_npu() -> Product | None:
    """Product of torch_npu; None where its import found no NNAL: then its operators of ATB are not loaded."""
    operator = getattr(torch.ops.atb, OPERATOR, None)
    return operator and (lambda total_input, grad_output, grad: operator(grad_output, total_input, grad))


def _of_mindspeed() -> Product | None:
    """Product of MindSpeed; None where there is none with the published signature."""
    try:
        import_module("mindspeed")
    except ImportError:
        return None
    try:
        function: Product = getattr(import_module(MODULE), FUNCTION)
        found = list(inspect.signature(function).parameters)
    except (ImportError, AttributeError, OSError) as error:
        _log.warning("MindSpeed is installed but its %s is not used: %s", FUNCTION, error)
        return None
    if found != PARAMETERS:
        _log.warning(
            "MindSpeed is installed but its %s is not used: it takes (%s) and not (%s)",
            *(FUNCTION, ", ".join(found), ", ".join(PARAMETERS)),
        )
        return None
    return function
