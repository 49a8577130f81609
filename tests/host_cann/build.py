"""Compiles the stand-in libraries once, into a cache folder, and loads them.

The folder is named after everything that goes into it: the sources, their libraries, the table of operators and the
version of torch_npu, whose headers the sources are compiled against. It appears complete or not at all, so that
processes that start together do not disturb each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.host_cann.table import c_functions

HERE = Path(__file__).parent
EMPTY = (
    *("ascend_dump", "ascendalog", "c_sec", "error_manager", "ge_common_base", "mmpa", "platform", "profapi"),
    *("register", "runtime", "unified_dlog"),
)
"""vllm-ascend's compiled part is linked against these, too, and takes nothing from most of them."""

SOURCES: dict[str, tuple[str, ...]] = {
    "libascendcl.so": ("ascendcl.c", "ascendcl_memory.c", "ascendcl_ipc.c", "ascendcl_absent.c"),
    "libhccl.so": ("hccl.c", "hccl_collectives.c", "hccl_letters.c"),
    "libhcomm.so": ("hcomm.c",),
    # torch_npu is linked against these four, and takes from them what libascendcl defines here.
    "libacl_op_compiler.so": (),
    "libge_runner.so": (),
    "libgraph.so": (),
    "libacl_tdt_channel.so": (),
    "libopapi.so": ("opapi.c",),
    "libatb.so": ("atb.c",),
    "libvllm_ascend_kernels.so": ("vllm_ascend_kernels.c",),
    **{f"lib{name}.so": () for name in EMPTY},
}
"""Library -> its sources; a library is linked against libascendcl, which comes first."""


def load() -> dict[str, ctypes.CDLL]:
    """Builds the libraries where that is necessary, and loads them for torch_npu to find. Raises RuntimeError."""
    folder = build()
    return {name: ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in SOURCES}


def cache_folder() -> Path:
    """`$HOST_CANN_CACHE`, or a folder of the user's cache."""
    chosen = os.environ.get("HOST_CANN_CACHE")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(cache) / "npu_vlrl" / "host_cann"


def build() -> Path:
    """Returns the folder with all libraries of `SOURCES`. Raises RuntimeError where gcc or torch_npu is missing."""
    functions = c_functions()
    digest = hashlib.sha256((functions + repr(SOURCES)).encode())
    for path in sorted(HERE.glob("*.[ch]")):
        digest.update(path.read_bytes())
    folder = cache_folder() / f"torch_npu-{_torch_npu_version()}-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    try:
        (fresh / "opapi_functions.inc").write_text(functions)
        for library, sources in SOURCES.items():
            _compile(fresh, library, sources)
        os.rename(fresh, folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster, with the same result
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _torch_npu_version() -> str:
    try:
        return importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError("the stand-in for CANN needs torch_npu: pip install torch_npu==2.10.0.post4") from None


def _headers() -> Path:
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "include" / "third_party" / "acl" / "inc"


def _compile(folder: Path, library: str, sources: tuple[str, ...]) -> None:
    gcc = shutil.which(os.environ.get("CC", "gcc"))
    if gcc is None:
        raise RuntimeError("the stand-in for CANN is compiled when it is first used: install gcc, or set CC")
    paths = [str(HERE / source) for source in sources] or ["-x", "c", "/dev/null"]
    links = [] if library == "libascendcl.so" else [f"-L{folder}", "-Wl,--no-as-needed", "-lascendcl"]
    command = [gcc, "-O2", "-shared", "-fPIC", f"-I{HERE}", f"-I{folder}", f"-isystem{_headers()}"]
    command += ["-o", str(folder / library), f"-Wl,-soname,{library}", *paths, *links, "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{library} does not compile:\n{' '.join(command)}\n{done.stderr}")
