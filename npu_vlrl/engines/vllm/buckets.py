"""Buckets of weights in shared memory: other processes of the machine open them by a handle, without a copy."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from npu_vlrl.hardware import PLATFORMS

Handle = tuple[Any, ...]
"""Handle of a bucket: a few numbers and strings by which another process opens it."""

DEVICE_ARGUMENT = 6
"""Index of the device's number among the arguments by which torch opens memory of a device."""


def shared_bucket(size: int, device: torch.device) -> Tensor:
    """Allocates a bucket, uint8 [size], that other processes can open while it exists."""
    if device.type != "cpu":
        with PLATFORMS[device.type]().shareable():
            return torch.empty(size, dtype=torch.uint8, device=device)
    descriptor = os.memfd_create("npu_vlrl")  # anonymous memory: a crash leaves nothing behind
    os.truncate(descriptor, size)
    name = f"/proc/{os.getpid()}/fd/{descriptor}"
    bucket = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
    weakref.finalize(bucket, os.close, descriptor)
    return bucket


def handle_of(bucket: Tensor) -> Handle:
    """The handle of a bucket. It waits until the device has finished all writes to the bucket, since the streams of
    another process do not wait for them.
    """
    settled(bucket.device)
    if bucket.device.type == "cpu":
        return bucket.untyped_storage().filename, len(bucket)
    handle: Handle = reductions.reduce_tensor(bucket)  # type: ignore[no-untyped-call]
    return handle


def settled(device: torch.device) -> None:
    """Waits until the device, which is current in this process, has finished all launched work."""
    PLATFORMS[device.type]().synchronize()


def opened(handle: Handle) -> Tensor:
    """Opens the bucket of another process; its device is the first one that this process sees."""
    if isinstance(handle[0], str):
        name, size = handle
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
    rebuild, (*arguments,) = handle
    arguments[DEVICE_ARGUMENT] = 0
    bucket: Tensor = rebuild(*arguments)
    return bucket
