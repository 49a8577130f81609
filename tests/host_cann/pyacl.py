"""The Python module `acl` of CANN (pyACL), as far as vllm-ascend imports it: `acl.rt.memcpy`."""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec

from tests.host_cann import memory


def install() -> None:
    if find_spec("acl") is None:
        acl, runtime = (
            module_from_spec(ModuleSpec(name, None, is_package=name == "acl")) for name in ("acl", "acl.rt")
        )
        acl.rt, runtime.memcpy = runtime, memcpy  # type: ignore[attr-defined]
        sys.modules |= {"acl": acl, "acl.rt": runtime}


def memcpy(dst: int, dest_max: int, src: int, count: int, kind: int) -> int:
    """Copies `count` bytes, and returns AscendCL's error code. kind: 1 to a device, 2 from one, 3 within."""
    copy = memory.library().aclrtMemcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(copy(dst, dest_max, src, count, kind))
