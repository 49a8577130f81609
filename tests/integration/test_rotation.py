"""The rotation task as a user meets it: photographs to files, episodes with the rotate tool, two steps of training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from npu_vlrl.config import load_config
from npu_vlrl.data.records import load_tasks
from npu_vlrl.tasks.photo import load_photos
from npu_vlrl.tasks.rotation.data import turned
from npu_vlrl.types import EpisodeStatus, Step
from npu_vlrl.workflow.environments.visual_qa import VisualQA
from npu_vlrl.workflow.rewards import make_judge
from npu_vlrl.workflow.tools import Toolbox
from tests.support.program import program, records

ROOT = Path(__file__).parents[2]
PHOTOS = ROOT / "npu_vlrl/tasks/photos"
CONFIG = ROOT / "configs/rotation_tiny.yaml"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rotation")
    made = program("data", "rotation", "--photos", PHOTOS, "--out", folder, "--size", 56, "--per-photo", 2)
    assert (made.code, made.err) == (0, "")
    assert made.out == "photos: 4, train: 6 rows, test: 2 rows\nequal to another: 0\nskipped: 0\n"
    return folder


def angles(data: Path, split: str) -> dict[str, float]:
    """By task."""
    infos = [row["extra_info"] for row in pq.read_table(data / f"{split}.parquet").to_pylist()]
    return {f"{split}/{info['id']}": info["angle"] for info in infos}


def test_two_steps_from_the_packaged_photos(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    paths = [f"data.{kind}.path={data}/{split}.parquet" for kind, split in (("train", "train"), ("eval", "test"))]
    small = ["train.steps=2", "rollout.groups=3", "workflow.turn_tokens=8", "workflow.max_turns=2"]
    done = program("train", "--config", CONFIG, "--run-dir", run, *paths, *small)
    assert (done.code, done.err) == (0, "")
    episodes = records(run, "trajectories.jsonl")
    golds = angles(data, "train") | angles(data, "test")
    assert {e["task"] for e in episodes if e["group"].startswith("step")} == angles(data, "train").keys()
    assert {e["task"] for e in episodes} == golds.keys()
    assert all(float(e["answer"]) == golds[e["task"]] and e["data_source"] == "rotation" for e in episodes)
    steps = [m for m in records(run, "metrics.jsonl") if "logprob_gap" in m]
    assert [m["step"] for m in steps] == [0, 1] and max(m["logprob_gap"] for m in steps) < 1e-4
    assert {m["skipped_records"] for m in steps} == {0}
    check_first_images(run, data, episodes)
    check_numbers_of_tokens(episodes, steps)


def check_numbers_of_tokens(episodes: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """What the learner made of each token is recorded beside what the engine said of it, and in training only."""
    noted = ("advantages", "learner_logprobs", "entropy")
    gaps: dict[int, float] = {}
    entropies: dict[int, list[float]] = {}
    for episode in episodes:
        for turn, action in enumerate(turn["action"] for turn in episode["turns"]):
            if not episode["group"].startswith("step"):
                assert not set(noted) & set(action)
                continue
            assert {len(action[name]) for name in noted} == {len(action["token_ids"])}
            mean = episode["advantages"][episode["id"]][turn]
            assert np.mean(action["advantages"]) == pytest.approx(mean, abs=1e-5)
            pairs = zip(action["logprobs"], action["learner_logprobs"], strict=True)
            gap = max(abs(engine - learner) for engine, learner in pairs)
            gaps[episode["step"]] = max(gap, gaps.get(episode["step"], 0.0))
            entropies.setdefault(episode["step"], []).extend(action["entropy"])
    assert [gaps[m["step"]] for m in steps] == pytest.approx([m["logprob_gap"] for m in steps], abs=2e-6)
    assert [np.mean(entropies[m["step"]]) for m in steps] == pytest.approx([m["entropy"] for m in steps], rel=1e-4)


def check_first_images(run: Path, data: Path, episodes: list[dict[str, Any]]) -> None:
    """The image in the run folder is the photo, turned clockwise by the recorded answer."""
    names = {f"train/{row['extra_info']['id']}": row["extra_info"]["photo"] for row in _rows(data)}
    photos = dict(zip(("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"), load_photos(), strict=True))
    played = [e for e in episodes if e["task"] in names]
    for episode in played:
        (image,) = episode["turns"][0]["new_context"][0]["images"]
        with Pillow.open(run / "images" / f"{image['hash']}.png") as file:
            pixels = np.asarray(file)
        photo = photos[names[episode["task"]]]
        assert np.array_equal(pixels, turned(photo, float(episode["answer"]), 56).rgb)
        assert not np.array_equal(pixels, turned(photo, float(episode["answer"]) + 1, 56).rgb)


def _rows(data: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(data / "train.parquet").to_pylist())


def test_an_episode_that_looks_first(data: Path) -> None:
    """Of the sample configuration: rotate by the answer, see the photo upright, say the answer."""
    config = load_config(CONFIG)
    toolbox = Toolbox(config.workflow.tools)
    judge = make_judge(config.reward.rule, config.reward.options, workers=1, deadline_s=5)
    tasks = load_tasks(data / "train.parquet")
    for task in map(tasks.__getitem__, range(len(tasks))):
        angle = float(task.answer or "nan")

        async def say(*texts: str, task: Any = task) -> list[Step]:
            environment = VisualQA(config.workflow, judge, toolbox)
            await environment.reset(task)
            return [await environment.step(text, ()) for text in texts]

        rotate = f'<tool_call>{{"name": "rotate", "arguments": {{"angle": {angle}, "expand": false}}}}</tool_call>'
        called, answered = asyncio.run(say(rotate, f"<answer>{task.answer}</answer>"))
        assert (called.reward, called.status) == (-0.05, None)
        photo = load_photos()[("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg").index(task.extra["photo"])]
        middle = np.s_[14:42, 14:42]
        shown = called.tool_results[0].images[0].rgb[middle].astype(float)
        assert np.abs(shown - turned(photo, 0, 56).rgb[middle]).mean() < 6
        assert np.abs(task.images[0].rgb[middle].astype(float) - turned(photo, 0, 56).rgb[middle]).mean() > 6
        assert (answered.reward, answered.status) == (1.0, EpisodeStatus.SOLVED)
        (off,) = asyncio.run(say(f"<answer>{(angle + 90) % 360:g}</answer>"))
        assert off.reward == pytest.approx(0.5) and off.status is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--angles", "some"], "--angles must be continuous, or multiples-of K, got 'some'"),
        (["--angles", "multiples-of"], "--angles must be continuous, or multiples-of K, got 'multiples-of'"),
        (["--angles", "multiples-of", "-90"], "--angles must be continuous, or multiples-of K, got 'multiples-of -90'"),
        (["--angles", "multiples-of", "7"], "angles must be multiples of a whole number of degrees that divides 360"),
        (["--size", "20"], "size must be at least 28 pixels, got 20"),
        (["--per-photo", "0"], "per_photo must be at least 1, got 0"),
        (["--eval-share", "1"], "eval_share must be at least 0 and below 1, got 1.0"),
        (["--photos", "/no/such"], "/no/such: there is no such folder"),
        (["--out", "/dev/null/x"], "--out: [Errno 20] Not a directory"),
    ],
)
def test_words_that_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    done = program("data", "rotation", "--photos", PHOTOS, "--out", tmp_path / "out", *words)
    assert done.refused().startswith(message)
    assert not (tmp_path / "out").exists()


def test_what_is_left_out_is_named_without_acting_on_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.png").write_bytes((PHOTOS / "chelsea.png").read_bytes())
    (folder / "b.png").write_bytes((PHOTOS / "chelsea.png").read_bytes())
    (folder / "\x1b[31mred.png").touch()
    words = ["--angles", "multiples-of", "90", "--eval-share", "0"]
    done = program("data", "rotation", "--photos", folder, "--out", tmp_path / "out", *words)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:2] == ["photos: 1, train: 1 rows, test: 0 rows", "equal to another: 1"]
    assert lines[2] in ("  a.png: b.png", "  b.png: a.png")
    assert lines[3] == "skipped: 1"
    assert lines[4].startswith("  \\x1b[31mred.png: the image has zero bytes") and "\x1b" not in done.out
    assert set(angles(tmp_path / "out", "train").values()) <= {0.0, 90.0, 180.0, 270.0}
