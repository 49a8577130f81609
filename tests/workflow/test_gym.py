"""Environments of gymnasium as games: one registered here, one of a module, and gymnasium's own."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from npu_vlrl.config import EnvironmentConfig
from npu_vlrl.types import DataError, EpisodeStatus, Task
from npu_vlrl.workflow.environments import environments, gym
from npu_vlrl.workflow.environments.gym import Gym, game

LEFT, RIGHT = 10, 11


class Corridor(gymnasium.Env[np.ndarray, int]):
    """Five cells; the seed says where it starts. The right end earns 1, the left end ends with nothing."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    closed = 0
    resets = 0

    def __init__(self, render_mode: str | None = None, reward: float = 1.0, **changed: Any) -> None:
        self.render_mode, self.reward, self.changed = render_mode, reward, changed
        self.action_space = changed.get("actions", Discrete(2, start=LEFT))
        self.observation_space = changed.get("observations", Box(0, 255, (8, 20, 3), np.uint8))
        self.buffer = np.zeros((8, 20, 3), np.uint8)

    def observed(self) -> np.ndarray:
        self.buffer[:] = 0  # the same array each time, as many environments do
        self.buffer[:, 4 * self.cell : 4 * self.cell + 4] = 255
        return self.changed.get("picture", self.buffer)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        Corridor.resets += 1
        self.cell = int(self.np_random.integers(1, 4))
        return self.observed(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.changed.get("raises"):
            raise KeyError("lost")
        self.cell += {LEFT: -1, RIGHT: 1}[action]
        end = self.cell in (0, 4)
        reward = self.reward * (self.cell == 4)
        return self.observed(), self.changed.get("every", reward), end, False, {}

    def render(self) -> np.ndarray:
        return 255 - self.observed()

    def close(self) -> None:
        Corridor.closed += 1


class Drawn(FrozenLakeEnv):
    """gymnasium's lake, with an image that needs no pygame: a white pixel where the player is."""

    def render(self) -> np.ndarray:
        image = np.zeros((self.nrow, self.ncol, 3), np.uint8)
        image[divmod(int(self.s), self.ncol)] = 255
        return image


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gymnasium.register("Corridor-v0", Corridor, max_episode_steps=6)
    gymnasium.register("Drawn-v0", Drawn)
    monkeypatch.setattr(gym, "_TRIED", set())
    yield
    for name in ("Corridor-v0", "Drawn-v0"):
        del gymnasium.registry[name]


def corridor(**options: Any) -> Gym:
    return game(**{"id": "Corridor-v0", "actions": {"Left": LEFT, "Right": RIGHT}, **options})


def cell(made: Gym) -> int:
    columns = np.flatnonzero(made.picture().rgb[0, :, 0])
    assert len(columns) == 4
    return int(columns[0]) // 4


def start_at(made: Gym, wanted: int) -> None:
    for seed in range(50):
        made.start(seed)
        if cell(made) == wanted:
            return
    raise AssertionError


def started_at(wanted: int, **options: Any) -> Gym:
    made = corridor(**options)
    start_at(made, wanted)
    return made


def test_an_episode_by_hand() -> None:
    made = started_at(2)
    assert made.actions == ("Left", "Right") and made.rules == "You play Corridor-v0."
    first, key = made.picture(), made.state_key()
    move = made.act("Right")
    assert (dict(move.terms), move.solved, move.over, cell(made)) == ({"reward": 0.0}, False, False, 3)
    assert np.flatnonzero(first.rgb[0, :, 0])[0] == 8  # the buffer of the environment was written to, not the image
    assert made.state_key() != key
    made.act("Left")
    assert made.state_key() == key and made.picture() == first
    assert made.solution() is None
    made.act("Right")
    move = made.act("Right")
    assert (dict(move.terms), move.solved, move.over) == ({"reward": 1.0}, True, True)
    with pytest.raises(AssertionError, match="the game is over"):
        made.act("Right")


def test_solved_is_a_return_in_an_episode_that_terminated() -> None:
    lost = [started_at(1).act("Left"), started_at(3, solved_reward=1.5).act("Right")]
    assert [(move.solved, move.over) for move in lost] == [(False, True)] * 2
    assert started_at(3, solved_reward=1.5, arguments={"reward": 2}).act("Right").solved
    made = started_at(1, solved_reward=0.0)
    moves = [made.act(action) for action in ("Right", "Left") * 3]
    assert [move.truncated for move in moves] == [False] * 5 + [True]  # cut off at the six steps it is registered with
    assert not moves[-1].solved and not moves[-1].over
    start_at(made, 1)
    assert not made.act("Right").over


def test_the_return_is_of_one_whole_episode() -> None:
    """Every step earns 1 here."""
    made = started_at(1, solved_reward=3.0, arguments={"every": 1.0})
    moves = [made.act("Right") for _ in range(3)]
    assert [(move.solved, move.over) for move in moves] == [(False, False)] * 2 + [(True, True)]
    start_at(made, 3)
    move = made.act("Right")
    assert (move.solved, move.over) == (False, True)  # what the episode before earned is gone


def test_max_steps_is_counted_anew_in_every_episode() -> None:
    made = corridor(max_steps=2)
    for _ in range(2):
        start_at(made, 2)
        assert [made.act(action).truncated for action in ("Left", "Right")] == [False, True]


def test_a_seed_gives_one_episode() -> None:
    def first(seed: int) -> int:
        made = corridor()
        made.start(seed)
        return cell(made)

    assert [first(seed) for seed in range(20)] == [first(seed) for seed in range(20)]
    assert {first(seed) for seed in range(20)} == {1, 2, 3}


def test_rendered_images_in_place_of_observations() -> None:
    seen, rendered = corridor(), corridor(render=True)
    seen.start(1)
    rendered.start(1)
    assert (rendered.picture().rgb == 255 - seen.picture().rgb).all()


def test_the_lake_of_gymnasium_with_its_meanings_and_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drawn, "get_action_meanings", lambda self: ["Left", "Down", "Right", "Up"], raising=False)
    made = game(id="Drawn-v0", render=True, arguments={"is_slippery": False}, rules="Cross.")
    made.start(0)
    assert (made.actions, made.rules) == (("Left", "Down", "Right", "Up"), "Cross.")
    by_image = made.state_key()
    assert by_image == made.picture().hash
    way = [made.act(action) for action in ("Down", "Down", "Right", "Down", "Right", "Right")]
    assert [sum(move.terms.values()) for move in way] == [0, 0, 0, 0, 0, 1]
    assert way[-1].solved and made.picture().rgb[3, 3].tolist() == [255] * 3
    monkeypatch.setattr(Drawn, "state_key", lambda self: int(self.s), raising=False)
    assert made.state_key() == "15"


