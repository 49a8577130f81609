"""Environments by name: what is made, and how a mistake in the configuration is told."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.common.registry import GAMES
from npu_vlrl.config import EnvironmentConfig
from npu_vlrl.types import EpisodeStatus, Task
from npu_vlrl.workflow.environments import environments
from tests.support import corridor
from tests.support.corridor import Corridor

CORRIDOR = f"{corridor.__file__}:game"


def make(**config: Any) -> Any:
    return environments(EnvironmentConfig(**{"name": CORRIDOR, **config})).new


def refusal(**config: Any) -> str:
    with pytest.raises(ValueError) as error:
        make(**config)
    return str(error.value)


def test_a_users_game_is_made_anew_for_each_episode() -> None:
    new = make(options={"length": 7, "toll": 1}, max_actions=1)
    first, second = new(), new()
    assert first.game is not second.game
    assert (first.game.own.length, first.game.own.toll) == (7, 1.0)
    (message,) = asyncio.run(first.reset(Task("t", (), None, "x", {"seed": 3})))
    assert message.text.startswith(Corridor.rules)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "sokobann"}, "unknown environment 'sokobann'; did you mean 'sokoban'? (known: "),
        ({"name": "visual-qa"}, "unknown environment 'visual-qa'; did you mean 'visual_qa'? (known: "),
        (
            {"options": {"lenght": 5}},
            f"unknown option of '{CORRIDOR}': 'lenght'; did you mean 'length'? (known: length",
        ),
        ({"options": {"length": "long"}}, "options.length: Input should be a valid integer"),
        ({"options": {"length": 4.5, "toll": []}}, "options.toll: Input should be a valid number"),
        ({"options": {"length": 2}}, "length is 2; a corridor has at least 3 cells"),
        ({"separator": "ai"}, "must be different words, regardless of case, and not hold the separator 'ai'"),
        ({"answer_tag": "think"}, "cannot be told apart; choose another answer_tag"),
        ({"name": "nowhere/mine.py:game"}, "there is no file"),
        ({"name": f"{corridor.__file__}:gamee"}, "has no plain function 'gamee'"),
    ],
)
def test_mistakes_are_told_before_the_first_episode(config: dict[str, Any], message: str) -> None:
    assert message in refusal(**config)


def test_an_option_that_must_be_given_is_told() -> None:
    assert "options.id: Missing required keyword only argument" in refusal(name="gymnasium")


@pytest.mark.parametrize("name", ["sokoban", "frozenlake"])
def test_the_games_of_the_package_are_solved_by_their_solutions(name: str) -> None:
    new = make(name=name, format="no_think", max_actions=1)
    for seed in range(3):
        env = new()
        task = Task("t", (), None, name, {"seed": seed})
        (opening,) = asyncio.run(env.reset(task))
        assert all(action in opening.text for action in env.game.actions) and len(opening.images) == 1
        solution = env.game.solution()
        states = {env.state_key()}
        for action in solution:
            step = asyncio.run(env.step(f"<answer>{action.upper()}</answer>", ()))
            assert step.messages[0].text == f"Done: {action}.\n"
            states.add(env.state_key())
            assert (step.status is None) == (len(states) <= len(solution))
        assert step.status is EpisodeStatus.SOLVED and len(states) == len(solution) + 1


def test_the_game_of_the_documentation_is_played(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    (code,) = re.findall(r"```python\n# my_game\.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_game.py").write_text(code)
    env = make(name=f"{tmp_path / 'my_game.py'}:game", options={"length": 7})()
    asyncio.run(env.reset(Task("t", (), None, "x", {"seed": 0})))
    steps = [asyncio.run(env.step(f"<think>go</think><answer>{a}</answer>", ())) for a in env.game.solution()]
    assert [step.status for step in steps] == [None, None, EpisodeStatus.SOLVED]
    assert [step.reward for step in steps] == pytest.approx([0.4, 0.4, 1.4])


def test_all_known_games_are_named() -> None:
    told = refusal(name="qqqqqq")
    assert told == f"unknown environment 'qqqqqq' (known: {', '.join(sorted(['visual_qa', *GAMES]))})"


def test_a_file_that_cannot_be_imported_is_told_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def game():\n    return 1 / 0\nx = y\n")
    assert "NameError: name 'y' is not defined" in refusal(name=f"{tmp_path / 'mine.py'}:game")
