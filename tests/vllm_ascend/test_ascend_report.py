"""The lines about vLLM of `npu-vlrl doctor --ascend-report`, over the stand-in for CANN."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_vlrl.acceptance.plan import checks
from tests.host_cann import ROOMY_MIB, environment
from tests.support.reports import report_of
from tests.vllm_ascend.stages import FITS

FACTS = {
    "devices": [],
    "visible_devices_variable": None,
    "ops": [],
    "ranks": 1,
    "allocator_variable": None,
}
"""Of a machine about which nothing else is asked."""


def test_vllm_is_certified_by_its_log_probabilities(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that has old weights fails the check, by its own control."""
    for name, value in environment(devices=1, memory_mib=ROOMY_MIB).items():
        monkeypatch.setenv(name, value)
    planned = [check for check in checks(FACTS) if check.name == "vLLM, qwen3"]
    code, found, lines = report_of(monkeypatch, tmp_path, planned)
    assert (code, found["failed"]) == (0, []), found
    line = lines["vLLM, qwen3"]
    assert line["status"] == "ok" and 0 < line["gap"] < FITS and 0 < line["gap_updated"] < FITS and line["tokens"] >= 16