def test_meanings_count_from_the_first_number_of_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Corridor, "get_action_meanings", lambda self: ["Back", "On"], raising=False)
    made = started_at(1, actions=None)
    made.act("On")
    assert cell(made) == 2
    monkeypatch.setattr(Corridor, "get_action_meanings", lambda self: ["Back", "On", "Up"])
    with pytest.raises(ValueError, match="action 'Up' is number 12, but they go from 10 to 11"):
        corridor(actions=None)


def test_a_module_registers_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_corridor.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Dark(gymnasium.Env):\n"
        "    action_space = gymnasium.spaces.Discrete(1)\n"
        "    observation_space = gymnasium.spaces.Box(0, 255, (2, 3, 3), np.uint8)\n"
        "    def reset(self, seed=None, options=None): return np.zeros((2, 3, 3), np.uint8), {}\n"
        "    def step(self, action): return self.reset()[0], 1, True, False, {}\n"
        "gymnasium.register('Dark-v0', Dark)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = {"id": "my_corridor:Dark-v0", "actions": {"Wait": 0}}
    environment = environments(EnvironmentConfig(name="gymnasium", options=options, format="no_think")).new()
    (message,) = asyncio.run(environment.reset(Task("t", (), None, "gymnasium", {"seed": 3})))
    assert message.images[0].size == (3, 2) and "You play my_corridor:Dark-v0." in message.text
    step = asyncio.run(environment.step("<answer>wait</answer>", ()))
    assert (step.status, step.reward) == (EpisodeStatus.SOLVED, 1.5)
    del sys.modules["my_corridor"], gymnasium.registry["Dark-v0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "Nowhere-v0"}, "environment Nowhere-v0 cannot be made: NameNotFound"),
        ({"id": "no_such_module:Env-v0"}, "environment no_such_module:Env-v0 cannot be made: ModuleNotFoundError"),
        ({"id": "FrozenLake-v1"}, "FrozenLake-v1: its observations are Discrete(16), not images"),
        ({"arguments": {"observations": Box(0, 1, (8, 20, 3), np.float32)}}, "not images, a Box of uint8"),
        ({"arguments": {"observations": Box(0, 255, (8, 20), np.uint8)}}, "set render=true if it can render"),
        ({"arguments": {"observations": Box(0, 255, (8, 20, 4), np.uint8)}}, "not images"),
        ({"arguments": {"actions": MultiDiscrete([2, 2])}}, "its actions are MultiDiscrete([2 2]); only those of a"),
        ({"actions": None}, "does not name its actions; write e.g. options.actions={Left: 0, Right: 1}"),
        ({"actions": {}}, "options.actions is empty"),
        ({"actions": {"Left": 9}}, "action 'Left' is number 9, but they go from 10 to 11"),
        (
            {"arguments": {"picture": np.zeros((8, 20), np.uint8)}},
            "its image cannot be used: ValueError: Image needs",
        ),
        ({"arguments": {"picture": None}}, "its image cannot be used"),
    ],
)
def test_environments_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^gymnasium environment ") as refused:
        corridor(**options)
    assert message in str(refused.value)


def test_a_renderer_that_is_not_installed_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(DataError, match=r"FrozenLake-v1: its image cannot be used: DependencyNotInstalled: .*pygame"):
        game(id="FrozenLake-v1", render=True, actions={"Left": 0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"raises": True}, "Corridor-v0: its step cannot be used: KeyError: 'lost'"),
        ({"reward": float("nan")}, "Corridor-v0: the reward of Right is nan, which is not finite"),
        ({"reward": -1e308}, "Corridor-v0: the reward of Right is -1e+308, which is beyond ±1e+06"),
        ({"reward": float("inf")}, "Corridor-v0: the reward of Right is inf"),
    ],
)
def test_an_environment_that_fails_in_an_episode_is_a_data_error(arguments: dict[str, Any], message: str) -> None:
    made = corridor(arguments=arguments)
    made.start(0)
    with pytest.raises(DataError) as failed:
        made.act("Right")
    assert message in str(failed.value)


def test_each_environment_is_tried_once_and_closed_at_its_end() -> None:
    gc.collect()
    resets, closed = Corridor.resets, Corridor.closed
    corridor()
    corridor()
    corridor(arguments={"reward": 3.0})
    gc.collect()
    assert (Corridor.resets - resets, Corridor.closed - closed) == (2, 3)
