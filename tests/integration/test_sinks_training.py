"""A real training with a sink: its numbers are those of the run folder, also after a failure and a resume."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image as Pillow
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from npu_vlrl.config import ConfigError
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.report.plots.curves import CURVES
from npu_vlrl.report.sinks.tensorboard_sink import TensorBoardSink
from npu_vlrl.train_loop import train
from tests.support.runs import lines, small_config

SETTINGS: dict[str, Any] = {
    "run__sinks": ["tensorboard"],
    "run__show_every": 2,
    "train__steps": 3,
    "warm_start__steps": 0,
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fails in its third step, and goes on from the checkpoint of its first."""
    folder = tmp_path_factory.mktemp("sinks") / "run"
    original, calls = Learner.step, []

    def breaks(self: Learner, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the machine burnt")
        return original(self, *arguments)

    with mock.patch.object(Learner, "step", breaks), pytest.raises(RuntimeError):
        train(small_config(folder, run__checkpoint_every=2, **SETTINGS))
    checkpoint = next((folder / "checkpoints").iterdir())
    assert checkpoint.name == "step-00000002"
    train(small_config(folder, run__checkpoint_every=2, run__if_exists="resume", **SETTINGS))
    return folder


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    return found


def text(found: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in found.Tensors(f"{tag}/text_summary")]


def test_every_number_of_the_folder_is_in_tensorboard(resumed: Path) -> None:
    found, recorded = events(resumed), lines(resumed, "metrics.jsonl")
    assert [line["step"] for line in recorded] == [0, 0, 1, 2, 3]
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in recorded:
        for name, value in line.items():
            if name != "step" and value is not None:
                tag = name if "/" in name else f"train/{name}"
                expected.setdefault(tag, []).append((line["step"], value))
    assert set(found.Tags()["scalars"]) == set(expected)
    for tag, points in expected.items():
        shown = [(event.step, event.value) for event in found.Scalars(tag)]
        assert [step for step, _ in shown] == [step for step, _ in points]
        np.testing.assert_allclose([v for _, v in shown], [v for _, v in points], rtol=1e-6)


def test_configuration_images_and_both_ends_are_there(resumed: Path) -> None:
    found = events(resumed)
    configs = [json.loads(config) for _, config in text(found, "config")]
    assert [config["run"]["if_exists"] for config in configs] == ["raise", "resume"]
    assert configs[0]["optim"]["lr"] == 1e-2
    assert [state for _, state in text(found, "state")] == ["    RuntimeError: the machine burnt", "finished"]
    shown = found.Images("trajectory/0")
    assert [event.step for event in shown] == [0, 2]
    trajectories = [t for t in lines(resumed, "trajectories.jsonl") if t["group"].startswith("step2")]
    first = trajectories[0]["turns"][0]["new_context"][0]["images"][0]["hash"]
    with (
        Pillow.open(io.BytesIO(shown[1].encoded_image_string)) as given,
        Pillow.open(resumed / "images" / f"{first}.png") as recorded,
    ):
        np.testing.assert_array_equal(np.array(given), np.array(recorded))
    captions = dict(text(found, "trajectory/caption"))
    assert trajectories[0]["id"] in captions[2] and trajectories[0]["status"] in captions[2]


def test_the_curves_of_plot_are_recorded(resumed: Path) -> None:
    recorded = set().union(*lines(resumed, "metrics.jsonl"))
    asked = {series.metric for curve in CURVES for series in curve.series}
    late = {f"action_tokens/turn{k}" for k in range(3, 9)}  # the episodes have two turns at most
    assert asked - recorded == late


def test_a_failing_sink_does_not_change_the_run(
    resumed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: TensorBoardSink, step: int, values: Any) -> None:
        raise OSError("no space left")

    with mock.patch.object(TensorBoardSink, "scalars", full):
        train(small_config(tmp_path / "run", **SETTINGS))
    assert capsys.readouterr().out.count("run.sinks: tensorboard failed (no space left)") == 1
    same = [
        [line["step"], line.get("pg_loss"), line.get("reward")] for line in lines(tmp_path / "run", "metrics.jsonl")
    ]
    other = [[line["step"], line.get("pg_loss"), line.get("reward")] for line in lines(resumed, "metrics.jsonl")]
    assert same == other


def test_a_sink_that_cannot_begin_leaves_no_run_behind(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", **SETTINGS)
    with (
        mock.patch("npu_vlrl.report.sinks.tensorboard_sink.open_sink", side_effect=OSError("read-only")),
        pytest.raises(ConfigError, match=r"run\.sinks: tensorboard cannot begin: read-only"),
    ):
        train(config)
    assert not (tmp_path / "run" / "config.yaml").exists()
    train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})}))


def test_a_missing_package_is_said_before_anything_is_made(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", run__sinks=["trackio"])
    with (
        mock.patch("npu_vlrl.report.sinks.sinks.find_spec", return_value=None),
        pytest.raises(ConfigError, match="trackio is not installed: pip install"),
    ):
        train(config)
    assert not (tmp_path / "run").exists()
