"""A game that changes the working directory does not move the run."""

import json
import os
from pathlib import Path

import pytest
import torch

from npu_vlrl.config import load_config
from npu_vlrl.report.absolute_paths import rooted
from npu_vlrl.train_loop import train

torch.set_num_threads(1)

GAME = """
import os
from pathlib import Path
import numpy as np
from npu_vlrl.workflow.environments.game import Move

class Walker:
    actions = ("a", "b")
    rules = "Say a or b."
    def start(self, seed):
        os.chdir(Path(__file__).parent / "elsewhere")
    def act(self, action):
        return Move({"reward": 1.0 if action == "a" else 0.0}, action == "a", True)
    def picture(self):
        return np.zeros((56, 56, 3), np.uint8)
    def state_key(self):
        return "s"
    def solution(self):
        return ["a"]

def make():
    return Walker()
"""

CONFIG = """
model: {path: "tiny:qwen2_5_vl"}
data: {train: {generator: episodes}}
environment: {name: "game.py:make"}
workflow: {max_turns: 1, turn_tokens: 4, context_tokens: 400}
rollout: {groups: 1, group_size: 2}
train: {threads: 1, steps: 1}
evaluation: {tasks: 1}
run: {dir: runs/walk}
"""


def test_a_game_that_walks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "walk.yaml").write_text(CONFIG)
    train(load_config("walk.yaml"))
    assert Path.cwd() == tmp_path / "elsewhere" and os.listdir(".") == []
    made = {path.name for path in (tmp_path / "runs" / "walk").iterdir()}
    assert {"config.yaml", "checkpoints", "export", "metrics.jsonl", "summary.json", "inputs.json"} <= made
    monkeypatch.chdir(tmp_path)
    assert load_config("runs/walk/config.yaml").run.dir == "runs/walk"  # as it was written
    assert list(json.loads(Path("runs/walk/inputs.json").read_text())["sha256"]["code"]) == ["game.py"]
    train(load_config("walk.yaml", ["run.if_exists=resume", "train.steps=2"]))
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"walk"} and os.listdir(".") == []


def test_which_paths_begin_at_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    Path("a.yaml").write_text(
        "model: {path: models/a}\ndata: {train: {path: d/a.jsonl}, eval: {generator: arrow}}\n"
        "workflow: {name: 'w.py:W', tools: [look, 't/t.py:f', '~/u.py:g']}\n"
        "reward: {rule: weighted, options: {terms: {a: {rule: 'r.py:f', weight: 1}, b: {rule: tagged, weight: 0}}}}\n"
    )
    given = load_config("a.yaml")
    found, at = rooted(given), str(tmp_path)
    assert (found.run.dir, found.model.path) == (f"{at}/runs/latest", f"{at}/models/a")
    assert (found.data.train.path, found.data.eval) == (f"{at}/d/a.jsonl", given.data.eval)
    assert found.workflow.name == f"{at}/w.py:W"
    assert found.workflow.tools == ("look", f"{at}/t/t.py:f", "/home/me/u.py:g")
    assert found.reward.rule == "weighted"
    assert found.reward.options == {
        "terms": {"a": {"rule": f"{at}/r.py:f", "weight": 1}, "b": {"rule": "tagged", "weight": 0}}
    }
    assert rooted(found) == found
    Path("b.yaml").write_text(CONFIG)
    tiny = rooted(load_config("b.yaml"))
    assert (tiny.model.path, tiny.environment.name) == ("tiny:qwen2_5_vl", f"{at}/game.py:make")
