"""Trainings with an environment and a workflow of the user's own: learning, records, states, failures, repeating."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.config import Config, ConfigError, load_config
from npu_vlrl.tasks.episodes import episode_task
from npu_vlrl.train_loop import train
from npu_vlrl.types import SegmentKind
from tests.support import dialogue
from tests.support.learning import tiny_folder
from tests.support.runs import lines, metrics, same_weights
from tests.workflow.test_own_workflow import example

SETTINGS = """
train: {threads: 1, steps: 2}
data: {train: {generator: episodes}}
workflow: {max_turns: 4, turn_tokens: 8, context_tokens: 200, reward_mode: sum}
rollout: {groups: 2, group_size: 3}
algorithm: {preset: gigpo, kl_coef: 0.05}
optim: {lr: 1.0e-3}
evaluation: {tasks: 2}
run: {show_every: 1}
"""
NAME = f"{dialogue.__file__}:make"


def config(run_dir: Path, **changes: Any) -> Config:
    file = run_dir.parent / "own.yaml"
    file.write_text(SETTINGS)
    given = {"model__path": str(tiny_folder()), "run__dir": str(run_dir), "environment__name": NAME} | changes
    return load_config(file, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in given.items()])


def check_replay(episode: dict[str, Any]) -> None:
    """States, rewards and ends by the rules of `dialogue`, worked out from the texts alone."""
    turns = episode["turns"]
    for said, turn in enumerate(turns):
        text, spoken = turn["text"], any(letter.isalpha() for letter in turn["text"])
        assert (turn["state"], turn["invalid"]) == (f"{said} said", not spoken)
        assert turn["action"]["reward"] == (len(text) % 5 / 4 if spoken else -0.5)
        assert turn["verdict"]["terms"] == ({"length": len(text) % 5 / 4, "turns": said} if spoken else {})
        assert turn["parsed"] is None
    assert episode["status"] == ("truncated" if len(turns) == 2 else "context_full")


def test_a_training_in_an_own_environment_repeats_and_survives_its_mistakes(tmp_path: Path) -> None:
    seed = episode_task("make", 0, 1).extra["seed"]
    source = Path(str(dialogue.__file__)).read_text()
    broken = source.replace(
        "        self.said = 0\n", f"        self.said = {{}}['lost'] if self.rng_of(task) == {seed} else 0\n"
    )
    broken = broken.replace(
        "    def state_key",
        '    def rng_of(self, task: Task) -> int:\n        return int(task.extra["seed"])\n\n    def state_key',
    )
    (tmp_path / "broken.py").write_text(broken)
    name, line = f"{tmp_path / 'broken.py'}:make", broken[: broken.index("['lost']")].count("\n") + 1
    runs = tmp_path / "a" / "run", tmp_path / "b" / "run"
    for run in runs:
        run.parent.mkdir()
        train(config(run, environment__name=name))
    steps = [[found for found in metrics(run) if "logprob_gap" in found] for run in runs]
    assert steps[0] == steps[1] and same_weights(*runs)
    assert [step["failed_groups"] for step in steps[0]] == [1, 0]
    assert max(step["logprob_gap"] for step in steps[0]) < 1e-4
    assert steps[0][1]["grad_norm"] > 0
    failed = [e for e in lines(runs[0], "trajectories.jsonl") if e["status"] == "failed"]
    wrong = f"{name}: reset(task 'make/0/1') raised KeyError: 'lost' (line {line}); correct the environment"
    assert {e["error"] for e in failed} == {f"make/0/1: {wrong}"} and len(failed) == 3
    played = [e for e in lines(runs[0], "trajectories.jsonl") if e["status"] != "failed"]
    assert len(played) == 3 + 6 + 2 * 2
    for episode in played:
        check_replay(episode)


def test_a_training_with_an_own_workflow(tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = {"workflow__name": example(tmp_path), "workflow__options": {"question": "Sure?"}}
    train(config(run, **own, train__steps=1, algorithm__preset="grpo"))
    (step,) = [found for found in metrics(run) if "logprob_gap" in found]
    assert step["logprob_gap"] < 1e-4 and step["status/failed"] == 0 and step["turns"] == 4
    for episode in lines(run, "trajectories.jsonl"):
        assert [turn["verdict"] is None for turn in episode["turns"]] == [True, False, True, False]
        kinds = [segment["kind"] for turn in episode["turns"] for segment in turn["new_context"]]
        assert kinds == [SegmentKind.PROMPT.value, *[SegmentKind.OBSERVATION.value] * 3]
    assert dialogue.OPEN == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment__options": {"turn": 7}}, "environment: unknown option of .* 'turn'; did you mean 'turns'"),
        ({"environment__format": "no_think"}, "environment: .* reads any text, and has no use for format"),
        ({"warm_start__steps": 1}, "warm_start.steps: environment.name=.* shows no solutions; set warm_start.steps=0"),
        ({"workflow__name": "nowhere.py:Mine"}, "workflow: there is no file .*nowhere.py"),
        ({"workflow__options": {"x": 1}}, "workflow: unknown option of 'vision_multiturn': 'x'"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(config(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_gigpo_wants_states(tmp_path: Path) -> None:
    source = Path(str(dialogue.__file__)).read_text()
    (tmp_path / "stateless.py").write_text(source.replace("def state_key", "def other"))
    with pytest.raises(ConfigError, match="does not name them; give it a method state_key or another algorithm.preset"):
        train(config(tmp_path / "run", environment__name=f"{tmp_path / 'stateless.py'}:make"))
