"""`npu-vlrl doctor --ascend-report` on the CPU: the file, and what becomes of checks that hang, crash or talk."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from npu_vlrl.acceptance import crew
from npu_vlrl.acceptance.plan import HERE, MODELS, ONE_DEVICE, Check, checks
from npu_vlrl.cli import main
from npu_vlrl.kernels.table import _table
from tests.support.reports import fault, report_of

GOOD = fault("good")
FACTS = {
    "devices": [{}, {}],
    "ops": sorted(_table),
    "ranks": 4,
    "visible_devices_variable": "DEVICES",
    "allocator_variable": "ALLOCATOR",
}


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    monkeypatch.setattr(crew, "GRACE_S", 0.5)
    return monkeypatch


def test_the_plan_covers_the_table_the_groups_and_says_a_key_each() -> None:
    planned = list(checks(FACTS))
    names = [check.name for check in planned]
    assert len(set(names)) == len(names)
    for op in _table:
        assert {f"op {op} in {dtype}" for dtype in ("bfloat16", "float32", "float16")} <= set(names)
    for pattern in ("broadcast", "all_reduce", "reduce_scatter_tensor", "all_to_all_single", "all_gather_object"):
        assert {f"{pattern} of {group}" for group in ("all processes", "learners", "learner and engines")} <= set(names)
    assert {f"memory of {model}" for model in MODELS} <= set(names)
    assert all(check.turned_off_by and check.deadline_s <= 300 for check in planned)
    assert names.index("op rms_norm in bfloat16") < names.index("weights to engines") < names.index("vLLM, qwen3")
    alone = [check for check in checks(FACTS | {"ranks": 1}) if check.ranks == ONE_DEVICE]
    assert "weights to engines" in [check.name for check in alone] and "streams" not in [c.name for c in alone]


def test_what_fails_is_a_line_and_the_rest_goes_on(
    cpu: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu.setenv("GLOO_SOCKET_IFNAME", "lo")
    arguments = {"op": "rms_norm", "dtype": "float32"}
    several = [
        GOOD,
        Check("good again", GOOD.function, "none"),
        fault("crash", "crash.key=off"),
        fault("wrong_op", "NPU_VLRL_REFERENCE_OPS=rms_norm", arguments=arguments),
        Check("right op", f"{HERE}.ops:compare", "none", arguments),
        fault("talkative"),
        fault("alone", ranks=ONE_DEVICE),
    ]
    code, report, lines = report_of(cpu, tmp_path, several)
    assert (code, report["complete"], report["platform"]) == (1, True, "cpu")
    assert report["failed"] == ["crash", "wrong_op", "talkative"]
    assert lines["good"]["detail"] == lines["good again"]["detail"]  # one process, as long as nothing fails
    assert "ended by signal SIGSEGV" in lines["crash"]["detail"] and lines["crash"]["turned_off_by"] == "crash.key=off"
    assert any("in crash" in line for line in lines["crash"]["log"])  # where it was
    wrong = lines["wrong_op"]
    assert "off the reference" in wrong["detail"] and wrong["turned_off_by"] == "NPU_VLRL_REFERENCE_OPS=rms_norm"
    assert [case["case"] for case in wrong["cases"]] == [MODELS[0]] and wrong["cases"][0]["forward"] > 0.04
    right = lines["right op"]
    assert right["status"] == "ok" and right["cases"][0]["shapes"] == [[96, 2048], [2048]]
    assert right["cases"][0]["forward_ms"] > 0 and "turned_off_by" not in right
    talk = json.dumps(lines["talkative"])
    assert "HOST ADDRESS ~/model" in talk and socket.gethostname() not in talk and "10.1.2.3" not in talk
    assert lines["alone"] == {
        "name": "alone",
        "status": "not tried",
        "detail": "takes two devices, and one is visible",
    }
    assert report["environment"]["GLOO_SOCKET_IFNAME"] == "set (not shown)"
    said = capsys.readouterr().out
    assert "wrong_op: FAILED" in said and "turned off by NPU_VLRL_REFERENCE_OPS=rms_norm" in said


def test_a_hang_ends_at_its_deadline_and_an_abort_leaves_what_was_found(tmp_path: Path) -> None:
    """The command is ended while a check hangs; before that, another one is given up."""
    program = (
        "import sys; from pathlib import Path; from npu_vlrl.acceptance import report\n"
        "from tests.support.reports import fault\n"
        "first = [fault('good'), fault('hang', deadline_s=1.0)]\n"
        "report.checks = lambda facts: iter([*first, fault('hang', deadline_s=500.0)])\n"
        "sys.exit(report.write_report(Path(sys.argv[1])))"
    )
    file = tmp_path / "report.json"
    environment = {**os.environ, "NPU_VLRL_PLATFORM": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", program, str(file)], env=environment)
    deadline = time.monotonic() + 250
    while not file.is_file() or len(json.loads(file.read_text())["checks"]) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    while not (workers := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    report = json.loads(file.read_text())
    assert report["complete"] is False
    good, hung = report["checks"]
    assert good["status"] == "ok" and hung["detail"] == "the process did not end within 1 s"
    assert any("in hang" in line for line in hung["log"])  # where it was
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_without_the_hardware_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NPU_VLRL_PLATFORM", raising=False)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    code, report, lines = report_of(monkeypatch, tmp_path, [GOOD])
    assert (code, lines, report["complete"]) == (2, {}, True)
    assert "torch_npu" in report["problem"] or "ASCEND_RT_VISIBLE_DEVICES" in report["problem"]
    assert "torch_npu" in (said := capsys.readouterr().err) or "ASCEND_RT_VISIBLE_DEVICES" in said


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ascend-report", str(tmp_path / "no" / "report.json")]) == 2
    assert "No such file or directory; correct the path" in capsys.readouterr().err
