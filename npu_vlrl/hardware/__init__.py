"""Platforms: facts about devices and vendors. Only this room and `kernels/` name vendors; others call `select()`."""

from __future__ import annotations

import os

from npu_vlrl.hardware.base import HardwareError, Memory, Peak, Platform, Setting
from npu_vlrl.hardware.cpu import CpuPlatform
from npu_vlrl.hardware.cuda import CudaPlatform
from npu_vlrl.hardware.npu import NpuPlatform, load_torch_npu

__all__ = [
    "PLATFORMS",
    "VARIABLE",
    "HardwareError",
    "Memory",
    "Peak",
    "Platform",
    "Setting",
    "published",
    "select",
    "to_report",
]

PLATFORMS: dict[str, type[Platform]] = {"npu": NpuPlatform, "cuda": CudaPlatform, "cpu": CpuPlatform}
"""Platforms by name, in the order in which they are tried."""

VARIABLE = "NPU_VLRL_PLATFORM"

load_torch_npu()  # before anything imports transformers


def select() -> Platform:
    """The platform that `NPU_VLRL_PLATFORM` names, else the first usable one.

    Raises HardwareError when the named platform is unknown or unusable; the message says what is missing.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted:
        if wanted not in PLATFORMS:
            raise HardwareError(f"{VARIABLE}={wanted} is not a platform; choose one of {', '.join(PLATFORMS)}")
        platform = PLATFORMS[wanted]()
        missing = platform.missing()
        if missing:
            raise HardwareError(f"{VARIABLE}={wanted}, but {missing}")
        return platform
    return next(platform for platform in (make() for make in PLATFORMS.values()) if platform.missing() is None)


def to_report() -> Platform:
    """The platform of `npu-vlrl doctor --ascend-report`: Ascend NPUs, unless `NPU_VLRL_PLATFORM` names another one.

    Raises HardwareError where it cannot be used: a machine whose NPUs are not found is not reported as a CPU.
    """
    platform = select() if os.environ.get(VARIABLE) else NpuPlatform()
    if problem := platform.missing():
        raise HardwareError(problem)
    return platform


def published(name: str) -> tuple[str, Peak]:
    """The device whose name is, ends with ("910B2", "910C") or contains `name`, and its published numbers.

    Raises HardwareError for a name that matches no device, or several.
    """
    known = {device: peak for platform in PLATFORMS.values() for device, peak in platform.peaks.items()}
    names = {device: {_plain(device), _plain(peak.called)} for device, peak in known.items()}
    found: list[str] = []
    for means in (str.__eq__, str.endswith, str.__contains__):  # 910B2 ends one name and is in that of the 910B2C
        found = found or [device for device, called in names.items() if any(means(one, _plain(name)) for one in called)]
    if len(found) != 1 or not _plain(name):
        listed = ", ".join(peak.called or device for device, peak in known.items())
        raise HardwareError(
            f"{name!r} names {len(found) or 'no'} of the devices that are known; choose one of {listed}"
        )
    return found[0], known[found[0]]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
