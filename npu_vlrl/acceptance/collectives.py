"""Tests collectives between the processes of a crew, in the groups that a training makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npu_vlrl.acceptance.worker import Failed, Machine

Found = tuple[Tensor, Tensor]
"""Result of a collective, and the expected one."""


def pattern(machine: Machine, pattern: str, members: str) -> dict[str, Any]:
    """Tests one collective over a group: small and large tensors of the device, and of the host where a training uses
    it. Raises Failed when the numbers are wrong.
    """
    ranks, group = machine.group(members)
    if machine.rank not in ranks:
        return {"detail": "not a member"}
    me, size = ranks.index(machine.rank), len(ranks)
    if pattern.endswith(("_object", "_object_list")):
        return {"detail": f"{size} processes", **_objects(pattern, group, me, ranks)}
    run = _PATTERNS[pattern]
    large = 2**16 if machine.reduced else 2**24
    devices = [machine.device] + [torch.device("cpu")] * (pattern in _ON_HOST and machine.device.type != "cpu")
    seconds, nbytes = 0.0, 0
    for device in devices:
        for each in (2, large):
            for dtype in _DTYPES[pattern]:
                values = (torch.arange(each * size, device=device) % 5 + me).to(dtype)
                machine.platform.synchronize()
                began = time.perf_counter()
                came, expected = run(values, group, me, ranks)
                machine.platform.synchronize()
                if not torch.equal(came, expected):
                    raise Failed(f"{pattern} of {each} {dtype} on {device.type} gives other numbers")
                if each == large and device == machine.device:
                    seconds, nbytes = time.perf_counter() - began, values.nbytes
    rate = nbytes / seconds / 1e9
    return {
        "detail": f"{size} processes, {nbytes / 1e6:.1f} MB in {1e3 * seconds:.1f} ms",
        "ranks": size,
        "bytes": nbytes,
        "first_large_GB_per_s": round(rate, 3),
    }


def _of(rank: int, like: Tensor, me: int) -> Tensor:
    """Input of `pattern` at rank number `rank` of the group."""
    return (like.double() + (rank - me)).to(like.dtype)


def _broadcast(values: Tensor, group: Any, me: int, ranks: list[int]) -> Found:
    expected = _of(0, values, me)
    dist.broadcast(values, ranks[0], group=group)
    return values, expected


def _all_reduce(values: Tensor, group: Any, me: int, ranks: list[int]) -> Found:
    expected = sum(_of(rank, values, me) for rank in range(len(ranks)))
    dist.all_reduce(values, group=group)
    return values, expected  # type: ignore[return-value]  # of tensors, and not empty


def _all_gather(values: Tensor, group: Any, me: int, ranks: list[int]) -> Found:
    came = [torch.empty_like(values) for _ in ranks]
    dist.all_gather(came, values, group=group)
    return torch.stack(came), torch.stack([_of(rank, values, me) for rank in range(len(ranks))])


def _all_gather_into(values: Tensor, group: Any, me: int, ranks: list[int]) -> Found:
    came = values.new_empty(len(ranks) * len(values))
    dist.all_gather_into_tensor(came, values, group=group)
    return came, torch.cat([_of(rank, values, me) for rank in range(len(ranks))])


def _reduce_scatter(values: Tensor, group: Any, me: int, ranks: list[int]) -> Found:
    came = values.new_empty(len(values) // len(ranks))
    expected = sum(_of(rank, values, me) for rank in range(len(ranks))).chunk(len(ranks))[me]  # type: ignore[union-attr]
    dist.reduce_scatter_tensor(came, values, group=group)
    return came, expected


def _all_to_all(values: Tensor, group: Any, me: int, ranks: list[int]) -> Found:
    came = torch.empty_like(values)
    dist.all_to_all_single(came, values, group=group)
    return came, torch.cat([_of(rank, values, me).chunk(len(ranks))[me] for rank in range(len(ranks))])


_PATTERNS: dict[str, Callable[[Tensor, Any, int, list[int]], Found]] = {
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}

_ON_HOST = ("broadcast", "all_reduce", "all_gather")
"""Patterns also used with host tensors: counts, metrics and checksums stay on the host."""

_FLOATS = (torch.bfloat16, torch.float32)
_DTYPES = dict.fromkeys(_PATTERNS, _FLOATS) | {"broadcast": (torch.uint8, *_FLOATS)}
"""Dtypes of each pattern: buckets of weights are sent as bytes; gradients are reduced in float32, or in the dtype of a
frozen copy."""


def _objects(pattern: str, group: Any, me: int, ranks: list[int]) -> dict[str, Any]:
    mine = {"rank": me, "text": "x" * 1000}
    if pattern == "all_gather_object":
        came: list[Any] = [None] * len(ranks)
        dist.all_gather_object(came, mine, group=group)
        expected = [{**mine, "rank": rank} for rank in range(len(ranks))]
    else:
        came, expected = [mine], [{**mine, "rank": 0}]
        dist.broadcast_object_list(came, ranks[0], group=group)
    if came != expected:
        raise Failed(f"{pattern} gives other objects")
    return {"ranks": len(ranks)}
