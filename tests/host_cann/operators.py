"""Runs the reference kernels behind libopapi: reads the arguments that torch_npu built, and calls the kernel."""

from __future__ import annotations

import ctypes
import inspect
import traceback
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from tests.host_cann import memory
from tests.host_cann.counting import count as count_run
from tests.host_cann.table import TABLE

Kernel = Callable[..., None]
ACLNN_ERR_PARAM = 161002
ACLNN_ERR_RUNTIME = 361001

DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    12: torch.bool,
    27: torch.bfloat16,
}
"""aclDataType -> dtype"""


class _Argument(ctypes.Union):
    _fields_ = (
        ("pointer", ctypes.c_void_p),
        ("text", ctypes.c_char_p),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int64),
        ("dims", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
        ("storage", ctypes.c_void_p),
    )


def _dtype(described: _Tensor) -> torch.dtype:
    if described.dtype not in DTYPES:
        raise TypeError(f"aclDataType {described.dtype} is not supported")
    return DTYPES[described.dtype]


def _tensor(pointer: int | None) -> torch.Tensor | None:
    if not pointer:
        return None
    described = _Tensor.from_address(pointer)
    dtype = _dtype(described)
    size, stride = described.sizes[: described.dims], described.strides[: described.dims]
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    address = (described.storage or 0) + described.offset * dtype.itemsize
    span = (1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))) * dtype.itemsize
    device, current = memory.device_of(address, span), memory.current_device()
    if device != current:
        where = f"on device {device}" if device >= 0 else "in host memory"
        raise RuntimeError(f"a tensor {size} of {dtype} is {where}; the operator runs on device {current}")
    return memory.at(device, address, dtype, size, stride)


def _scalar(pointer: int) -> Any:
    described = _Tensor.from_address(pointer)
    raw = bytearray(ctypes.string_at(described.storage, 8))
    return torch.frombuffer(raw, dtype=_dtype(described))[0].item()


def _list(pointer: int | None) -> list[int]:
    if not pointer:
        return []
    size = ctypes.c_int64.from_address(pointer).value
    return list((ctypes.c_int64 * size).from_address(pointer + 8)) if size else []


_READ: dict[str, Callable[[_Argument], Any]] = {
    "tensor": lambda argument: _tensor(argument.pointer),
    "tensors": lambda argument: [_tensor(pointer) for pointer in _list(argument.pointer)],
    "ints": lambda argument: _list(argument.pointer),
    "scalar": lambda argument: _scalar(argument.pointer),
    "int": lambda argument: argument.integer,
    "double": lambda argument: argument.real,
    "float": lambda argument: argument.real,
    "bool": lambda argument: bool(argument.integer),
    "text": lambda argument: argument.text.decode(),
}

_kernels: list[tuple[str, Kernel, list[tuple[str, Callable[[_Argument], Any]]]]] = []
_pending: dict[int, tuple[str, Kernel, dict[str, Any]]] = {}
_numbers = count(1)


def _failed(code: int, name: str, error: Exception) -> int:
    """An exception cannot pass through C; its text goes with the error code."""
    if not isinstance(error, (ValueError, TypeError, RuntimeError)):
        traceback.print_exc()
    return memory.fail(code, f"{name}: {error}")


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
def _prepare(number: int, pointer: int, executor: Any) -> int:
    name, kernel, readers = _kernels[number]
    try:
        arguments = (_Argument * len(readers)).from_address(pointer)
        values = {key: read(argument) for (key, read), argument in zip(readers, arguments, strict=True)}
        ticket = next(_numbers)
        _pending[ticket] = name, kernel, values
        executor[0] = ticket
        return 0
    except Exception as error:
        return _failed(ACLNN_ERR_PARAM, name, error)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _run(executor: int) -> int:
    name, kernel, values = _pending.pop(executor)
    try:
        with torch.no_grad():
            kernel(**values)
        count_run(name)
        return 0
    except Exception as error:
        return _failed(ACLNN_ERR_RUNTIME, name, error)


def install(library: ctypes.CDLL, kernels: dict[str, Kernel]) -> None:
    """Connects libopapi with a kernel for every operator of the table."""
    assert kernels.keys() == TABLE.keys(), f"kernels and table differ in {sorted(kernels.keys() ^ TABLE.keys())}"
    prepared = []
    for name, arguments in TABLE.items():
        _check_parameters(name, kernels[name], [key for key, _ in arguments])
        prepared.append((name, kernels[name], [(key, _READ[kind]) for key, kind in arguments]))
    _kernels[:] = prepared
    ctypes.c_void_p.in_dll(library, "host_cann_prepare").value = ctypes.cast(_prepare, ctypes.c_void_p).value
    ctypes.c_void_p.in_dll(library, "host_cann_run").value = ctypes.cast(_run, ctypes.c_void_p).value


def _check_parameters(name: str, kernel: Kernel, arguments: list[str]) -> None:
    """A kernel is called by keyword: with all of the table's arguments, and no other ones."""
    parameters = inspect.signature(kernel).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    fits = named <= set(arguments) if len(named) < len(parameters) else named == set(arguments)
    assert fits, f"{name} takes {arguments}, its kernel {sorted(named)}"
