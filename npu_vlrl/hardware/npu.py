"""Ascend NPUs, through torch_npu. `load_torch_npu()` imports torch_npu, or hides it where it cannot be used."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from npu_vlrl.hardware.accelerator import SEGMENTS, Accelerator
from npu_vlrl.hardware.base import GraphCapture, HardwareError, Memory, Peak, Setting

LIBRARIES = ("libascendcl.so", "libhccl.so")
"""Libraries of CANN: the runtime and the collectives. torch_npu links both."""

CAPTURE = "aclmdlRICaptureGetInfo"
"""Function of the runtime by which torch_npu finds out whether a graph is being captured; older CANN lacks it."""

DEVICE_FILES = "/dev/davinci[0-9]*"
"""Device files of the driver, one a device; a container has those that it was started with."""

INSTALL_DRIVER = "install the driver and firmware, or hand the devices to the container"

DRIVER_VERSION = "/usr/local/Ascend/driver/version.info"

CUBE_FLOPS = 2 * 16**3
"""Operations of a matrix unit (cube core) in a cycle, bf16: a product of 16 x 16 x 16; a multiply-add counts as two."""

PLATFORM_FILES = "CANN's platform_config"
"""Source of most numbers: one file a device name, with cube_core_cnt, cube_freq in MHz and memory_size; read at
hicann/runtime 681ef7610df1. On a host they are in CANN's folder, in data/platform_config. Bandwidths are published
elsewhere, see `_peak`."""

OWN_PORTS = "ports that are free; two processes on a device, as with vLLM, would both want HCCL's 16666"

PRIVATE_FORMAT = "VLLM_ASCEND_ENABLE_NZ"
"""Variable for the private weight format of vllm-ascend: 0 never, 1 (the default) for quantised weights, 2 for all."""

PAIRS = ("2.9.0", "2.10.0", "2.13.0")
"""Versions of torch and torch_npu that this project was tried with."""


class _Memory(NamedTuple):
    """A kind of device memory: size in bytes, bandwidth in bytes a second, and the source of the bandwidth."""

    size: float
    bandwidth: float
    source: str


A2 = _Memory(64e9, 1.6e12, "CANN's guide to migrating operators")
"""Memory of Atlas A2. The guide, in cann/ops-cv, compares it with its successor."""
A3 = _Memory(64e9, 1.6e12, "arXiv 2506.12708")
"""Memory of one die of a 910C. The paper, by the maker, is about CloudMatrix384 and gives the numbers of both dies."""
B4 = _Memory(32e9, 0.8e12, "reports of users")
B4_1 = _Memory(64e9, 1.6e12, "reports of users")
"""Memory of the 910B4-1. CANN's file says 32 GiB; npu-smi, as users quote it, says 65536 MB."""


def _peak(cores: int, megahertz: int, memory: _Memory, called: str = "") -> Peak:
    source = f"{PLATFORM_FILES}; bandwidth: {memory.source}"
    return Peak(cores * CUBE_FLOPS * megahertz * 1e6, memory.bandwidth, source, memory.size, called)


