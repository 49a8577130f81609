"""Acceptance reports of chosen checks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.acceptance import report
from npu_vlrl.acceptance.plan import Check
from npu_vlrl.cli import main


def report_of(
    monkeypatch: pytest.MonkeyPatch, folder: Path, checks: Iterable[Check]
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Exit code, the report, and its checks by name."""
    monkeypatch.setattr(report, "checks", lambda facts: iter(checks))
    file = folder / "report.json"
    code = main(["doctor", "--ascend-report", str(file)])
    found = json.loads(file.read_text())
    return code, found, {line["name"]: line for line in found["checks"]}


def fault(name: str, turned_off_by: str = "a.key=off", **settings: Any) -> Check:
    """A check of `faults` under its own name."""
    return Check(name, f"tests.support.faults:{name}", turned_off_by, **settings)
