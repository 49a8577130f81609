"""Scripted demonstrations."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest

from npu_vlrl.config import EnvironmentConfig
from npu_vlrl.rollout.demonstrations import ScriptedSession, played
from npu_vlrl.tasks.turned import DIRECTIONS, script
from npu_vlrl.types import DataError, SamplingParams, StopReason, Task
from npu_vlrl.workflow.environments.formats import THOUGHTS, make_format
from npu_vlrl.workflow.environments.game import GameEnvironment
from npu_vlrl.workflow.tools import parse_tool_calls
from npu_vlrl.workflow.tools.forms import HERMES
from tests.support.corridor import Corridor
from tests.support.models import loaded, tiny_folder

TASK = Task("t", (), "left", "test")


def test_a_script_looks_first_and_gives_no_answer_twice() -> None:
    for seed in range(40):
        look, *answers = script(TASK, 0.3, random.Random(seed), tries=4)
        assert [call.name for call in parse_tool_calls(look).calls] == ["look"]
        assert sorted(answers) == sorted(f"<answer>{choice}</answer>" for choice in DIRECTIONS)


def test_a_script_knows_the_answer_as_often_as_asked() -> None:
    rng = random.Random(0)
    first = Counter(script(TASK, 0.25, rng, tries=1)[1] for _ in range(4000))
    # five standard deviations of a binomial count around its mean
    assert first["<answer>left</answer>"] == pytest.approx(1000, abs=140)
    assert all(first[f"<answer>{wrong}</answer>"] == pytest.approx(1000, abs=140) for wrong in ("up", "right", "down"))
    assert script(TASK, 1.0, rng, tries=1) == [HERMES.write("look", {}), "<answer>left</answer>"]
    assert "<answer>left</answer>" not in script(TASK, 0.0, rng, tries=3)


def test_a_session_recites_and_ends_each_turn() -> None:
    tokenizer = loaded(tiny_folder("qwen3")).tokenizer
    session = ScriptedSession(["up", "<answer>down</answer>"], tokenizer, ends=(5,))
    for expected in ("up", "<answer>down</answer>"):
        generation = asyncio.run(session.generate([], SamplingParams(64)))
        assert generation.token_ids[-1] == 5
        assert tokenizer.decode(list(generation.token_ids[:-1])) == expected
        assert len(generation.logprobs) == len(generation.weight_versions) == len(generation.token_ids)
        assert generation.stop_reason is StopReason.END_OF_TURN
    with pytest.raises(DataError, match="has played its copy of the game to the end, and the episode goes on; make"):
        asyncio.run(session.generate([], SamplingParams(64)))
    session.close()


# --- games -----------------------------------------------------------------------------------------------------------


def config(**changes: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**{"name": "corridor", "format": "no_think", **changes})


def actions(lines: Iterable[str]) -> list[list[str]]:
    return [re.fullmatch("<answer>(.*)</answer>", line)[1].split(",") for line in lines]  # type: ignore[index]


def test_a_demonstrator_that_is_always_right_plays_the_solution() -> None:
    for seed in range(30):
        game = Corridor(9, 0.0)
        game.start(seed)
        solution = game.solution()
        turns = actions(played(Corridor(9, 0.0), seed, config(max_actions=3), 1.0, random.Random(seed)))
        assert [action for turn in turns for action in turn] == solution
        assert all(1 <= len(turn) <= 3 for turn in turns)


def test_turns_take_one_to_max_actions_evenly() -> None:
    lengths = Counter[int]()
    for seed in range(400):
        lines = played(Corridor(41, 0.0), 0, config(max_actions=3), 1.0, random.Random(seed))
        lengths[len(actions(islice(lines, 1))[0])] += 1
    assert all(lengths[n] == pytest.approx(400 / 3, abs=48) for n in (1, 2, 3))  # five standard deviations


def test_the_right_share_of_actions_is_best_and_the_others_are_even() -> None:
    """Where the best action is followed through every state that the demonstrator gets into by its own mistakes."""
    chosen: Counter[str] = Counter()
    for seed in range(500):
        own, rng = Corridor(9, 0.0), random.Random(seed)
        own.start(seed)
        for turn in actions(islice(played(Corridor(9, 0.0), seed, config(), 0.4, rng), 4)):
            for action in turn:
                best = own.solution()[0]
                chosen["best" if action == best else "wait" if action == "Wait" else "back"] += 1
                own.act(action)
    total = sum(chosen.values())
    deviation = 5 * (0.25 * total) ** 0.5
    assert chosen["best"] == pytest.approx(0.4 * total, abs=deviation)
    assert chosen["wait"] == pytest.approx(0.3 * total, abs=deviation)
    assert chosen["back"] == pytest.approx(0.3 * total, abs=deviation)


def test_without_a_solution_all_actions_are_drawn() -> None:
    class Lost(Corridor):
        def solution(self) -> list[str]:
            return []

    lines = islice(played(Lost(99, 0.0), 0, config(max_actions=1), 1.0, random.Random(0)), 300)
    counts = Counter(action for (action,) in actions(lines))
    assert all(counts[action] == pytest.approx(100, abs=41) for action in Corridor.actions)


@pytest.mark.parametrize("name", THOUGHTS)
def test_demonstrations_are_in_the_format_and_name_what_is_played(name: str) -> None:
    settings = config(format=name, answer_tag="ans", end_token="<eoa>", separator=" | ", max_actions=2)
    form = make_format(settings)
    environment, lines = GameEnvironment(Corridor(7, 0.0), settings), []
    task = Task("t", (), None, "corridor", {"seed": 5})
    asyncio.run(environment.reset(task))
    for line in played(Corridor(7, 0.0), 5, settings, 0.5, random.Random(1)):
        parsed = form.parse(line)
        assert parsed.right and set(parsed.thoughts) == set(THOUGHTS[name]) and all(parsed.thoughts.values())
        step = asyncio.run(environment.step(line, ()))
        assert step.verdict is not None and step.verdict.terms["format"] == 0.5
        lines.append(step)
    # the copy and the environment are over at the same time
    assert [step.status is None for step in lines] == [True] * (len(lines) - 1) + [False] and len(lines) > 1