class NpuPlatform(Accelerator):
    name = "npu"
    kernels = "npu"
    collective_backend = "hccl"
    process_group_backend = "cpu:gloo,npu:hccl"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"
    ray_resource = "NPU"
    tool = "npu-smi info"
    graph = "NPUGraph"
    allocator_variables = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    packages = ("torch_npu", "triton-ascend", "mindspeed", "vllm", "vllm-ascend", "ray")
    watched = (
        *("ASCEND_", "HCCL_", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TASK_QUEUE_ENABLE"),
        *("CPU_AFFINITY_CONF", "GLOO_", "VLLM_"),
    )
    cautions = {
        ("TASK_QUEUE_ENABLE", "2"): "clashes with graph mode (torch.compile, captured graphs); set 1 to use those",
        ("TASK_QUEUE_ENABLE", "0"): "every operation is launched in turn, which is slow; unset it to train",
        ("ASCEND_LAUNCH_BLOCKING", "1"): "every operation is waited for, to find errors; unset it to train",
        ("HCCL_OP_EXPANSION_MODE", "AIV"): "on Atlas A2 that is for inference with one communicator; unset it to train",
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "1"): "`import torch` fails wherever CANN is not set up; unset it",
    }
    launch_environment = {
        "PYTORCH_NPU_ALLOC_CONF": Setting(
            "expandable_segments:True",
            "lengths change from step to step; segments that grow do not fragment",
            unless="PYTORCH_ALLOC_CONF",  # torch_npu 2.13 refuses both together
        ),
        "TASK_QUEUE_ENABLE": Setting("1", "a second thread launches; 2 is faster, takes more memory, forbids graphs"),
        "CPU_AFFINITY_CONF": Setting("1", "a process stays on the cores that are near to its device"),
        "HCCL_CONNECT_TIMEOUT": Setting("600", "seconds; loading a large model from a slow disk takes over HCCL's 120"),
        "HCCL_NPU_SOCKET_PORT_RANGE": Setting("auto", OWN_PORTS),
        "HCCL_HOST_SOCKET_PORT_RANGE": Setting("auto", OWN_PORTS, unless="HCCL_IF_BASE_PORT"),  # which it overrules
        PRIVATE_FORMAT: Setting("0", "vLLM cannot wake weights in the format NZ, nor take new ones exactly"),
    }
    # By torch_npu's names, which are CANN's names of a system on chip; npu-smi shows 910B2 for Ascend910B2. An Atlas A3
    # (910C) is two devices. The vector units reach a sixteenth more, which no matrix product uses: 376e12 of a 910B2 is
    # the sum of both.
    peaks = {
        "Ascend910B1": _peak(24, 1850, A2),
        "Ascend910B2": _peak(24, 1800, A2),
        "Ascend910B2C": _peak(24, 1800, A2),
        "Ascend910B3": _peak(20, 1800, A2),
        "Ascend910B4": _peak(20, 1500, B4),
        "Ascend910B4-1": _peak(20, 1500, B4_1),
        "Ascend910_9391": _peak(24, 1850, A3),
        "Ascend910_9392": _peak(24, 1850, A3, "Ascend910C"),
        "Ascend910_9381": _peak(24, 1800, A3),
        "Ascend910_9382": _peak(24, 1800, A3),
        "Ascend910_9372": _peak(20, 1800, A3),
        "Ascend910_9362": _peak(20, 1500, A3),
    }

    def api(self) -> Any:
        problem = load_torch_npu()
        if problem:
            raise HardwareError(problem)
        return torch.npu  # type: ignore[attr-defined]

    def vllm_problems(self, dtype: str, sleep: bool) -> Iterator[str]:
        """Reasons for which vLLM cannot sample here, missing packages included. Without vllm-ascend, vLLM would take
        this machine for a CPU, or find no platform. Beside a vLLM of another release, vllm-ascend fails deep inside,
        because it replaces parts of vLLM.
        """
        key, remedy = "rollout.engine=vllm", "or set rollout.engine=inprocess"
        if lacking := [package for package in ("vllm", "vllm-ascend") if _installed(package) is None]:
            yield f"{key} needs {' and '.join(lacking)} in this environment; run launch/install_npu.sh, {remedy}"
            return
        ours, wanted = (_base_version(package) or "" for package in ("vllm", "vllm-ascend"))
        if ours.split(".")[:2] != wanted.split(".")[:2]:
            yield (
                f"{key} finds vllm {_installed('vllm')} beside vllm-ascend {_installed('vllm-ascend')}, and both must "
                f"be of one release; install vllm {wanted} (launch/install_npu.sh builds it for no device), {remedy}"
            )
        if dtype == "float32":  # aclnnFusedInferAttentionScore has none, and vllm-ascend nothing else
            yield (
                f"{key} computes in 16 bits on NPUs, whose attention for inference takes no float32; set "
                "model.dtype=bfloat16, or rollout.engine=inprocess"
            )
        if sleep:
            yield from self._sleep_problems()

    def _sleep_problems(self) -> Iterator[str]:
        """Reasons for which vllm-ascend cannot release its memory. With expandable segments it fails an assertion deep
        inside, and with weights in a private format it refuses to wake after the first update.
        """
        name, settings = self.allocator_settings() or ("", "")
        if f"{SEGMENTS}:True" in settings:
            yield (
                f"rollout.sleep: vLLM cannot give memory back with {name}={settings}; set {name}= (empty) before the "
                "command"
            )
        if (value := os.environ.get(PRIVATE_FORMAT, "1")) != "0":
            yield f"rollout.sleep: vLLM does not wake with {PRIVATE_FORMAT}={value}; set it to 0 before the command"

    def _set_allocator(self, settings: str) -> None:
        """Sets the setting of the segments alone: older versions refuse the others here."""
        super()._set_allocator(next(one for one in settings.split(",") if one.startswith(SEGMENTS)))

    def memory(self, index: int = 0) -> Memory:
        """Free and total memory of a device. torch_npu 2.10 ignores `index`, reports the device in use, and fails where
        none is in use.
        """
        with self.api().device(index):
            return super().memory(index)

    def graph_capture(self) -> GraphCapture | None:
        """Creates a graph capture; None where this CANN captures nothing, or `TASK_QUEUE_ENABLE` forbids it. Without
        the runtime's function no capture is tried: torch_npu 2.10 would look for it in every later allocation.
        """
        if os.environ.get("TASK_QUEUE_ENABLE") == "2" or not hasattr(ctypes.CDLL(LIBRARIES[0]), CAPTURE):
            return None
        capture = super().graph_capture()
        assert capture is not None
        tried = torch.zeros(1, device=self.device(self.api().current_device()))

        def work() -> None:
            tried.add_(1)

        try:
            capture(work)()
        except RuntimeError:
            return None
        return capture

    def missing(self) -> str | None:
        """Names the first missing one of torch_npu, a torch of its version, driver, CANN, visible devices, a device."""
        return load_torch_npu() or self._no_device()

    def _no_device(self) -> str | None:
        variable = self.visible_devices_variable
        try:
            visible = self.visible_devices()
            count = self.api().device_count()
        except HardwareError as error:
            return str(error)
        except RuntimeError as error:
            return _no_driver() or f"CANN cannot count the NPUs: {_first_line(error)}; look at `{self.tool}`"
        if visible == []:
            return f"{variable} is empty, which hides every NPU; unset it, or name devices, e.g. {variable}=0,1"
        if visible is not None and count < len(visible):
            return (
                f"{variable}={','.join(visible)} names {len(visible)} NPUs, but only {count} of them can be found; "
                f"name what `{self.tool}` shows, or unset it"
            )
        if count == 0:
            return _no_driver() or f"CANN finds no NPU although there are {DEVICE_FILES}; look at `{self.tool}`"
        return None

    def visible_devices(self) -> list[str] | None:
        """Entries of the visible-devices variable; None when it is not set. Raises HardwareError for a value that CANN
        would refuse, or would silently cut short.
        """
        variable, value = self.visible_devices_variable, os.environ.get(self.visible_devices_variable)
        if not value:
            return None if value is None else []
        if not re.fullmatch(r"\d+(,\d+)*", value):
            raise HardwareError(
                f"{variable}={value} is not a list of device numbers; write them with commas alone, e.g. "
                f"{variable}=0,1,2,3: CANN knows no ranges and drops all that follows another character"
            )
        numbers = [int(part) for part in value.split(",")]
        ascending = sorted(set(numbers))
        if numbers != ascending:
            raise HardwareError(
                f"{variable}={value} does not ascend, as CANN needs it; write "
                f"{variable}={','.join(map(str, ascending))}"
            )
        return [str(number) for number in numbers]

    def versions(self) -> dict[str, str]:
        from torch_npu.npu.utils import get_cann_version

        cann = get_cann_version("CANN") or f"unknown (its runtime interface is {_runtime_version()})"
        return {"CANN": cann, "Ascend driver": _driver_version()}

    def warnings(self) -> list[str]:
        found = super().warnings()
        base = _base_version("torch_npu")
        mismatch = base and _unsupported_pair()
        if mismatch:
            found.append(mismatch)
        elif base is not None and base not in PAIRS:
            found.append(f"torch_npu {base} was not tried with this project; {', '.join(PAIRS)} were")
        return found


