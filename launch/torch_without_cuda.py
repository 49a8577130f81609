"""Makes torch's build for NVIDIA GPUs run without NVIDIA's packages, on a machine that has no such GPU.

On x86_64 the public index has no other build of torch 2.10.0. Its libraries are linked against NVIDIA's, so these must
exist: small libraries are put beside them that have every name they ask for, and answer each call with "no such
device". What its metadata asks of NVIDIA's packages is removed, so that pip does not install them; so is the Triton for
such GPUs, of which xgrammar asks the same.

Run by the environment's Python:  python launch/torch_without_cuda.py
A build of torch for CPUs keeps its libraries. Needs gcc, and binutils, which comes with it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

LIBRARY = re.compile(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl)\w*\.so[.\d]*)\]")
"""Reads the names of NVIDIA's libraries from what `readelf -d` prints."""

FUNCTION = re.compile(r"(cu|nccl|nvrtc|nvshmem|nvJit|__cuda)[A-Za-z_]\w*")
"""Names of functions that NVIDIA's libraries export without a version."""

VERSION = re.compile(r"lib(cu|nv)\w+\.so\.\d+|NVSHMEM")
"""Versions of symbols that are NVIDIA's: the library's file name, as a rule."""

NO_DEVICE = 100
"""CUDA's error for that (cudaErrorNoDevice); other libraries take it for a failure as well."""


def printed(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wanted_by(libraries: list[Path]) -> tuple[set[str], set[tuple[str, str]]]:
    """NVIDIA's libraries that these are linked against, and (function, version or "") that these ask them for."""
    names: set[str] = set()
    functions: set[tuple[str, str]] = set()
    for library in libraries:
        names.update(LIBRARY.findall(printed("readelf", "-dW", str(library))))
        for line in printed("nm", "-D", "--undefined-only", str(library)).splitlines():
            function, _, version = line.split()[-1].partition("@")
            if VERSION.fullmatch(version) or (not version and FUNCTION.fullmatch(function)):
                functions.add((function, version))
    return names, functions


def source_of(function: str) -> str:
    """A definition in C: what runs while libraries are loaded succeeds, and all else fails."""
    if function.startswith("__cudaRegister"):
        return f"static void *module_{function}[8]; void *{function}(void) {{ return module_{function}; }}\n"
    if re.search(r"(String|Name)$", function):
        return f'const char *{function}(void) {{ return "torch runs without CUDA here"; }}\n'
    return f"long {function}(void) {{ return {NO_DEVICE}; }}\n"


def build(name: str, functions: set[tuple[str, str]], folder: Path) -> None:
    """Compiles library `name` with these functions, each with its version, into the folder."""
    versions = {version: {f for f, v in functions if v == version} for _, version in functions if version}
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch) / "stub.c", Path(scratch) / "versions"
        source.write_text("".join(source_of(function) for function, _ in sorted(functions)))
        script.write_text("".join(f"{v} {{ global: {'; '.join(sorted(f))}; }};\n" for v, f in versions.items()))
        linker = [f"-Wl,-soname,{name}"] + ([f"-Wl,--version-script={script}"] if versions else [])
        printed("gcc", "-shared", "-fPIC", "-fno-builtin", *linker, "-o", str(folder / name), str(source))


def home_of(version: str, names: set[str]) -> str:
    """The library in which loaders look for a function of that version; CUDA's runtime, which is always loaded, has
    those without one."""
    stem = (version or "libcudart").lower().removeprefix("lib").split(".so")[0]
    (found,) = [name for name in names if re.fullmatch(rf"lib{stem}(_host)?\.so[.\d]*", name, re.IGNORECASE)]
    return found


def forget_cuda(package: str) -> None:
    """Removes NVIDIA's packages and Triton from what the package's metadata asks for."""
    (metadata,) = [file for file in distribution(package).files or [] if file.match("*.dist-info/METADATA")]
    path = Path(str(metadata.locate()))
    path.write_text(re.sub(r"Requires-Dist: (nvidia-|cuda-|triton\b).*\n", "", path.read_text()))


def main() -> None:
    for package in ("torch", "xgrammar"):
        forget_cuda(package)
    torch = distribution("torch")
    folder = Path(str(torch.locate_file("torch/lib")))
    if not (folder / "libtorch_cuda.so").exists():
        return
    names, functions = wanted_by([*folder.glob("*.so"), Path(str(torch.locate_file("torchvision/_C.so")))])
    for name in names:
        build(name, {(f, v) for f, v in functions if home_of(v, names) == name}, folder)
    print(f"torch {torch.version} runs without CUDA: {len(names)} libraries stand in for NVIDIA's", file=sys.stderr)


if __name__ == "__main__":
    main()
