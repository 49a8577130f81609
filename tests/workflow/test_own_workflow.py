"""A workflow of the user's own: how it is named, what fails an episode, and whose fault an engine's error is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.config import EnvironmentConfig, WorkflowConfig
from npu_vlrl.types import DataError, EpisodeStatus, Task
from npu_vlrl.workflow.base import Sampling, Workflow
from npu_vlrl.workflow.environments import environments
from npu_vlrl.workflow.workflows import workflow_maker
from tests.support import dialogue
from tests.support.scripted import Script, decode, tiny_renderer

TASK = Task("mine/1", (), None, "mine", {"seed": 3})
ROOT = Path(__file__).parents[2]
OWN = """
from npu_vlrl.types import EpisodeStatus, Trajectory

class Mine:
    def __init__(self, config, renderer, new_environment, schemas, size: int = 1):
        if size < 1:
            raise ValueError(f"size is {size}")
        self.renderer, self.new_environment, self.size = renderer, new_environment, size

    async def run(self, task, session, group, member, sampling):
METHOD
"""


def example(folder: Path) -> str:
    """The workflow of the documents, as a spec."""
    (code,) = re.findall(
        r"```python\n# my_workflow\.py\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL
    )
    (folder / "my_workflow.py").write_text(code)
    return f"{folder / 'my_workflow.py'}:CheckedAnswer"


def own(folder: Path, method: str = "return 1", **options: Any) -> Workflow:
    (folder / "mine.py").write_text(OWN.replace("METHOD", f"        {method}"))
    return make(f"{folder / 'mine.py'}:Mine", **options)


def make(name: str, **options: Any) -> Workflow:
    made = environments(EnvironmentConfig(name=f"{dialogue.__file__}:make"))
    config = WorkflowConfig(name=name, options=options, max_turns=4, context_tokens=2000)
    return workflow_maker(config)(tiny_renderer(), made.new, ())


def run(workflow: Workflow, session: Any) -> Any:
    return asyncio.run(workflow.run(TASK, session, "g", 2, Sampling()))


def test_the_workflow_of_the_documentation_plays_an_episode(tmp_path: Path) -> None:
    session = Script(["a draft", "abcd", "another", "ab"])
    episode = run(make(example(tmp_path), question="Sure?"), session)
    assert (episode.status, episode.id, session.closed) == (EpisodeStatus.TRUNCATED, "g/2", 1)
    assert episode.turn_rewards == (0.0, 1.0, 0.0, 0.5)  # drafts earn nothing
    assert [turn.verdict is None for turn in episode.turns] == [True, False, True, False]
    assert [tuple(turn.context) for turn in episode.turns] == session.contexts
    assert decode(episode.turns[1].context).endswith(
        "a draft<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len({params.seed for params in session.params}) == 4 and dialogue.OPEN == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vision_multitur", {}, "unknown workflow 'vision_multitur'; did you mean 'vision_multiturn'"),
        ("vision_multiturn", {"size": 1}, r"unknown option of 'vision_multiturn': 'size' \(known: none\)"),
        ("FILE:Mine", {"sise": 1}, "unknown option of .*: 'sise'; did you mean 'size'"),
        ("FILE:Mine", {"size": 0}, "^size is 0$"),
        ("FILE:Mine", {"size": "x"}, "TypeError: '<' not supported .*; correct the workflow"),
        ("FILE:Nobody", {}, "has no plain function 'Nobody'"),
        ("FILE:EpisodeStatus", {}, "EpisodeStatus: raised "),
    ],
)
def test_mistakes_are_told_before_the_first_episode(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "mine.py").write_text(OWN.replace("METHOD", "        pass"))
    with pytest.raises(ValueError, match=message):
        make(name.replace("FILE", str(tmp_path / "mine.py")), **options)


def test_what_is_no_workflow_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make(config, renderer, new_environment, schemas):\n    return 1\n")
    with pytest.raises(DataError, match=r"mine\.py:make: its run is no async method; write `async def run"):
        make(f"{tmp_path / 'mine.py'}:make")


FAILED = {
    "bug": (
        "{}['lost']",
        r"^mine/1: \S+mine\.py:Mine: run\(\) raised KeyError: 'lost' \(line 11\); correct the w",
    ),
    "result": ("return None", r"run\(\) returned None; return a Trajectory"),
    "of another": (
        "return Trajectory(task, 'h', member, (), EpisodeStatus.FAILED)",
        r"returned the trajectory 'h/2' for g/2; give the trajectory the task, group and member",
    ),
    "no turns": (
        "return Trajectory(task, group, member, (), EpisodeStatus.SOLVED)",
        "a trajectory without turns; give one Turn for each ACTION",
    ),
    "environment": (
        "await self.new_environment().reset(type(task)('x', (), None, 'd'))",
        r"reset\(task 'x'\) raised KeyErr",
    ),
}


@pytest.mark.parametrize("name", FAILED)
def test_what_it_does_wrong_fails_the_episode(tmp_path: Path, name: str) -> None:
    method, message = FAILED[name]
    session = Script([])
    episode = run(own(tmp_path, method), session)
    assert (episode.status, session.closed) == (EpisodeStatus.FAILED, 1)
    assert re.search(message, str(episode.error)), episode.error
    dialogue.OPEN.clear()


@pytest.mark.parametrize(
    "error", [RuntimeError("engine 1 is gone"), ValueError("no logprobs")], ids=["runtime", "value"]
)
def test_an_error_of_the_engine_stays_one(tmp_path: Path, error: Exception) -> None:
    class Broken:
        async def generate(self, context: Any, sampling: Any) -> Any:
            raise error

        def close(self) -> None: ...

    with pytest.raises(type(error), match=str(error)):
        run(own(tmp_path, "await session.generate((), None)"), Broken())