@cache
def load_torch_npu() -> str | None:
    """Imports torch_npu once, where it is installed. Returns the reason for which it cannot be used, or None.

    An unusable torch_npu is hidden, as if it were not installed: transformers and peft import it wherever they find it,
    and would fail.
    """
    if _installed("torch_npu") is None:
        return "torch_npu is not installed; run launch/install_npu.sh, or install requirements-npu.txt"
    problem = _unsupported_pair() or _import_error()
    if problem:
        sys.modules["torch_npu"] = None  # type: ignore[assignment]
    return problem


def _import_error() -> str | None:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints warnings, and programs read our standard output
            import torch_npu  # noqa: F401
    except Exception as error:  # whatever a foreign import raises is the reason
        return _unloadable() or (
            f"torch_npu does not load: {_first_line(error)}; its version must suit torch's and CANN's (docs/ascend.md)"
        )
    return None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _base_version(package: str) -> str | None:
    """Version of a package without its suffix: `2.10.0` for `2.10.0.post4`, `2.10.0rc1` and `2.10.0+cpu`."""
    found = re.match(r"\d+(\.\d+)*", _installed(package) or "")
    return found and found[0]


def _unsupported_pair() -> str | None:
    """Problem of an unsupported pair of torch and torch_npu, or None. It is found without an import: a wrong pair may
    crash in the import, without a helpful message.
    """
    ours, wanted = _base_version("torch"), _base_version("torch_npu")
    if ours == wanted:
        return None
    return (
        f"torch_npu {_installed('torch_npu')} needs torch {wanted}, and torch {_installed('torch')} is installed; "
        f"install a pair of one version: pip install torch=={wanted} torch_npu=={_installed('torch_npu')}"
    )


def _unloadable() -> str | None:
    """Distinguishes a missing driver from a missing CANN, by the loader's error and the driver's device files."""
    try:
        for library in LIBRARIES:
            ctypes.CDLL(library)
    except OSError as error:
        if "libascend_hal" in str(error):
            return f"the Ascend driver's libraries do not load ({error}); {INSTALL_DRIVER}"
        return _no_driver() or (
            f"CANN does not load ({error}); install CANN's toolkit and kernels, and source its set_env.sh in this shell"
        )
    return None


def _no_driver() -> str | None:
    if glob.glob(DEVICE_FILES):
        return None
    return f"there is no Ascend driver or device (no {DEVICE_FILES}); {INSTALL_DRIVER}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _runtime_version() -> str:
    parts = [ctypes.c_int32() for _ in range(3)]
    ctypes.CDLL(LIBRARIES[0]).aclrtGetVersion(*(ctypes.byref(part) for part in parts))
    return ".".join(str(part.value) for part in parts)


def _driver_version() -> str:
    file = Path(DRIVER_VERSION)
    found = re.search(r"^Version=(\S+)", file.read_text(), re.MULTILINE) if file.is_file() else None
    return found[1] if found else f"unknown (no {DRIVER_VERSION})"
