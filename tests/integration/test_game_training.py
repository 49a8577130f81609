"""Whole trainings in a game of the user's own: warm start, rollouts, learning, records, resuming."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.config import Config, ConfigError, load_config
from npu_vlrl.tasks.episodes import episode_task
from npu_vlrl.train_loop import train
from npu_vlrl.types import DataError
from tests.support import corridor
from tests.support.corridor import Corridor
from tests.support.learning import tiny_folder
from tests.support.runs import lines, metrics, same_weights

SETTINGS = """
train: {threads: 1, steps: 2}
data: {train: {generator: episodes}}
workflow: {max_turns: 3, turn_tokens: 24, context_tokens: 400, reward_mode: sum}
rollout: {groups: 2, group_size: 3}
algorithm: {kl_coef: 0.05}
optim: {lr: 1.0e-3}
warm_start: {steps: 12, batch: 8, right_share: 0.6, lr: 1.0e-2}
evaluation: {tasks: 4}
run: {checkpoint_every: 1, show_every: 1}
"""


def config(run_dir: Path, **changes: Any) -> Config:
    file = run_dir.parent / "game.yaml"
    environment = {"name": f"{corridor.__file__}:game", "options": {"length": 5}, "format": "no_think"}
    environment |= {"max_actions": 2, "explain": False}
    sections = {"model": {"path": str(tiny_folder())}, "environment": environment, "run": {"dir": str(run_dir)}}
    file.write_text(SETTINGS)
    overrides = [f"{s}.{key}={json.dumps(value)}" for s, values in sections.items() for key, value in values.items()]
    overrides += [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
    return load_config(file, overrides)


def replay(turns: list[dict[str, Any]], seed: int) -> tuple[list[str], list[float], bool]:
    """States, rewards and success of an episode, worked out from its texts with nothing but the game itself."""
    game = Corridor(5, 0.1)
    game.start(seed)
    states, rewards, solved = [], [], False
    for turn in turns:
        states.append(game.state_key())
        reward, text = 0.0, turn["text"]
        pairs = re.findall("<answer>((?:(?!</?answer>).)*)</answer>", text, re.DOTALL)
        names = pairs[-1].split(",") if pairs else []
        names = [name.strip().title() for name in names if name.strip()][:2]
        good = bool(names) and text.strip().startswith("<answer>") and text.strip().endswith("</answer>")
        for name in names:
            if name not in Corridor.actions:
                good = False
                break
            move = game.act(name)
            reward, solved = reward + sum(move.terms.values()), move.solved
            if move.over:
                break
        rewards.append(reward + 0.5 * (good and text.count("<answer>") == 1))
    return states, rewards, solved


@pytest.mark.parametrize("style", ["concat", "individual"])
def test_a_training_in_a_game(tmp_path: Path, style: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    summary = train(config(run, workflow__export_style=style))
    shown = capsys.readouterr().out
    assert "warm start: 12 supervised steps on scripted demonstrations, of which " in shown
    assert "% solve their game; last loss" in shown and "  state     | '" in shown
    assert {"baseline", "final"} <= set(summary)
    steps = [line for line in metrics(run) if "logprob_gap" in line]
    assert len(steps) == 2 and max(line["logprob_gap"] for line in steps) < 1e-4
    episodes = lines(run, "trajectories.jsonl")
    assert {e["status"] for e in episodes} <= {"solved", "lost", "max_turns", "context_full"}
    assert {e["data_source"] for e in episodes} == {"game"}
    groups: dict[str, set[str]] = {}
    for e in episodes:
        groups.setdefault(e["group"].partition("/")[0].rstrip("0123456789."), set()).add(e["task"])
    assert sorted(groups) == ["baseline", "final", "step"] and len(groups["step"]) == 4
    assert groups["baseline"] == groups["final"] and not groups["final"] & groups["step"]
    check_replay(episodes)


def check_replay(episodes: list[dict[str, Any]]) -> None:
    acted = 0
    for e in episodes:
        _, seed, index = e["task"].split("/")
        states, rewards, solved = replay(e["turns"], episode_task("game", int(seed), int(index)).extra["seed"])
        assert [turn["state"] for turn in e["turns"]] == states
        assert [turn["action"]["reward"] for turn in e["turns"]] == pytest.approx(rewards)
        assert [sum(turn["verdict"]["terms"].values()) for turn in e["turns"]] == pytest.approx(rewards)
        assert e["solved"] == solved
        acted += sum(turn["parsed"]["answer"] is not None for turn in e["turns"])
    assert acted > 5, "the warm start taught the policy to act"


def test_a_stopped_training_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole" / "run", tmp_path / "parts" / "run"
    whole.parent.mkdir()
    parts.parent.mkdir()
    train(config(whole))
    train(config(parts, train__steps=1))
    train(config(parts, run__if_exists="resume"))
    trained = [[line for line in metrics(run) if "logprob_gap" in line] for run in (whole, parts)]
    assert trained[0] == trained[1] and len(trained[0]) == 2
    assert same_weights(whole, parts)


def test_a_demonstration_that_does_not_fit_ends_the_run_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"warm_start: the demonstration of game/.*does not fit into workflow\.context"):
        train(config(tmp_path / "run", workflow__context_tokens=30))


def test_a_mistake_in_an_own_game_fails_its_group_and_the_training_goes_on(tmp_path: Path) -> None:
    seed = episode_task("game", 0, 1).extra["seed"]
    source = Path(str(corridor.__file__)).read_text()
    broken = source.replace(
        "rng = random.Random(seed)", f"rng = random.Random({{}}['lost'] if seed == {seed} else seed)"
    )
    assert broken != source
    (tmp_path / "broken.py").write_text(broken)
    line = broken[: broken.index("['lost']")].count("\n") + 1
    name = f"{tmp_path / 'broken.py'}:game"
    train(config(tmp_path / "run", environment__name=name, warm_start__steps=0, evaluation__tasks=2))
    assert [m["failed_groups"] for m in metrics(tmp_path / "run") if "failed_groups" in m] == [1, 0]
    errors = {e["error"] for e in lines(tmp_path / "run", "trajectories.jsonl") if e["status"] == "failed"}
    assert errors == {f"game/0/1: {name}: start({seed}) raised KeyError: 'lost' (line {line}); correct the game"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment__options": {"lenght": 7}}, "environment: unknown option of .* 'lenght'; did you mean 'length'"),
        ({"environment__options": {"length": 1}}, "environment: length is 1; a corridor has at least 3 cells"),
        ({"environment__name": "frozenlak"}, "environment: unknown environment 'frozenlak'; did you mean 'frozenlake'"),
    ],
)
def test_a_wrong_environment_is_told_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(config(tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()
