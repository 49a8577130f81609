"""Buckets of weights that other processes of the machine can open, so that nothing but their names is sent."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from npu_vlrl.hardware import PLATFORMS

Handle = tuple[Any, ...]
"""Names a bucket; a few numbers and words."""

DEVICE_ARGUMENT = 6
"""Where the device's number stands among what torch needs to open memory of a device."""


def shared_bucket(size: int, device: torch.device) -> Tensor:
    """A bucket, uint8 [size], that can be opened while it exists."""
    if device.type != "cpu":
        with PLATFORMS[device.type]().shareable():
            return torch.empty(size, dtype=torch.uint8, device=device)
    descriptor = os.memfd_create("npu_vlrl")  # memory without a name: nothing is left behind, however this ends
    os.truncate(descriptor, size)
    name = f"/proc/{os.getpid()}/fd/{descriptor}"
    bucket = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
    weakref.finalize(bucket, os.close, descriptor)
    return bucket


def handle_of(bucket: Tensor) -> Handle:
    """The handle of a bucket. It names what was written to the bucket so far: this waits for the device,
    since the streams of another process do not.
    """
    settled(bucket.device)
    if bucket.device.type == "cpu":
        return bucket.untyped_storage().filename, len(bucket)
    handle: Handle = reductions.reduce_tensor(bucket)  # type: ignore[no-untyped-call]
    return handle


def settled(device: torch.device) -> None:
    """Returns when the device has done all that this process gave it. It is the process's current one."""
    PLATFORMS[device.type]().synchronize()


def opened(handle: Handle) -> Tensor:
    """The bucket of another process, whose device is the first that this process sees."""
    if isinstance(handle[0], str):
        name, size = handle
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
    rebuild, (*arguments,) = handle
    arguments[DEVICE_ARGUMENT] = 0
    bucket: Tensor = rebuild(*arguments)
    return bucket
