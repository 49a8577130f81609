"""Every preset, loss and correction trains the tiny model in a game with pictures, from configuration alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_vlrl.algorithms import LOSSES
from npu_vlrl.algorithms.presets import PRESETS
from npu_vlrl.config import load_config
from npu_vlrl.train_loop import train
from tests.support.learning import tiny_folder

torch.set_num_threads(1)

CONFIG = Path(__file__).parents[2] / "configs" / "frozenlake_tiny.yaml"

SMALL = (
    "rollout.groups=2",
    "rollout.group_size=4",
    "workflow.max_turns=3",
    "evaluation.tasks=1",
    "run.show_every=0",
    "environment.options.hole_reward=-1",  # so that episodes differ in what they earn, without any success
)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that keeps to the format now and then. Its preset trains on observations, which supervision must not."""
    folder = tmp_path_factory.mktemp("warm") / "run"
    words = ["train.steps=0", "warm_start.steps=150", "warm_start.batch=8", "algorithm.preset=rico_grpo"]
    train(load_config(CONFIG, [*SMALL, *words, f"model.path={tiny_folder()}", f"run.dir={folder}"]))
    return folder / "warm_start"


def steps(folder: Path, warm: Path, *words: str) -> list[dict[str, Any]]:
    start = [f"model.path={warm}", "warm_start.steps=0", "train.steps=2", f"run.dir={folder}"]
    train(load_config(CONFIG, [*SMALL, *start, *words]))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "pg_loss" in line]


def check(trained: list[dict[str, Any]]) -> None:
    assert len(trained) == 2
    for line in trained:
        assert line["skipped_updates"] == 0 and line["logprob_gap"] < 1e-4
        assert line["grad_norm"] > 0 and math.isfinite(line["pg_loss"])
        assert {"clip_low", "clip_high", "entropy", "gap", "gap_max", "anchor_kl"} <= line.keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(tmp_path: Path, warm: Path, preset: str) -> None:
    trained = steps(tmp_path / "run", warm, f"algorithm.preset={preset}")
    check(trained)
    assert ("critic/value_loss" in trained[0]) == (PRESETS[preset]["advantage"].endswith("gae"))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("style", ["concat", "individual"])
def test_every_loss(tmp_path: Path, warm: Path, loss: str, style: str) -> None:
    words = [f"algorithm.loss={loss}", f"workflow.export_style={style}", "algorithm.updates=2"]
    check(steps(tmp_path / "run", warm, *words))


@pytest.mark.parametrize("correction", ["tis", "icepop"])
def test_every_correction(tmp_path: Path, warm: Path, correction: str) -> None:
    trained = steps(tmp_path / "run", warm, f"algorithm.correction={correction}", "algorithm.keep_groups=0.5")
    check(trained)
    assert trained[0]["trained_groups"] == 1  # of two
    assert trained[0]["correction_weight"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("advantage", ["opo", "reinforce_pp", "reinforce_pp_baseline", "turn_grpo"])
def test_estimators_that_no_preset_names(tmp_path: Path, warm: Path, advantage: str) -> None:
    check(steps(tmp_path / "run", warm, "algorithm.preset=grpo", f"algorithm.advantage={advantage}"))
