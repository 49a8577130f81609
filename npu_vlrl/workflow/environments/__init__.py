"""Environments of episodes, by name.

A game is a module with `game(**options) -> Game`, whose typed keywords are its options. A function of the user's own
file makes a `Game`, or any `types.Environment`. `visual_qa` stands apart: it is made of a judge and tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import PydanticUserError, ValidationError, validate_call

from npu_vlrl.common.registry import GAMES, load
from npu_vlrl.config import EnvironmentConfig
from npu_vlrl.types import Environment
from npu_vlrl.workflow.environments.formats import Format, make_format
from npu_vlrl.workflow.environments.game import GameEnvironment
from npu_vlrl.workflow.environments.own import OwnEnvironment, OwnGame, made
from npu_vlrl.workflow.names import check_names
from npu_vlrl.workflow.workers import is_spec, load_function

__all__ = ["Environments", "GameEnvironment", "environments"]


class NewEnvironment(Protocol):
    def __call__(self, opened: bool | None = None) -> Environment: ...


@dataclass(frozen=True)
class Environments:
    """Makes the environments of a run, one for each episode.

    `opened` says whether the chat template opens a thought, see `formats.Format`.
    """

    new: NewEnvironment
    is_game: bool
    """Whether they are made of a `Game`: tasks are seeds, and solutions can be shown."""
    names_states: bool
    """Whether `state_key` identifies states."""
    format: Callable[[bool | None], Format | None] = lambda _: None
    """Makes the format in which a turn names its actions; returns None where any text is an action."""


def environments(config: EnvironmentConfig) -> Environments:
    """Makes the environments of a game of `GAMES`, or of the object that the user's `path/to/file.py:function` returns.

    Raises ValueError for an unknown name or option, a value of the wrong type or one that is refused, a setting that
    the environment does not use, a file without that function, and a format or separator that cannot work; DataError
    for a user's object that raises or returns unusable values. A game is tried once.
    """
    make = _maker(config)
    try:
        first = make()  # bad values are refused before training, not at the first episode
        if isinstance(first, OwnEnvironment):
            if idle := sorted(set(config.changed()) - {"name", "options"}):
                raise ValueError(
                    f"{config.name} is an environment, which reads any text, and has no use for {', '.join(idle)}; "
                    "leave that out"
                )
            return Environments(lambda opened=None: make(), is_game=False, names_states=first.names_states)
        GameEnvironment(first, config)
        if isinstance(first, OwnGame):
            first.try_once()
    except ValidationError as error:
        problems = (f"options.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError("; ".join(problems)) from None
    return Environments(
        lambda opened=None: GameEnvironment(make(), config, opened),
        is_game=True,
        names_states=True,
        format=lambda opened: make_format(config, opened),
    )


def _maker(config: EnvironmentConfig) -> Callable[[], Any]:
    """Factory of a game, or of an environment of the user's own, whose calls are guarded."""
    own = is_spec(config.name)
    if own:
        function = load_function(config.name)
    else:
        check_names("environment", [config.name], ["visual_qa", *GAMES])
        function = load(GAMES, config.name).game
    check_names(f"option of {config.name!r}:", config.options, inspect.signature(function).parameters)
    try:
        checked = validate_call(function)
    except (PydanticUserError, NameError) as error:
        problem = str(error).splitlines()[0]
        raise ValueError(
            f"{config.name}: the types of its options cannot be checked ({problem}); use int, float, str, bool, "
            "and lists and dicts of them"
        ) from error
    if own:
        return lambda: made(config.name, lambda: checked(**config.options))
    return lambda: checked(**config.options)
