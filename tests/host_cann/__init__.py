"""The real torch_npu on a machine without an NPU: stand-ins for CANN's libraries that work in host memory.

`start()` prepares this process; `environment()` is for child processes; `counted()` counts what ran on the devices.
README.md says what this proves and what it cannot.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from tests.host_cann.counting import counted

__all__ = ["ROOMY_MIB", "counted", "environment", "prepare", "start"]

ROOMY_MIB = 16384
"""Memory of a device that has room for vLLM, which begins only where 4 GiB are free beside its weights and cache."""

_ROOT = Path(__file__).parents[2]
_DEFAULTS = {
    "TASK_QUEUE_ENABLE": "0",  # operators run where they are called, so that an error belongs to its call
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # `import torch` must not load torch_npu before the libraries are there
}


def start(devices: int = 2, memory_mib: int = 4096) -> None:
    """Imports torch_npu on `devices` devices of `memory_mib` MiB each, unless the environment says otherwise.

    May be called again. Raises RuntimeError when torch_npu was imported without the stand-in, when it is not
    installed, or when there is no C compiler.
    """
    os.environ.setdefault("HOST_CANN_DEVICES", str(devices))
    os.environ.setdefault("HOST_CANN_MEMORY_MIB", str(memory_mib))
    prepare()
    importlib.import_module("torch_npu")


def environment(devices: int | None = None, memory_mib: int | None = None) -> dict[str, str]:
    """Variables to add to a child process's environment; its `import torch_npu` then does what `start()` does.

    What is not given is as in this process's environment, or as `start()` has it.
    """
    paths = [str(Path(__file__).parent / "startup"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    here = {"HOST_CANN_DEVICES": devices, "HOST_CANN_MEMORY_MIB": memory_mib}
    given = {name: str(value) for name, value in here.items() if value is not None}
    return {
        **_DEFAULTS,
        "NPU_VLRL_HOST_CANN": "1",
        "HOST_CANN_DEVICES": os.environ.get("HOST_CANN_DEVICES", "2"),
        "HOST_CANN_MEMORY_MIB": os.environ.get("HOST_CANN_MEMORY_MIB", "4096"),
        **given,
        "PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(paths))),
    }


def prepare() -> None:
    """Makes the next `import torch_npu` find the stand-in. May be called again."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "torch_npu" in sys.modules:
        raise RuntimeError("torch_npu was imported before the stand-in for CANN was started")
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are imported with something of the stand-in: see `_EXECUTED`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _EXECUTED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        _EXECUTED[module.__name__](module, self.real.exec_module)


def _torch_npu(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    """Loads the libraries before torch_npu, and installs the kernels after it."""
    from tests.host_cann import build

    libraries = build.load()
    execute(module)
    from tests.host_cann import aten, attention, inference_attention, inference_ops, memory, operators, pyacl, small_ops

    memory.install(libraries["libascendcl.so"])
    training, inference = attention.KERNELS | small_ops.KERNELS, inference_attention.KERNELS | inference_ops.KERNELS
    operators.install(libraries["libopapi.so"], training | inference)
    aten.install()
    pyacl.install()


def _block_table(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    """vllm-ascend's worker, which takes two functions from Triton."""
    execute(module)
    from tests.host_cann import vllm_ascend

    vllm_ascend.install(module)


def _torchvision(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    from tests.host_cann import vision_ops

    vision_ops.declare(module)
    execute(module)


_EXECUTED = {
    "torch_npu": _torch_npu,
    "torchvision": _torchvision,
    "vllm_ascend.worker.block_table": _block_table,
}
