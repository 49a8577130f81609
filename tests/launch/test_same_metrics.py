"""The comparison of two runs' metrics, which CI trusts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.same_metrics import COMPARED, differences, main

EVALUATION = {"step": 0, "eval/all/reward": 0.5, "eval/all/turns": 2.0}
STEP = {name: 0.25 for name in COMPARED if name != "eval/all/reward"} | {"step": 1, "tokens": 3000.0, "seconds": 1.0}


def test_equal_but_for_rounding_and_seconds() -> None:
    other = {**STEP, "pg_loss": 0.25 + 9e-5, "tokens": 3000.1, "seconds": 99.0}
    assert differences([EVALUATION, STEP], [EVALUATION, other], 1e-4) == []


@pytest.mark.parametrize("name", [name for name in COMPARED if name in STEP])
def test_every_number_counts(name: str) -> None:
    other = {**STEP, name: STEP[name] * 1.001}
    assert differences([STEP], [other], 1e-4) == [f"step 1: {name} is {STEP[name]} and {other[name]}"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([EVALUATION], "2 lines and 1 lines"),
        ([EVALUATION, {**STEP, "step": 2}], "step 1: step is 1 and 2"),
        ([{**EVALUATION, "eval/all/reward": 0.6}, STEP], "step 0: eval/all/reward is 0.5 and 0.6"),
        ([EVALUATION, {name: value for name, value in STEP.items() if name != "kl"}], "step 1: kl is in one only"),
        ([EVALUATION, {**STEP, "kl": float("nan")}], "step 1: kl is 0.25 and nan"),
    ],
)
def test_what_differs_is_named(other: list[dict[str, float]], said: str) -> None:
    assert differences([EVALUATION, STEP], other, 1e-4) == [said]


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, **changed: float) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(f"{json.dumps(EVALUATION)}\n{json.dumps({**STEP, **changed})}\n")
        return str(tmp_path / name)

    one = run("one")
    assert main([one, run("same"), "1e-4"]) == 0
    assert capsys.readouterr().out == "2 lines of metrics are the same within 0.0001\n"
    assert main([one, run("other", pg_loss=0.3), "1e-4"]) == 1
    assert capsys.readouterr().out == "step 1: pg_loss is 0.25 and 0.3\n"
    assert main([run("still", pg_loss=0.0), run("still too", pg_loss=0.0), "1e-4"]) == 1
    assert "compares nothing" in capsys.readouterr().out
