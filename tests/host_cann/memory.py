"""Tensors over the memory of the devices, for kernels that run on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

_bases: dict[int, dict[torch.dtype, torch.Tensor]] = {}
_starts: dict[int, int] = {}
_library: list[ctypes.CDLL] = []


def install(library: ctypes.CDLL) -> None:
    """Takes libascendcl, which owns the memory."""
    library.host_cann_memory.restype = ctypes.c_void_p
    library.host_cann_device_of.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.host_cann_fail.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
    _library.append(library)


def library() -> ctypes.CDLL:
    """libascendcl."""
    return _library[0]


def fail(code: int, message: str) -> int:
    """Notes `message` for torch_npu to show with the error, and returns `code`."""
    return int(_library[0].host_cann_fail(code, b"%s", message.encode()))


def current_device() -> int:
    return int(_library[0].host_cann_current_device())


def device_of(address: int, size: int) -> int:
    """The device that holds `size` bytes at `address`, or -1."""
    return int(_library[0].host_cann_device_of(address, size))


def at(device: int, address: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A CPU tensor over bytes of a device."""
    try:
        base = _bases[device][dtype]
    except KeyError:
        base = _base(device, dtype)
    return torch.as_strided(base, size, stride, (address - _starts[device]) // base.itemsize)


def view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the bytes of an NPU tensor."""
    address = tensor.data_ptr()
    if not address:  # it has no elements
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    seen = at(tensor.get_device(), address, tensor.dtype, tensor.size(), tensor.stride())
    if tensor.is_conj():
        seen = seen.conj()
    return torch._neg_view(seen) if tensor.is_neg() else seen


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor's copy on a device, with the same strides."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        view(made).copy_(tensor)
    return made


def _base(device: int, dtype: torch.dtype) -> torch.Tensor:
    """All of a device's memory as one tensor; everything else is a view of it."""
    size = ctypes.c_size_t()
    start = _library[0].host_cann_memory(device, ctypes.byref(size))
    assert start, f"there is no device {device}"
    with torch.inference_mode(False):
        everything = torch.frombuffer((ctypes.c_char * size.value).from_address(start), dtype=torch.uint8)
        base = everything.view(dtype)
    _starts[device] = start
    return _bases.setdefault(device, {}).setdefault(dtype, base)
