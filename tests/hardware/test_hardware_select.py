"""Which platform is chosen, and what each says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npu_vlrl import kernels
from npu_vlrl.hardware import PLATFORMS, HardwareError, select
from npu_vlrl.hardware.__main__ import exports, main
from npu_vlrl.hardware.base import Platform, Setting
from npu_vlrl.hardware.cpu import CpuPlatform
from npu_vlrl.hardware.cuda import CudaPlatform
from npu_vlrl.hardware.npu import NpuPlatform


def test_the_named_platform_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    assert select().name == "cpu"


def test_without_a_name_the_first_usable_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPU_VLRL_PLATFORM", raising=False)
    assert list(PLATFORMS) == ["npu", "cuda", "cpu"]
    for name, best in (("npu", NpuPlatform), ("cuda", CudaPlatform), ("cpu", CpuPlatform)):
        with monkeypatch.context() as patch:
            for other in (NpuPlatform, CudaPlatform):
                patch.setattr(other, "missing", lambda self, best=best: None if type(self) is best else "gone")
            assert select().name == name


def test_an_unknown_or_unusable_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "tpu")
    with pytest.raises(HardwareError, match="NPU_VLRL_PLATFORM=tpu is not a platform; choose one of npu, cuda, cpu"):
        select()
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "npu")
    monkeypatch.setattr(NpuPlatform, "missing", lambda self: "it is at lunch")
    with pytest.raises(HardwareError, match="NPU_VLRL_PLATFORM=npu, but it is at lunch"):
        select()


@pytest.mark.parametrize("platform", [make() for make in PLATFORMS.values()], ids=lambda p: p.name)
def test_facts_fit_together(platform: CpuPlatform) -> None:
    kernels.use(platform.kernels)
    kernels.use("reference")
    assert platform.collective_backend in platform.process_group_backend.replace(":", ",").split(",")
    assert ("gloo" in platform.process_group_backend) and platform.ray_resource
    for name, setting in platform.launch_environment.items():
        assert setting.value and setting.why
        assert name.startswith(platform.watched), "what is recommended is also shown"
        assert (name, setting.value) not in platform.cautions
    for peak in platform.peaks.values():
        assert 1e14 < peak.flops < 1e16 and 0.8e12 <= peak.bandwidth < 1e13 and peak.source


@pytest.mark.parametrize(
    ("name", "tflops", "gigabytes", "bandwidth"),
    [  # rows of a table that was worked out by hand: cube cores, MHz -> cores * 8192 * MHz
        ("Ascend910B1", 363.7, 64, 1.6),
        ("Ascend910B2", 353.9, 64, 1.6),
        ("Ascend910B3", 294.9, 64, 1.6),
        ("Ascend910B4", 245.8, 32, 0.8),
        ("Ascend910B4-1", 245.8, 64, 1.6),
        ("Ascend910_9391", 363.7, 64, 1.6),
        ("Ascend910_9392", 363.7, 64, 1.6),
        ("Ascend910_9381", 353.9, 64, 1.6),
        ("Ascend910_9382", 353.9, 64, 1.6),
    ],
)
def test_peaks_of_npus(
    name: str, tflops: float, gigabytes: int, bandwidth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NpuPlatform, "device_name", lambda self, index=0: name)
    peak = NpuPlatform().peak()
    assert peak is not None
    assert round(peak.flops / 1e12, 1) == tflops
    assert (peak.memory, peak.bandwidth) == (gigabytes * 1e9, bandwidth * 1e12)


@pytest.mark.parametrize("name", ["Ascend910", "Ascend910B", "Ascend910A", "Ascend910_9363", "Ascend950PR_957b", ""])
def test_an_unknown_npu_has_no_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that only resembles a known one gets no number, so utilisation is absent and not wrong."""
    monkeypatch.setattr(NpuPlatform, "device_name", lambda self, index=0: name)
    assert NpuPlatform().peak() is None


def test_the_cpu_answers_everything() -> None:
    cpu = CpuPlatform()
    cpu.set_device(0)
    cpu.synchronize()
    assert (cpu.missing(), cpu.device_count(), cpu.device(0), cpu.physical_id(0)) == (None, 1, torch.device("cpu"), "0")
    assert (cpu.memory(), cpu.stream(), cpu.peak(), cpu.versions()) == (None, None, None, {})
    with cpu.on(None):
        state = cpu.rng_state()
        first = torch.rand(3)
        cpu.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
    assert 10e6 < cpu.peak_memory_bytes() < 1e12
    assert cpu.describe().startswith(f"CPU, {os.cpu_count()} cores, ")


