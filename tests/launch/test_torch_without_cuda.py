"""launch/torch_without_cuda.py on libraries made here: linked against NVIDIA's names, and then without these."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.checkout import ROOT

SCRIPT = ROOT / "launch" / "torch_without_cuda.py"
METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Requires-Dist: filelock
Requires-Dist: nvidia-cublas-cu12==12.8.4.1; platform_system == "Linux"
Requires-Dist: cuda-bindings==12.9.4; platform_system == "Linux"
Requires-Dist: triton==3.6.0; platform_system == "Linux"
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc") or not shutil.which("readelf"),
    reason="it makes ELF libraries with gcc",
)


def library(path: Path, source: str, *options: str) -> None:
    subprocess.run(
        ["gcc", "-x", "c", "-shared", "-fPIC", "-o", path, "-", *options], input=source, text=True, check=True
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Packages whose library calls a function with a version and one without, of libraries that are gone."""
    for name, version in (("torch", "2.10.0"), ("xgrammar", "0.2.9")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(name=name, version=version))
        (info / "RECORD").write_text(f"{info.name}/METADATA,,\n")
    lib, vision, gone = tmp_path / "torch" / "lib", tmp_path / "torchvision", tmp_path / "gone"
    for folder in (lib, vision, gone):
        folder.mkdir(parents=True)
    (gone / "map").write_text("libcublas.so.12 { global: cublasCreate_v2; };\n")
    library(gone / "libcudart.so", "int unused;", "-Wl,-soname,libcudart.so.12")
    versioned = f"-Wl,-soname,libcublas.so.12,--version-script={gone / 'map'}"
    library(gone / "libcublas.so", "int cublasCreate_v2(void) { return 0; }", versioned)
    nccl = "int ncclSend(void) { return 0; } char *ncclGetErrorString(int e) { return 0; }"
    library(gone / "libnccl.so", nccl, "-Wl,-soname,libnccl.so.2")
    source = """
        int cublasCreate_v2(void); int ncclSend(void); const char *ncclGetErrorString(int);
        int both(void) { return 1000 * cublasCreate_v2() + ncclSend(); }
        const char *words(void) { return ncclGetErrorString(1); }
    """
    linked = [f"-L{gone}", "-Wl,--no-as-needed", "-lcudart", "-lcublas", "-lnccl", "-Wl,-rpath,$ORIGIN"]
    library(lib / "libtorch_cuda.so", source, *linked)
    library(vision / "_C.so", "int unused;")
    shutil.rmtree(gone)
    return tmp_path


def python(site: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_a_library_loads_and_each_call_fails_as_without_a_device(site: Path) -> None:
    load = f"""if True:
        import ctypes
        library = ctypes.CDLL({str(site / "torch" / "lib" / "libtorch_cuda.so")!r})
        library.words.restype = ctypes.c_char_p
        print(library.both(), library.words().decode())
    """
    assert "libcudart.so.12: cannot open shared object file" in python(site, "-c", load).stderr
    for _ in range(2):  # the second time finds its own libraries there
        done = python(site, SCRIPT)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "torch 2.10.0 runs without CUDA: 3 libraries stand in for NVIDIA's\n"
        assert python(site, "-c", load).stdout == "100100 torch runs without CUDA here\n"


def test_pip_is_not_asked_for_its_packages(site: Path) -> None:
    python(site, SCRIPT)
    for file in site.glob("*.dist-info/METADATA"):
        assert [line for line in file.read_text().splitlines() if "Dist" in line] == ["Requires-Dist: filelock"]


def test_a_build_for_cpus_keeps_its_libraries(site: Path) -> None:
    (site / "torch" / "lib" / "libtorch_cuda.so").unlink()
    done = python(site, SCRIPT)
    assert (done.returncode, done.stderr, list((site / "torch" / "lib").iterdir())) == (0, "", [])
