"""Each half of a training alone: what is recorded is what is learned from, to the last bit."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from npu_vlrl.report.recorded import Recorded
from npu_vlrl.report.run_folder import trajectory_record
from npu_vlrl.types import DataError, SpecialTokens
from tests.support.program import program, records

ROOT = Path(__file__).parents[2]
SMALL = ("train.steps=3", "rollout.groups=4", "evaluation.tasks=2", "run.record_every=1", "run.show_every=0")
WARM = ("warm_start.steps=60", "warm_start.batch=16")
ELSEWHERE = ("seconds", "peak_memory", "engine/", "images_", "per_second", "mfu", "probe_")
"""Parts of the names of what a clock or an engine says."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")


def train(folder: Path, *words: object) -> Path:
    done = program("train", "--config", ROOT / "configs/arrow_tiny.yaml", "--run-dir", folder, *SMALL, *words)
    assert done.code == 0, done
    return folder


def updates(run: Path) -> list[dict[str, float]]:
    """What each step's update says, without what depends on who sampled and how fast all was."""
    lines = [line for line in records(run, "metrics.jsonl") if "pg_loss" in line]
    return [{k: v for k, v in line.items() if not any(word in k for word in ELSEWHERE)} for line in lines]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_VLRL_PLATFORM", "cpu")
        return train(tmp_path_factory.mktemp("halves") / "whole", *WARM)


def test_learning_from_records_gives_the_metrics_of_the_run(run: Path, tmp_path: Path) -> None:
    again = updates(train(tmp_path / "again", *WARM, "--debug-train-only", run))
    assert again == updates(run) and len(again) == 3
    assert all(line["grad_norm"] > 0 and math.isfinite(line["kl"]) for line in again)
    assert len({line["reward"] for line in again}) > 1, "the steps differ, so equality says something"
    counted = [line for line in records(tmp_path / "again", "metrics.jsonl") if "pg_loss" in line]
    assert all(line["engine/tokens_decoded"] == 0 for line in counted)
    assert not (tmp_path / "again" / "export").exists()


def test_so_it_is_with_a_critic_and_a_penalty_of_the_last_bits(tmp_path: Path) -> None:
    """KL in the reward, and nothing else: rounding of the logprobs would be all that there is to learn from."""
    words = ("train.steps=2", "warm_start.steps=4", "rollout.groups=3", "evaluation.tasks=1", "run.record_every=1")
    base = ("train", "--config", ROOT / "configs/frozenlake_tiny.yaml", *words, "run.show_every=0")
    assert program(*base, "--run-dir", tmp_path / "whole").code == 0
    assert program(*base, "--run-dir", tmp_path / "again", "--debug-train-only", tmp_path / "whole").code == 0
    again = updates(tmp_path / "again")
    assert again == updates(tmp_path / "whole") and "critic/value_loss" in again[1] and again[1]["logprob_gap"] < 1e-4


def test_other_records_give_other_metrics(run: Path, tmp_path: Path) -> None:
    """One logprob of the first step is moved by a hundredth of a nat, so the check above can fail."""
    altered = tmp_path / "altered"
    altered.mkdir()
    for name in ("images", "warm_start"):
        (altered / name).symlink_to(run / name)
    lines = (run / "trajectories.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line)["group"].startswith("step0"))
    record = json.loads(lines[at])
    record["turns"][0]["action"]["logprobs"][0] -= 0.01
    lines[at] = json.dumps(record)
    (altered / "trajectories.jsonl").write_text("\n".join(lines) + "\n")
    assert updates(train(tmp_path / "other", *WARM, "--debug-train-only", altered))[0] != updates(run)[0]


def test_playing_alone_leaves_the_weights_and_records_the_steps(tmp_path: Path) -> None:
    played = train(tmp_path / "played", "warm_start.steps=0", "--debug-rollout-only")
    lines = records(played, "trajectories.jsonl")
    assert {line["step"] for line in lines} == {0, 1, 2} and len(lines) == 3 * 4 * 4
    versions = {v for line in lines for turn in line["turns"] for v in turn["action"]["weight_versions"]}
    assert versions == {0}
    assert [line["step"] for line in records(played, "metrics.jsonl")] == [0, 1, 2]
    assert not (played / "checkpoints").exists() and not (played / "export").exists()
    first = updates(train(tmp_path / "learned", "warm_start.steps=0", "--debug-train-only", played))
    whole = updates(train(tmp_path / "whole", "warm_start.steps=0", "train.steps=1"))
    assert first[0] | {"lr": 0.0} == whole[0] | {"lr": 0.0}, "the first step is that of a whole training"


def test_what_is_read_back_is_what_was_written(run: Path) -> None:
    special = special_of(run)
    found = [t for _, groups in Recorded(run, special, 2).steps() for group in groups for t in group]
    written = [line for line in records(run, "trajectories.jsonl") if line["group"].startswith("step")]
    assert len(found) == len(written) == 3 * 4 * 4
    for trajectory, line in zip(found, written, strict=True):
        again = json.loads(json.dumps(trajectory_record(trajectory, {})))
        for turn in line["turns"]:  # what learning made of the tokens is not read back, as it is learned again
            for name in ("advantages", "learner_logprobs", "entropy"):
                del turn["action"][name]
        assert {k: v for k, v in again.items() if k != "advantages"} == {k: line[k] for k in again if k != "advantages"}
        for turn in trajectory.turns:
            assert turn.action.logprobs == tuple(np.float32(turn.action.logprobs).tolist())


def special_of(run: Path) -> SpecialTokens:
    """Of the tiny model that the run wrote."""
    settings = json.loads(next((run / "model").glob("*/config.json")).read_text())
    names = {f: settings[f"{f}_token_id"] for f in ("image", "video", "vision_start", "vision_end")}
    return SpecialTokens(end_of_turn=(settings["text_config"]["eos_token_id"],), **names)


def test_mistakes_are_refused(run: Path, tmp_path: Path) -> None:
    base = ("train", "--config", ROOT / "configs/arrow_tiny.yaml", *SMALL)

    def refused(*words: object) -> str:
        done = program(*base, "--run-dir", tmp_path / "r", *words)
        assert done.code == 2 and "Traceback" not in done.err, done
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        return done.err

    assert "--debug-rollout-only learns nothing; set warm_start.steps=0" in refused("--debug-rollout-only")
    assert "no trajectories.jsonl; give the folder of a run" in refused("--debug-train-only", tmp_path)
    both = program(*base, "--debug-rollout-only", "--debug-train-only", run)
    assert both.code == 2 and "not allowed with argument" in both.err
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "images").symlink_to(run / "images")
    (broken / "trajectories.jsonl").write_text("{}\n")
    assert "line 1 cannot be used (ValueError: step: Field required)" in refused("--debug-train-only", broken)
    (broken / "trajectories.jsonl").write_text("")
    assert "has no recorded step below train.steps=3" in refused("--debug-train-only", broken)


def test_an_image_that_was_changed_is_noticed(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    (copied / "images").mkdir(parents=True)
    (copied / "trajectories.jsonl").symlink_to(run / "trajectories.jsonl")
    for file in (run / "images").iterdir():
        Pillow.new("RGB", Pillow.open(file).size, "white").save(copied / "images" / file.name)
    with pytest.raises(DataError, match="is not the image that was recorded"):
        list(Recorded(copied, special_of(run), 2).steps())
