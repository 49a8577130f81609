"""`npu-vlrl doctor` on the real torch_npu and the stand-in for CANN."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl import kernels
from npu_vlrl.cli import main
from npu_vlrl.kernels import table
from tests.host_cann import environment

ROOT = Path(__file__).parents[2]


def program(variables: dict[str, str]) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "npu_vlrl", "doctor", "--json"],
        env={**os.environ, "NPU_VLRL_PLATFORM": "npu", **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def details(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["detail"] for check in report["checks"]}


def test_two_devices() -> None:
    code, report = program(environment(devices=2))
    assert [check for check in report["checks"] if not check["ok"]] == []
    assert (code, report["platform"], report["platforms"]["npu"]) == (0, "npu", None)
    assert report["versions"]["torch_npu"] == importlib.metadata.version("torch_npu") and report["versions"]["CANN"]
    assert [(d["index"], d["physical"], d["name"]) for d in report["devices"]] == [
        (0, "0", "Ascend910B2"),
        (1, "1", "Ascend910B2"),
    ]
    assert all(0 < d["memory_free_bytes"] <= d["memory_total_bytes"] for d in report["devices"])
    fused = {op for op, implementation in report["kernels"].items() if implementation == "npu"}
    assert {"varlen_attention", "rms_norm", "swiglu"} <= fused
    assert {f"kernel {op}" for op in fused} <= set(details(report))
    assert details(report)["streams"] == "two streams, ordered by events"
    assert details(report)["graph capture"] == "none: every step of decoding is launched anew"
    assert details(report)["collective"] == "2 processes, cpu:gloo,npu:hccl"


def test_one_device_of_eight() -> None:
    code, report = program({**environment(devices=8), "ASCEND_RT_VISIBLE_DEVICES": "5"})
    assert code == 0
    assert [(d["index"], d["physical"]) for d in report["devices"]] == [(0, "5")]
    assert report["environment"]["ASCEND_RT_VISIBLE_DEVICES"] == "5"
    assert "gloo on the host alone" in details(report)["collective"]


def test_no_device() -> None:
    code, report = program(environment(devices=0))
    assert (code, report["platform"]) == (2, None)
    assert "there is no Ascend driver or device" in report["problem"]


def test_a_fused_kernel_that_is_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**environment(), "NPU_VLRL_PLATFORM": "npu"}.items():
        monkeypatch.setenv(name, value)  # for the processes of the collective
    kernels.use("npu")  # fills the column
    right = table._table["rms_norm"]["npu"]
    monkeypatch.setitem(table._table["rms_norm"], "npu", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    code = main(["doctor", "--json"])
    kernels.use("reference")
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    wrong = [check["name"] for check in report["checks"] if not check["ok"]]
    assert "kernel rms_norm" in wrong and all(name.startswith("kernel rms_norm") for name in wrong)
    assert report["checks"][0]["ok"] and all(check["remedy"] for check in report["checks"] if not check["ok"])