def test_cuda_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA; install requirements-gpu.txt" in str(CudaPlatform().missing())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert str(CudaPlatform().missing()).endswith("check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES=9")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert str(CudaPlatform().missing()).endswith("and CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("value", "physical"), [(None, ["0", "1"]), ("2,5", ["2", "5"]), (" GPU-8a , 3", ["GPU-8a", "3"])]
)
def test_cuda_numbers(monkeypatch: pytest.MonkeyPatch, value: str | None, physical: list[str]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert [CudaPlatform().physical_id(index) for index in (0, 1)] == physical


def test_a_device_that_is_not_there_or_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> None:
        raise RuntimeError("uncorrectable ECC error\nsecond line")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", broken)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    for index in (2, -1):
        with pytest.raises(
            HardwareError, match=rf"cuda device {index} is not there: 2 visible; .*CUDA_VISIBLE_DEVICES"
        ):
            CudaPlatform().set_device(index)
    with pytest.raises(HardwareError) as error:
        CudaPlatform().set_device(1)
    assert str(error.value) == (
        "cuda device 1 (physical 5) does not answer: uncorrectable ECC error; look at its state with nvidia-smi, and "
        "reset it or leave it out with CUDA_VISIBLE_DEVICES"
    )


def test_the_environment_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(CudaPlatform.watched):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("HCCL_BUFFSIZE", "64")
    assert CudaPlatform().environment() == {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "INFO"}
    assert [warning.split(":")[0] for warning in CudaPlatform().warnings()] == ["CUDA_LAUNCH_BLOCKING=1"]
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert CudaPlatform().warnings() == []


def test_shell_lines_leave_what_is_set(tmp_path: Path) -> None:
    class Machine(CpuPlatform):
        launch_environment = {
            name: Setting("it's $HOME", "why; it says 'so'") for name in ("FRESH_X", "EMPTY_X", "SET_X")
        }

    script = f"export EMPTY_X= SET_X=mine\neval {shell_quote(exports(Machine()))}\nexport -p | grep _X="
    done = subprocess.run(["bash", "-eu", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        'declare -x EMPTY_X=""',
        'declare -x FRESH_X="it\'s \\$HOME"',
        'declare -x SET_X="mine"',
    ]


@pytest.mark.parametrize(
    ("platform", "ours", "other"),
    [
        (CudaPlatform, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        (NpuPlatform, "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),  # torch_npu refuses both together
        (NpuPlatform, "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_IF_BASE_PORT"),
    ],
)
def test_a_variable_stays_away_from_another_about_the_same(
    platform: type[Platform], ours: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(other, raising=False)
    assert f"export {ours}=" in exports(platform())
    monkeypatch.setenv(other, "")
    assert f"export {ours}=" not in exports(platform())


def test_shared_memory_is_not_of_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes the default for each setting that it is not told, so it is told all."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with CudaPlatform().shareable():
        pass
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ZeroDivisionError), CudaPlatform().shareable():
        assert told == ["max_split_size_mb:64,expandable_segments:False"]
        told.append(str(1 // 0))
    assert told[1:] == ["max_split_size_mb:64,expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")  # the one that counts
    with CudaPlatform().shareable():
        assert len(told) == 2


def shell_quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def test_the_command_for_scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    assert (main(["environment"]), capsys.readouterr().out) == (0, "")
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "tpu")
    assert main(["environment"]) == 2
    assert capsys.readouterr() == (
        "",
        "npu-vlrl: NPU_VLRL_PLATFORM=tpu is not a platform; choose one of npu, cuda, cpu\n",
    )
    assert main(["weather"]) == 2
    assert capsys.readouterr().err.startswith("usage: ")


@pytest.mark.parametrize("given", [None, "1"])
def test_torch_does_not_load_backends_by_itself(given: str | None) -> None:
    variables = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    if given is not None:
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = given
    code = "import os, npu_vlrl; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (given or "0")
