"""What is recorded and shown of the turns of a game."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.config import Config
from npu_vlrl.report.console import ConsoleReport
from npu_vlrl.report.run_folder import RunFolder
from npu_vlrl.types import EpisodeStatus, Task, Trajectory
from npu_vlrl.workflow.environments.formats import make_format
from npu_vlrl.workflow.environments.game import GameEnvironment
from npu_vlrl.workflow.thought import UNFINISHED_FEEDBACK
from npu_vlrl.workflow.vision_multiturn import VisionMultiTurnAgenticWorkflow
from tests.support.corridor import Corridor
from tests.support.scripted import play, tiny_renderer

LINES = ["<think>a\x1b[2J</think><answer>Wait</answer>", "<think>b", "<answer>Left</answer>"]
SEED = next(s for s in range(100) if (g := Corridor(5, 0.5)).start(s) is None and (g.place, g.goal) == (1, 4))


def config(folder: Path) -> Config:
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": {"generator": "episodes"}}}
    return Config.model_validate(values | {"environment": {"name": "corridor"}, "run": {"dir": str(folder)}})


def episode(settings: Config) -> Trajectory:
    def environment() -> GameEnvironment:
        return GameEnvironment(Corridor(5, 0.5), settings.environment)

    flow = VisionMultiTurnAgenticWorkflow(settings.workflow, tiny_renderer(), environment)
    return play(flow, LINES, Task("corridor/0/3", (), None, "corridor", {"seed": SEED}))


def test_turns_are_recorded_with_state_terms_what_was_said_and_what_was_told(tmp_path: Path) -> None:
    settings = config(tmp_path / "r")
    done = episode(settings)
    assert done.status is EpisodeStatus.LOST
    run = RunFolder(settings)
    run.format = make_format(settings.environment)
    run.begin()
    run.trajectories(0, [done], {})
    record = json.loads((tmp_path / "r" / "trajectories.jsonl").read_text())
    assert (record["status"], record["answer"], record["task"]) == ("lost", None, "corridor/0/3")
    form = "<think>…</think><answer>…</answer>"
    keys = ("state", "verdict", "parsed", "feedback")
    assert [tuple(turn[key] for key in keys) for turn in record["turns"]] == [
        (
            "1 of 5, goal 4",
            {"reward": 0.0, "solved": False, "terms": {"toll": -0.5, "goal": 0.0, "format": 0.5}},
            {"answer": "Wait", "thoughts": {"think": "a\x1b[2J"}, "right": True},
            "Done: Wait.\n",
        ),
        (
            "1 of 5, goal 4",
            {"reward": 0.0, "solved": False, "terms": {"format": 0.0}},
            {"answer": None, "thoughts": {}, "right": False},
            f"Nothing was done. {UNFINISHED_FEEDBACK} Write {form}\n",
        ),
        (
            "1 of 5, goal 4",
            {"reward": -0.5, "solved": False, "terms": {"toll": -0.5, "goal": 0.0, "format": 0.0}},
            {"answer": "Left", "thoughts": {}, "right": False},
            None,  # the episode ended with it
        ),
    ]
    shown = [image["hash"] for turn in record["turns"] for s in turn["new_context"] for image in s.get("images", [])]
    assert len(shown) == 3 and {file.stem for file in (tmp_path / "r" / "images").iterdir()} == set(shown)


def test_the_screen_shows_states_terms_and_what_was_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleReport(1).trajectory(episode(config(tmp_path)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [
        "trajectory g/0: lost",
        "  state     | '1 of 5, goal 4'",
        f"  model     | {LINES[0]!r}   [end_of_turn, reward 0, toll -0.5, goal 0, format 0.5]",
        "  feedback  | 'Done: Wait.\\n'",
        "  state     | '1 of 5, goal 4'",
        f"  model     | {LINES[1]!r}   [end_of_turn, reward 0, format 0]",
        f"  feedback  | 'Nothing was done. {UNFINISHED_FEEDBACK} Write <think>…</think><answer>…</answer>\\n'",
        "  state     | '1 of 5, goal 4'",
        f"  model     | {LINES[2]!r}   [end_of_turn, reward -0.5, toll -0.5, goal 0, format 0]",
    ]
