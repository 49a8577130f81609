"""Any gymnasium environment with images and a list of actions, as a game."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from npu_vlrl.types import MAX_REWARD, DataError, Image
from npu_vlrl.workflow.environments.game import Move
from npu_vlrl.workflow.texts import described, flaw

T = TypeVar("T")

_TRIED: set[str] = set()
"""Environments that returned an image in this process; trying each episode's would cost a reset."""


class Gym:
    """Game over a gymnasium environment, see `environments.game.Game`. A move has the one term `reward`.

    The environment runs in this process: an environment that hangs or exits stops the whole training.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        name: str,
        actions: Mapping[str, int],
        rules: str,
        solved_reward: float,
        render: bool,
    ) -> None:
        """`name` is for errors; `actions`: name -> number in the action space; `render`: see `game`."""
        self.actions = tuple(actions)
        self.rules = rules
        self._env, self._name, self._numbers = env, name, actions
        self._solved_reward, self._render = solved_reward, render
        weakref.finalize(self, env.close)

    def start(self, seed: int) -> None:
        """Resets the environment. Every method raises DataError for an environment that raises or fails its form."""
        self._observed, _ = self._asked("reset", lambda: self._env.reset(seed=seed))
        self._image: Image | None = None
        self._earned, self._over = 0.0, False

    def act(self, action: str) -> Move:
        assert not self._over, "the game is over"
        step = self._asked("step", lambda: self._env.step(self._numbers[action]))
        self._observed, given, terminated, truncated, _ = step
        self._image = None
        reward = self._asked("reward", lambda: float(given))
        if not abs(reward) <= MAX_REWARD:
            why = f"beyond ±{MAX_REWARD:g}" if math.isfinite(reward) else "not finite"
            raise DataError(f"gymnasium environment {self._name}: the reward of {action} is {reward:g}, which is {why}")
        self._earned += reward
        self._over = bool(terminated or truncated)
        solved = bool(terminated) and self._earned >= self._solved_reward
        return Move({"reward": reward}, solved, over=bool(terminated), truncated=bool(truncated))

    def picture(self) -> Image:
        if self._image is None:
            # a copy: environments write into what they gave before
            self._image = self._asked("image", lambda: Image(np.array(self._pixels())))
        return self._image

    def state_key(self) -> str:
        """Result of the environment's `state_key` method; without one, the image's hash."""
        own = getattr(self._env.unwrapped, "state_key", None)
        if own is None:
            return self.picture().hash
        key = str(self._asked("state_key", own))
        if problem := flaw(key):
            raise DataError(f"gymnasium environment {self._name}: its state_key holds {problem}; replace it")
        return key

    def solution(self) -> None:
        """None: the solution is not known."""

    def _pixels(self) -> Any:
        return self._env.render() if self._render else self._observed

    def _asked(self, what: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except Exception as error:  # it is the user's code, and may raise anything
            problem = described(error)
            raise DataError(f"gymnasium environment {self._name}: its {what} cannot be used: {problem}") from error


def game(
    *,
    id: str,
    actions: dict[str, int] | None = None,
    rules: str = "",
    solved_reward: float = 1.0,
    render: bool = False,
    max_steps: int | None = None,
    arguments: dict[str, Any] | None = None,
) -> Gym:
    """Makes a game of an environment of gymnasium's registry that has a Discrete action space.

    Args:
        id: As in `gymnasium.make`; `module:Name-v0` imports the module first, which registers it.
        actions: Number of each action by the name that the policy writes; if not given, the result of the environment's
            `get_action_meanings()` says.
        rules: Rules as told to the policy at the start.
        solved_reward: A terminated episode is solved when its rewards add up to at least this.
        render: Takes the images from `render()` in the mode rgb_array instead of from the observations.
        max_steps: Actions after which an episode is over; if not given, as registered.
        arguments: Passed on to the environment.

    Raises ValueError, naming the environment, when it cannot be made, its spaces are not of the right kind, or an
    action does not exist; DataError when it returns no image.
    """
    given = dict(arguments or {}) | ({"render_mode": "rgb_array"} if render else {})
    try:
        env = gymnasium.make(id, max_episode_steps=max_steps, disable_env_checker=True, **given)
    except Exception as error:  # what the user's module raises, too
        raise ValueError(f"gymnasium environment {id} cannot be made: {type(error).__name__}: {error}") from error
    if not render and not _is_image(env.observation_space):
        raise ValueError(
            f"gymnasium environment {id}: its observations are {env.observation_space}, not images, a Box of uint8 "
            "[height, width, 3]; set render=true if it can render"
        )
    space = env.action_space
    if not isinstance(space, Discrete):
        raise ValueError(f"gymnasium environment {id}: its actions are {space}; only those of a Discrete have names")
    numbers = _meanings(env, space, id) if actions is None else actions
    _check_numbers(numbers, space, id)
    made = Gym(env, id, numbers, rules or f"You play {id}.", solved_reward, render)
    key = repr((id, render, max_steps, arguments))
    if key not in _TRIED:
        made.start(0)
        made.picture()
        _TRIED.add(key)
    return made


def _is_image(space: gymnasium.Space[Any]) -> bool:
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def _meanings(env: gymnasium.Env[Any, Any], space: Discrete, name: str) -> dict[str, int]:
    meanings = getattr(env.unwrapped, "get_action_meanings", None)
    if meanings is None:
        raise ValueError(
            f"gymnasium environment {name} does not name its actions; write e.g. options.actions={{Left: 0, Right: 1}} "
            f"for its {space}"
        )
    return {action: number for number, action in enumerate(meanings(), start=int(space.start))}


def _check_numbers(numbers: Mapping[str, int], space: Discrete, name: str) -> None:
    if not numbers:
        raise ValueError(f"gymnasium environment {name}: options.actions is empty; name at least one action")
    for action, number in numbers.items():
        if number not in space:
            raise ValueError(
                f"gymnasium environment {name}: action {action!r} is number {number}, but they go from {space.start} "
                f"to {space.start + space.n - 1}"
            )
