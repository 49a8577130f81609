"""An environment of the user's own: what it may give, what is refused at the start, and what fails an episode."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.config import EnvironmentConfig, WorkflowConfig
from npu_vlrl.types import DataError, EpisodeStatus, Generation, StopReason, Task
from npu_vlrl.workflow.environments import Environments, environments
from npu_vlrl.workflow.vision_multiturn import VisionMultiTurnAgenticWorkflow
from tests.support import dialogue
from tests.support.scripted import play, tiny_renderer

TASK = Task("mine/1", (), None, "mine", {"seed": 3})
OWN = """
import numpy as np
from npu_vlrl.types import DataError, Environment, EpisodeStatus, Image, Message, Step, Task, ToolCall, Verdict

RGB = np.zeros((28, 28, 3), np.uint8)
TOLD = (Message("user", (Image(RGB), "go on")),)


class Mine(Environment):
    async def reset(self, task):
        return [Message("user", ("Begin.",))]

    async def step(self, text, history):
        return Step(0.25, TOLD)

    def state_key(self):
        return "here"


class Other(Mine):
METHOD

def make(fault: int = 0):
    return Other()
"""


def own(folder: Path, method: str = "    pass", **config: Any) -> Environments:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(OWN.replace("METHOD", "\n".join(f"    {line}" for line in method.split("\n"))))
    return environments(EnvironmentConfig(name=f"{folder / 'mine.py'}:make", **config))


def workflow(new: Any, **settings: Any) -> VisionMultiTurnAgenticWorkflow:
    return VisionMultiTurnAgenticWorkflow(WorkflowConfig(context_tokens=2000, **settings), tiny_renderer(), new)


def test_texts_images_rewards_states_and_the_end_reach_the_trajectory() -> None:
    made = environments(EnvironmentConfig(name=f"{dialogue.__file__}:make", options={"turns": 3}))
    assert (made.is_game, made.names_states, made.format(None)) == (False, True, None)
    episode = play(workflow(made.new, max_turns=5), ["abcd", "...", "ab"], TASK)
    assert episode.status is EpisodeStatus.TRUNCATED and dialogue.OPEN == []
    assert episode.turn_rewards == (1.0, -0.5, 0.5)
    assert [turn.state for turn in episode.turns] == ["0 said", "1 said", "2 said"]
    assert [turn.invalid for turn in episode.turns] == [False, True, False]
    assert [turn.feedback for turn in episode.turns] == ["You have said 1.", "Speak with letters.", None]
    verdicts = [turn.verdict for turn in episode.turns]
    assert [(v.reward, v.solved, dict(v.terms)) for v in verdicts if v is not None] == [
        (1.0, True, {"length": 1.0, "turns": 0.0}),
        (-0.5, False, {}),  # it gave none, so its reward is the verdict
        (0.5, False, {"length": 0.5, "turns": 2.0}),
    ]
    assert all(type(v.terms[name]) is float for v in verdicts if v is not None for name in v.terms)
    assert [len(segment.images) for segment in episode.turns[-1].context] == [2, 0, 1, 0, 0]


def test_the_environment_is_closed_however_the_episode_ends(tmp_path: Path) -> None:
    made = environments(EnvironmentConfig(name=f"{dialogue.__file__}:make"))
    unusable = Generation((5,), (float("nan"),), (0,), StopReason.END_OF_TURN)
    assert play(workflow(made.new), [unusable], TASK).status is EpisodeStatus.FAILED
    full = WorkflowConfig(context_tokens=3, turn_tokens=2)
    flow = VisionMultiTurnAgenticWorkflow(full, tiny_renderer(), made.new)
    assert play(flow, ["a"], TASK).status is EpisodeStatus.FAILED
    assert dialogue.OPEN == []

    class Stopped:
        async def generate(self, context: Any, sampling: Any) -> Generation:
            raise asyncio.CancelledError

        def close(self) -> None: ...

    from npu_vlrl.workflow.base import Sampling

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(workflow(made.new).run(TASK, Stopped(), "g", 0, Sampling()))
    assert dialogue.OPEN == []


REFUSED = {
    "no methods": ("reset = step = None", r"its actions are None; .* the methods reset and step"),
    "not async": (
        "def step(self, text, history): pass",
        r"its step is no async method; write `async def step\(self, t",
    ),
    "no close": ("close = None", r"its close is no async method; write `async def close\(self\)`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_environment_is_told_before_a_model_is_loaded(tmp_path: Path, name: str) -> None:
    method, message = REFUSED[name]
    with pytest.raises(DataError, match=rf"mine\.py:make: {message}"):
        own(tmp_path, method)


def test_settings_without_a_use_and_wrong_options_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reads any text, and has no use for format, max_actions; leave that out"):
        own(tmp_path, format="no_think", max_actions=1)
    with pytest.raises(ValueError, match="unknown option of .* 'faul'; did you mean 'fault'"):
        own(tmp_path, options={"faul": 1})
    with pytest.raises(ValueError, match="turns is 0; a dialogue has at least 1"):
        environments(EnvironmentConfig(name=f"{dialogue.__file__}:make", options={"turns": 0}))


FAILED = {
    "reset": ("async def reset(self, task): {}['lost']", r"reset\(task 'mine/1'\) raised KeyError: 'lost' \(line 21\)"),
    "refused task": ("async def reset(self, task): raise DataError('no map')", r"^mine/1: no map$"),
    "no opening": (
        "async def reset(self, task): return []",
        r"reset\(task 'mine/1'\) returned no message; give a list",
    ),
    "parts": (
        "async def reset(self, task): return ['hello']",
        r"gave the messages \['hello'\]; give a list of messages",
    ),
    "role": (
        "async def reset(self, task): return [Message('robot', ('x',))]",
        "of the role 'robot'; use system, user, assistant",
    ),
    "no image": (
        "async def step(self, text, history): return Step(0, (Message('user', (RGB,)),))",
        r"step\('a'\) raised ValueError: a part of a Message is a str or an Image, not ndarray; convert it \(line 21\)",
    ),
    "narrow": (
        "async def step(self, text, history): return Step(0, (Message('user', (Image(np.zeros((1, 120000, 3), "
        "np.uint8)),)),))",
        r"step\('a'\): .* too narrow",
    ),
    "step": (
        "async def step(self, text, history): exit(3)",
        r"step\('a'\) raised SystemExit: 3 ",
    ),
    "no step": (
        "async def step(self, text, history): return 1.0, True",
        r"step\('a'\) returned \(1.0, True\); return a",
    ),
    "reward": (
        "async def step(self, text, history): return Step(None, TOLD)",
        "has the reward None; give a finite num",
    ),
    "not finite": (
        "async def step(self, text, history): return Step(float('nan'), TOLD)",
        r"has the reward nan; give a finite number of at most ±1e\+06",
    ),
    "terms": (
        "async def step(self, text, history): return Step(0, TOLD, verdict=Verdict(0, False, terms={'a': 1e9}))",
        "has the term 'a' 1000000000.0; give a finite number",
    ),
    "status": (
        "async def step(self, text, history): return Step(0, TOLD, EpisodeStatus.MAX_TURNS)",
        "ended with .*MAX_TURNS.*; end with one of .*SOLVED",
    ),
    "silent": ("async def step(self, text, history): return Step(0)", "goes on without a message; give messages, or a"),
    "calls": (
        "async def step(self, text, history): return Step(0, TOLD, tool_calls=(ToolCall('f', {'x': RGB}),))",
        "tool calls or results that cannot be used .*; give tuples of ToolCall",
    ),
    "half a pair": (
        r"async def step(self, text, history): return Step(0, (Message('user', ('a\ud800',)),))",
        r"step\('a'\) holds half a surrogate pair",
    ),
    "key": ("def state_key(self): return 1", r"state_key\(\) returned 1; return a text"),
    "close": ("async def close(self): 1 / 0", r"close\(\) raised ZeroDivisionError: division by zero \(line 21\)"),
}


@pytest.mark.parametrize("name", FAILED)
def test_what_it_does_wrong_later_fails_the_episode(tmp_path: Path, name: str) -> None:
    method, message = FAILED[name]
    episode = play(workflow(own(tmp_path, method).new, max_turns=1), ["a"], TASK)
    assert episode.status is EpisodeStatus.FAILED and episode.error is not None
    assert re.search(message, episode.error), episode.error
    assert name == "refused task" or re.match(r"mine/1: \S+mine\.py:make: ", episode.error)


def test_without_a_state_key_states_are_not_named(tmp_path: Path) -> None:
    assert own(tmp_path).names_states
    made = own(tmp_path / "other", "state_key = Environment.state_key")
    assert not made.names_states and made.new().state_key() is None


def test_the_environment_of_the_documentation_is_played(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    (code,) = re.findall(r"```python\n# my_environment\.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_environment.py").write_text(code)
    made = environments(EnvironmentConfig(name=f"{tmp_path / 'my_environment.py'}:make", options={"most": 3}))
    assert made.names_states
    play_all = play(workflow(made.new, max_turns=4), ["none", "so 0", "9", "1"], TASK)
    dots = int(str(play_all.turns[0].state).split()[0])  # from the image: white squares of 12 x 12
    (image,) = (i.image for segment in play_all.turns[0].context for i in segment.images)
    assert 144 * dots == (image.rgb[..., 0] == 255).sum()
    right = play(workflow(made.new, max_turns=4), ["none", "so 0", "9", str(dots)], TASK)
    assert right.status is EpisodeStatus.SOLVED and right.turn_rewards == (-0.1, 0.0, 0.0, 1.0)
    assert [turn.feedback for turn in right.turns] == [
        "Say a number, such as 3.",
        "There are more.",
        "There are fewer.",
        None,
    ]
