"""An update that is not finite is left out, and the run says whose sample it was and goes on."""

from pathlib import Path

import pytest

from npu_vlrl.algorithms import AlgorithmConfig
from npu_vlrl.train_loop import train
from npu_vlrl.types import Sample
from tests.support.learning import with_advantage
from tests.support.runs import metrics, small_config


def test_a_skipped_update_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three steps gets one advantage that is NaN; the run is then resumed for a fourth."""
    calls = []

    def spoiled(algorithm: AlgorithmConfig, samples: list[Sample]) -> tuple[list[Sample], dict[str, float]]:
        good, metrics = with_credit(algorithm, samples)
        calls.append(good[0].id)
        return ([with_advantage(good[0], float("nan")), *good[1:]] if len(calls) == 2 else good), metrics

    with_credit = AlgorithmConfig.with_credit
    monkeypatch.setattr(AlgorithmConfig, "with_credit", spoiled)
    train(small_config(tmp_path / "run", train__steps=3))
    shown = capsys.readouterr().out
    assert shown.count("update skipped") == 1
    assert f"step 1: update skipped, not finite: sample {calls[1]}" in shown
    steps = [line for line in metrics(tmp_path / "run") if "skipped_updates" in line]
    assert [line["skipped_updates"] for line in steps] == [0, 1, 0]
    assert steps[1]["grad_norm"] is None and steps[2]["grad_norm"] is not None
    train(small_config(tmp_path / "run", train__steps=4, run__if_exists="resume"))
    assert "update skipped" not in capsys.readouterr().out
