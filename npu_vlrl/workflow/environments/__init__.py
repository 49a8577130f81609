"""Worlds that an episode can take place in, by name.

A game is a module with `game(**options) -> Game`, whose typed keywords are its options, or such a function in a file of
the user's own. `visual_qa` is no game: it is made of a judge and tools.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Protocol

from pydantic import PydanticUserError, ValidationError, validate_call

from npu_vlrl.config import EnvironmentConfig
from npu_vlrl.workflow.environments.game import Game, GameEnvironment
from npu_vlrl.workflow.environments.own import OwnGame
from npu_vlrl.workflow.names import check_names
from npu_vlrl.workflow.workers import is_spec, load_function

__all__ = ["GAMES", "GameEnvironment", "game_environments"]

GAMES = {
    "sokoban": "npu_vlrl.workflow.environments.sokoban",
    "frozenlake": "npu_vlrl.workflow.environments.frozenlake",
    "gymnasium": "npu_vlrl.workflow.environments.gym",
}


class NewGameEnvironment(Protocol):
    """Makes an environment for one episode; `opened`: see `formats.Format`."""

    def __call__(self, opened: bool | None = None) -> GameEnvironment: ...


def game_environments(config: EnvironmentConfig) -> NewGameEnvironment:
    """Makes environments of a game of `GAMES`, or of the user's `path/to/file.py:function`, one for each episode.

    Raises ValueError for an unknown name or option, a value of the wrong type or one that the game refuses, a file
    without that function, and a format or separator that cannot work; DataError for a game of the user's own that
    raises or gives what cannot be used. It is tried once.
    """
    own = is_spec(config.name)
    if own:
        function = load_function(config.name)
    else:
        check_names("environment", [config.name], ["visual_qa", *GAMES])
        function = importlib.import_module(GAMES[config.name]).game
    check_names(f"option of {config.name!r}:", config.options, inspect.signature(function).parameters)
    try:
        checked = validate_call(function)
    except (PydanticUserError, NameError) as error:
        problem = str(error).splitlines()[0]
        raise ValueError(
            f"{config.name}: the types of its options cannot be checked ({problem}); use int, float, str, bool, "
            "and lists and dicts of them"
        ) from error

    def make(opened: bool | None = None) -> GameEnvironment:
        game: Game = OwnGame(config.name, lambda: checked(**config.options)) if own else checked(**config.options)
        return GameEnvironment(game, config, opened)

    try:
        first = make().game  # a game refuses a bad value before training, not at the first episode
        if isinstance(first, OwnGame):
            first.try_once()
    except ValidationError as error:
        problems = (f"options.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError("; ".join(problems)) from None
    return make
