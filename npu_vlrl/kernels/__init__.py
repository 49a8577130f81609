"""Ops of models and losses, each defined by a plain PyTorch reference."""

from npu_vlrl.kernels import reference as _reference  # noqa: F401  (fills the table)
from npu_vlrl.kernels.table import active, op, register, use

__all__ = ["active", "op", "register", "use"]
