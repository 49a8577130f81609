"""A game of the user's own that is wrong: who is named, what is refused at the start, and what fails an episode."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from npu_vlrl.config import EnvironmentConfig, WorkflowConfig
from npu_vlrl.types import DataError, EpisodeStatus, Image, Task
from npu_vlrl.workflow.environments import GameEnvironment, environments
from npu_vlrl.workflow.vision_multiturn import VisionMultiTurnAgenticWorkflow
from tests.support.scripted import play, tiny_renderer

GAME = """
import numpy as np
import PIL.Image
from npu_vlrl.types import DataError, Image
from npu_vlrl.workflow.environments.game import Move

RGB = np.zeros((28, 56, 3), np.uint8)


class Mine:
    actions = ("Left", "Right")
    rules = "Go."

    def start(self, seed):
        self.place = 0

    def act(self, action):
        self.place += 1
        return Move({"step": -0.1}, self.place > 1)

    def picture(self):
        return Image(RGB)

    def state_key(self):
        return str(self.place)

    def solution(self):
        return ["Right"]


class Changed(Mine):
%s


def game(fault: int = 0):
%s
    return Changed()
"""
TASK = Task("mine/1", (), None, "mine", {"seed": 3})


def own_game(folder: Path, method: str, function: str = "pass") -> Any:
    folder.mkdir(exist_ok=True)
    file = folder / "mine.py"
    file.write_text(GAME % ("\n".join(f"    {line}" for line in method.splitlines()), f"    {function}"))
    image = io.BytesIO()
    PIL.Image.effect_noise((40, 40), 90).save(image, "PNG")
    (folder / "mine.py.png").write_bytes(image.getvalue()[:-600])
    return environments(EnvironmentConfig(name=f"{file}:game", format="no_think")).new


REFUSED = {
    "no actions": ("actions = ()", r"its actions are \(\); write a tuple of words"),
    "one string": ("actions = 'Left'", "its actions are 'Left'; write a tuple of words"),
    "numbers": ("actions = (0, 1)", r"its actions are \(0, 1\)"),
    "no rules": ("rules = None", "its rules are None; write a text"),
    "start": ("def start(self, seed): {}['lost']", r"start\(0\) raised KeyError: 'lost' \(line 32\); correct the game"),
    "exit": ("def start(self, seed): raise SystemExit(3)", r"start\(0\) raised SystemExit: 3"),
    "nothing shown": ("def picture(self): pass", r"picture\(\): an image is an Image, .* not NoneType"),
    "floats": ("def picture(self): return RGB / 255", r"picture\(\): an image is .* not float64 \[28, 56, 3\]"),
    "narrow": ("def picture(self): return np.zeros((1, 120000, 3), np.uint8)", "picture.*: .* too narrow"),
    "cut file": (
        "def picture(self): return PIL.Image.open(__file__ + '.png')",
        r"picture\(\) raised (OSError|SyntaxError): .*; correct the game",
    ),
    "rules that fail": ("rules = property(lambda self: 1 / 0)", "its rules raised ZeroDivisionError"),
    "key": ("def state_key(self): return [1]", r"state_key\(\) returned \[1\]; return a text"),
    "no key": ("state_key = None", r"state_key\(\) raised TypeError: 'NoneType' object is not callable"),
    "solution": ("def solution(self): return ['Up']", r"solution\(\) names 'Up', which is none of .* Left, Right"),
    "word": ("def solution(self): return 'Left'", r"solution\(\) returned 'Left'; return a list"),
    "array": ("def solution(self): return RGB", r"solution\(\) returned array\(.{1,80}; return a list"),
    "no act": ("act = None", "it has no method act; write act"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_game_cannot_do_is_told_before_a_model_is_loaded(tmp_path: Path, name: str) -> None:
    method, message = REFUSED[name]
    with pytest.raises(DataError, match=rf"mine\.py:game: {message}"):
        own_game(tmp_path, method)


def test_the_function_of_the_file_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"mine\.py:game: raised ZeroDivisionError: division by zero \(line 36\); correct"
    ):
        own_game(tmp_path, "pass", "1 / 0")
    with pytest.raises(ValueError, match="^fault is 0$"):  # a value that it refuses is its own message
        own_game(tmp_path / "other", "pass", "raise ValueError('fault is 0')")


@pytest.mark.parametrize("kind", ["object()", "Nowhere", "np.ndarray"])
def test_types_of_options_that_cannot_be_checked_are_told(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine.py").write_text(f"import numpy as np\n\ndef game(size: '{kind}' = 1):\n    pass\n")
    with pytest.raises(
        ValueError, match=r"mine\.py:game: the types of its options cannot be checked \(.*; use int, flo"
    ):
        environments(EnvironmentConfig(name=f"{tmp_path / 'mine.py'}:game"))


FAILED = {
    "bug": (
        "def act(self, action): {}['lost']",
        r"act\('Left'\) raised KeyError: 'lost' \(line 32\); correct the game",
    ),
    "no move": ("def act(self, action): return 1.0", r"act\('Left'\) returned 1.0; return a Move"),
    "terms": (
        "def act(self, action): return Move([1.0])",
        r"act\('Left'\) returned a Move that cannot be .*; give terms as names",
    ),
    "not a number": ("def act(self, action): return Move({'step': None})", "a Move that cannot be used .*; give terms"),
    "not finite": ("def act(self, action): return Move({'step': np.nan})", "which is not finite; give finite numbers"),
    "too much": ("def act(self, action): return Move({'a': 1e308})", r"earned {'a': 1e\+308}; give at most 1e\+06 for"),
    "half a pair": (
        r"def act(self, action): return Move({'a\ud800': 1})",
        "of a term holds half a surrogate pair",
    ),
    "bad message": (r"def act(self, action): raise ValueError('\udc00')", r"raised ValueError: .udc00"),
    "unclear": ("def act(self, action): return Move(over=RGB > 0)", "a Move that cannot be used"),
}


@pytest.mark.parametrize("name", FAILED)
def test_what_a_game_does_wrong_later_fails_the_episode(tmp_path: Path, name: str) -> None:
    method, message = FAILED[name]
    new = own_game(tmp_path, method)
    workflow = VisionMultiTurnAgenticWorkflow(WorkflowConfig(context_tokens=2000), tiny_renderer(), new)
    episode = play(workflow, ["<answer>Left</answer>"] * 2, TASK)
    assert episode.status is EpisodeStatus.FAILED
    with pytest.raises(DataError, match=rf"^mine/1: .*mine\.py:game: .*{message}"):
        raise DataError(str(episode.error))


@pytest.mark.parametrize("given", ["Image(RGB)", "RGB", "PIL.Image.fromarray(RGB)"])
def test_images_of_any_kind_are_shown(tmp_path: Path, given: str) -> None:
    env = own_game(tmp_path, f"def picture(self): return {given}")()
    (message,) = asyncio.run(env.reset(TASK))
    assert message.images == (Image(np.zeros((28, 56, 3), np.uint8)),)


def test_numbers_of_numpy_can_be_recorded(tmp_path: Path) -> None:
    act = (
        "def act(self, action): return Move({'step': np.float32(-0.5), 'n': np.int64(2)}, np.bool_(True), np.bool_(0))"
    )
    env = own_game(tmp_path, act)()
    assert isinstance(env, GameEnvironment)
    asyncio.run(env.reset(TASK))
    step = asyncio.run(env.step("<answer>left</answer>", ()))
    assert step.status is EpisodeStatus.SOLVED and step.verdict is not None
    assert json.loads(json.dumps([step.reward, step.verdict.solved, dict(step.verdict.terms)])) == [
        2.0,
        True,
        {"step": -0.5, "n": 2.0, "format": 0.5},
    ]
