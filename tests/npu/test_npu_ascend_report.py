"""`npu-vlrl doctor --ascend-report` on the real torch_npu and the stand-in for CANN: all of it, and its failures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_vlrl import kernels
from npu_vlrl.acceptance import crew, report
from npu_vlrl.acceptance.plan import PATTERNS, Check, checks
from npu_vlrl.acceptance.worker import NotTried
from npu_vlrl.hardware.npu import NpuPlatform
from tests.host_cann import environment
from tests.support.reports import fault, report_of


@pytest.fixture(autouse=True)
def reference() -> Iterator[None]:
    yield
    kernels.use("reference")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """For the workers; two devices."""
    for name, value in {**environment(devices=2), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NPU_VLRL_PLATFORM", raising=False)
    return monkeypatch


@pytest.mark.timeout(900)
def test_the_whole_report(npu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """But for vLLM, which tests/vllm_ascend samples with. Of models, and of ops in other dtypes, one is enough."""
    left_out = re.compile(r"vLLM|.* of Qwen2.5-VL-7B|op (?!rms_norm).* in float(32|16)$")
    planned = [check for check in checks(_facts()) if not left_out.match(check.name)]
    code, found, lines = report_of(npu, tmp_path, planned)
    assert {name: line["detail"] for name, line in lines.items() if line["status"] == "failed"} == {}
    assert (code, found["complete"], found["platform"], found["failed"]) == (0, True, "npu", [])
    assert list(lines) == [check.name for check in planned]
    assert found["sizes"].startswith("reduced") and len(found["devices"]) == 2
    assert {"torch", "torch_npu", "transformers", "npu_vlrl", "CANN", "Ascend driver"} <= found["versions"].keys()
    fused = [op for op, platform in found["kernels"].items() if platform == "npu"]
    assert {"varlen_attention", "rms_norm"} <= set(fused)
    for op in fused:
        line = lines[f"op {op} in bfloat16"]
        assert line["implementation"] == "npu" and line["cases"]
        for case in line["cases"]:
            assert max(case["forward"], case["backward"]) <= line["tolerance"] and case["forward_ms"] > 0
    assert {case["case"] for case in lines["op swiglu in bfloat16"]["cases"]} == {
        "Qwen2.5-VL-3B-Instruct",
        "Qwen2.5-VL-7B-Instruct",
    }
    assert all(lines[f"{pattern} of all processes"]["ranks"] == 2 for pattern in PATTERNS)
    assert lines["weights to engines"]["bytes"] > 2**18 and len(lines["weights to engines"]["transfer_s"]) == 2
    for name in ("several learners", "sharded learners"):
        together, alone = lines[name]["losses"]["together"], lines[name]["losses"]["alone"]
        assert alone[-1] < alone[0] and together == pytest.approx(alone, abs=1e-3)
    assert 0 < lines["in-process engine, qwen2_5_vl"]["gap"] < 0.3
    assert "out of memory" in lines["out of memory"]["detail"]
    assert lines["memory of Qwen2.5-VL-3B-Instruct"]["measured_bytes"] > 0


def _facts() -> dict[str, object]:
    kernels.use("npu")
    ops = list(kernels.active())
    kernels.use("reference")
    return {
        "devices": [{}, {}],
        "ops": ops,
        "ranks": 2,
        "visible_devices_variable": NpuPlatform.visible_devices_variable,
        "allocator_variable": NpuPlatform.allocator_variables[0],
    }


def test_each_kind_of_failure_names_its_key(npu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    npu.setattr(crew, "GRACE_S", 1.0)
    together = {"pattern": "all_reduce", "members": "all"}
    faults = [
        fault("wrong_op", "NPU_VLRL_REFERENCE_OPS=rms_norm", arguments={"op": "rms_norm", "dtype": "bfloat16"}),
        fault("crash", "rollout.graphs=false"),
        fault("wrong_sum", "train.learners=1", arguments=together, ranks=2),
        fault("damaged_bucket", "sync.through=disk", ranks=2),
        Check("a pair", "tests.support.faults:good", "none", ranks=2),  # so that the next need not wait for a start
        fault("absent_rank", "NPU_VLRL_PROCESSES=1", arguments=together, ranks=2, deadline_s=2.0),
        fault("good"),
    ]
    code, found, lines = report_of(npu, tmp_path, faults)
    wrong = [check for check in faults if check.name not in ("good", "a pair")]
    assert code == 1 and found["failed"] == [check.name for check in wrong]
    assert all(lines[check.name]["turned_off_by"] == check.turned_off_by for check in wrong)
    assert all(0.04 < case["forward"] < 0.06 for case in lines["wrong_op"]["cases"])  # five per cent, rounded
    assert lines["crash"]["detail"] == "the process ended by signal SIGSEGV"
    assert "gives other numbers" in lines["wrong_sum"]["detail"]
    assert "the weights that arrived are not those that were sent" in lines["damaged_bucket"]["detail"]
    assert "did not end within" in lines["absent_rank"]["detail"]
    assert "rank 1 of 2" in lines["absent_rank"]["detail"]
    assert lines["good"]["status"] == "ok"
    assert Counter(line["status"] for line in found["checks"]) == {"failed": 5, "ok": 2}


def test_an_op_that_is_turned_off_runs_as_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.table.REFERENCE_OPS, "rms_norm, swiglu")
    kernels.use("npu")
    active = kernels.active()
    monkeypatch.delenv(kernels.table.REFERENCE_OPS)
    kernels.use("reference")
    assert (active["rms_norm"], active["swiglu"], active["rotary"]) == ("reference", "reference", "npu")


def test_vllm_is_not_tried_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_vlrl.acceptance import engines
    from npu_vlrl.acceptance.worker import Machine

    monkeypatch.setenv("NPU_VLRL_PLATFORM", "npu")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(NpuPlatform, "vllm_problems", lambda self, dtype, sleep: [f"vLLM needs more than {dtype}"])
    with pytest.raises(NotTried, match="^vLLM needs more than bfloat16$"):
        engines.vllm(Machine(), "qwen3")
    assert report.LIMIT_S > 600
