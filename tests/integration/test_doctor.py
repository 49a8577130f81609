"""`npu-vlrl doctor` on the CPU: a real run, and each kind of failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from npu_vlrl import __version__, kernels
from npu_vlrl.cli import main
from npu_vlrl.hardware import HardwareError, Memory, Peak, collective
from npu_vlrl.hardware.cpu import CpuPlatform
from npu_vlrl.kernels import parity

KEYS = {
    *("exit_code", "platform", "problem", "platforms", "versions"),
    *("devices", "environment", "warnings", "kernels", "checks"),
}


def program(*arguments: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "npu_vlrl", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The CPU is asked for, and the slow collective is left out."""
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    monkeypatch.setattr(collective, "check", lambda platform, timeout_s: None)
    return monkeypatch


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert set(report) == KEYS and report["exit_code"] == code
    return code, report


def failed(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: f"{check['detail']}; {check['remedy']}" for check in report["checks"] if not check["ok"]}


def test_a_healthy_machine() -> None:
    code, out = program("--json", NPU_VLRL_PLATFORM="cpu")
    report = json.loads(out)
    assert (code, report["exit_code"], report["platform"], report["problem"]) == (0, 0, "cpu", None)
    assert set(report) == KEYS
    assert list(report["platforms"]) == ["npu", "cuda", "cpu"] and report["platforms"]["cpu"] is None
    assert report["versions"]["npu_vlrl"] == __version__
    assert report["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert report["environment"]["NPU_VLRL_PLATFORM"] == "cpu"
    assert report["kernels"] == kernels.active()
    (device,) = report["devices"]
    assert (device["index"], device["physical"], device["memory_total_bytes"]) == (0, "0", None)
    names = [check["name"] for check in report["checks"]]
    assert names[:3] == ["device 0", "streams", "graph capture"] and names[-1] == "collective"
    assert all(check["ok"] and check["remedy"] is None for check in report["checks"])
    assert report["checks"][-1]["detail"] == "2 processes, gloo"


def test_hardware_that_is_not_there() -> None:
    code, out = program("--json", NPU_VLRL_PLATFORM="npu", ASCEND_RT_VISIBLE_DEVICES="")
    report = json.loads(out)
    assert (code, report["exit_code"], report["platform"], report["checks"]) == (2, 2, None, [])
    assert report["problem"] == f"NPU_VLRL_PLATFORM=npu, but {report['platforms']['npu']}"
    assert report["environment"]["ASCEND_RT_VISIBLE_DEVICES"] == ""


def test_a_platform_that_does_not_exist(cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cpu.setenv("NPU_VLRL_PLATFORM", "tp\x1bu")
    assert main(["doctor"]) == 2
    said = capsys.readouterr().out
    assert "cannot train: NPU_VLRL_PLATFORM=tp\\x1bu is not a platform; choose one of npu, cuda, cpu" in said
    assert "\x1b" not in said


def test_a_kernel_that_is_wrong(cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cpu.setattr(
        parity, "check", lambda device: [("swiglu", 1e-7, 0.25, 1e-5, False), ("rms_norm", 0.0, 0.0, 0.0, True)]
    )
    code, report = run(capsys)
    assert code == 1
    assert list(failed(report)) == ["kernel swiglu"]
    assert "backward 2.5e-01 off the reference; 1.0e-05 is allowed" in failed(report)["kernel swiglu"]
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "kernel swiglu FAILED: forward 1.0e-07, backward 2.5e-01 off the reference; 1.0e-05 is allowed;" in said
    assert "1 checks failed on cpu" in said


def test_kernels_that_do_not_even_run(cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("aclnnSwiGlu is missing")

    cpu.setattr(parity, "check", broken)
    code, report = run(capsys)
    assert code == 1 and failed(report)["kernels"].startswith("aclnnSwiGlu is missing; ")


def test_a_device_that_does_not_answer(cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(self: CpuPlatform, index: int) -> None:
        if index == 1:
            raise HardwareError("it is hot")

    def memory(self: CpuPlatform, index: int = 0) -> Memory:
        if index == 1:
            raise RuntimeError("no answer")
        return Memory(3 << 30, 4 << 30)

    cpu.setattr(CpuPlatform, "device_count", lambda self: 2)
    cpu.setattr(CpuPlatform, "set_device", broken)
    cpu.setattr(CpuPlatform, "memory", memory)
    cpu.setattr(CpuPlatform, "peak", lambda self, index: Peak(1e14, 2e12, "a test"))
    code, report = run(capsys)
    assert code == 1 and failed(report) == {"device 1": "it is hot; look at it with the vendor's tool"}
    assert [d["memory_free_bytes"] for d in report["devices"]] == [3 << 30, None]
    assert [d["peak_bf16_flops"] for d in report["devices"]] == [1e14, 1e14]
    main(["doctor"])
    assert "physical 0, 3.0 of 4.0 GiB free" in capsys.readouterr().out


def test_a_device_that_computes_wrongly(cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = torch.arange
    cpu.setattr(parity, "check", lambda device: [])
    cpu.setattr(torch, "arange", lambda *a, **k: real(*a, **k) * 2)
    _, report = run(capsys)
    assert failed(report)["device 0"].startswith("the sum of 1 to 100 is 10100.0 and not 5050.0; ")


def test_processes_that_do_not_reach_each_other(cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(platform: CpuPlatform, timeout_s: float) -> None:
        raise collective.CollectiveError("process 1 of 2 did not end within 90 s")

    cpu.setattr(collective, "check", broken)
    code, report = run(capsys)
    assert code == 1 and failed(report)["collective"].startswith("process 1 of 2 did not end within 90 s; see that")


def test_one_device_is_said_to_prove_less(cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cpu.setattr(CpuPlatform, "process_group_backend", "cpu:gloo,cuda:nccl")
    _, report = run(capsys)
    assert report["checks"][-1]["detail"] == (
        "2 processes, gloo on the host alone, since cpu:gloo,cuda:nccl needs a device for each"
    )


def test_settings_that_are_seldom_wanted_are_told(cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cpu.setenv("TASK_QUEUE_ENABLE", "2")
    code, report = run(capsys)
    assert code == 0 and any(w.startswith("TASK_QUEUE_ENABLE=2: clashes with graph mode") for w in report["warnings"])
    main(["doctor"])
    assert "warning: TASK_QUEUE_ENABLE=2: clashes" in capsys.readouterr().out
