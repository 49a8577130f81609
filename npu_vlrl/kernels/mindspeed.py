"""What MindSpeed offers beyond torch_npu, where it is installed; it enters the op table beside torch_npu's operators.

That is one op: a matrix product that is added to a float32 sum without being a tensor of its own, or rounded. MindSpeed
compiles it at the first call. Its other operators for these models are torch_npu's under another name.
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
"""As published: grad += grad_output.T @ total_input."""

NARROW = (torch.bfloat16, torch.float16)

_log = logging.getLogger(__name__)


def register_offers() -> None:
    """Registers MindSpeed's implementations for NPUs. Says in a warning why an installed MindSpeed is not used."""
    fused = _published()
    if fused is None:
        return

    @register("add_product", "npu")
    def add_product(total_VH: Tensor, left_CV: Tensor, right_CH: Tensor) -> None:
        if total_VH.dtype == torch.float32 and left_CV.dtype in NARROW:
            fused(right_CH.contiguous(), left_CV.contiguous(), total_VH)
        else:
            reference.add_product(total_VH, left_CV, right_CH)


def _published() -> Callable[..., Any] | None:
    """MindSpeed's function, None where there is none with the published signature."""
    try:
        import_module("mindspeed")
    except ImportError:
        return None
    try:
        function = getattr(import_module(MODULE), FUNCTION)
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
