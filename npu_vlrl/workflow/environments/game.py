"""Games with images as environments: the policy thinks in a format, names actions, and sees the next image."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from npu_vlrl.config import EnvironmentConfig
from npu_vlrl.types import (
    MAX_REWARD,
    DataError,
    Environment,
    EpisodeStatus,
    Image,
    Message,
    Step,
    Task,
    Turn,
    Verdict,
)
from npu_vlrl.workflow.environments.formats import Parsed, make_format
from npu_vlrl.workflow.thought import UNFINISHED_FEEDBACK


@dataclass(frozen=True)
class Move:
    """Result of one action of a game."""

    terms: Mapping[str, float] = field(default_factory=dict)
    """Rewards of the action by name; their sum is its reward."""
    solved: bool = False
    over: bool = False
    """Whether the game has ended; a solved game is over, too."""
    truncated: bool = False
    """Whether a time limit ended the game."""

    @property
    def last(self) -> bool:
        return self.over or self.solved or self.truncated


class Game(Protocol):
    """Rules of a game. Seed and actions alone determine what happens."""

    actions: tuple[str, ...]
    """Names of all actions, as the policy writes them."""

    @property
    def rules(self) -> str:
        """Rules as told to the policy at the start."""
        ...

    def start(self, seed: int) -> None: ...

    def act(self, action: str) -> Move:
        """Executes one of `actions`."""
        ...

    def picture(self) -> Image:
        """Image of the state. A user's game may also return a uint8 array [height, width, 3] or a Pillow image."""
        ...

    def state_key(self) -> str:
        """Key of the state, equal exactly for equal states."""
        ...

    def solution(self) -> list[str] | None:
        """A shortest list of actions that solves the game from here; None when there is none, or none is known."""
        ...


class GameEnvironment(Environment):
    """Environment of a game, see `types.Environment`. A turn executes at most `max_actions` actions of its answer.

    A turn earns the rewards of its actions, and `format_reward` when its text is in the format and names only actions
    of the game. An unknown action ends the turn: the actions before it count, those after it do not. `opened`: see
    `Format`. Raises ValueError when the actions of the game cannot be told apart, or hold the separator.
    """

    def __init__(self, game: Game, config: EnvironmentConfig, opened: bool | None = None) -> None:
        self.game = game
        self.format = make_format(config, opened)
        self.config = config
        self._actions = {action.casefold(): action for action in game.actions}
        words = all(a and a == a.strip() and config.separator not in a for a in game.actions)
        if not words or len(self._actions) < len(game.actions):
            raise ValueError(
                f"the actions {', '.join(map(repr, game.actions))} must be different words, regardless of case, and "
                f"not hold the separator {config.separator!r}"
            )

    async def reset(self, task: Task) -> Sequence[Message]:
        """Starts the game. Returns one message: rules, actions and format (if `explain` is on), and the first image."""
        seed = task.extra.get("seed")
        if not isinstance(seed, int):
            raise DataError("the task has no seed for a game; use data.train.generator=episodes")
        if task.messages:
            raise DataError("a game makes its own prompt, and would not show this; use data.train.generator=episodes")
        self.game.start(seed)
        return (Message("user", (*((self._explanation(),) if self.config.explain else ()), self.game.picture())),)

    async def step(self, text: str, history: Sequence[Turn]) -> Step:
        parsed = self.format.parse(text)
        names = [name.strip() for name in (parsed.answer or "").split(self.config.separator) if name.strip()]
        known = list(takewhile(lambda name: name.casefold() in self._actions, names[: self.config.max_actions]))
        done: list[str] = []
        moves = [Move()]
        while len(done) < len(known) and not moves[-1].last:
            done.append(self._actions[known[len(done)].casefold()])
            moves.append(self.game.act(done[-1]))
        all_known = bool(known) and len(known) == min(len(names), self.config.max_actions)
        terms: dict[str, float] = defaultdict(float)
        for move in moves:
            for name, value in move.terms.items():
                terms[name] += value
        terms["format"] += self.config.format_reward * (parsed.right and all_known)
        reward = sum(terms.values())
        if not abs(reward) <= MAX_REWARD:
            raise DataError(
                f"{', '.join(done)} earned {reward:g} in {self.config.name}, beyond ±{MAX_REWARD:g}; lower what the "
                "game pays, or environment.max_actions"
            )
        verdict = Verdict(reward, moves[-1].solved, terms=dict(terms))
        told = self._told(parsed, names, known, done)
        message = Message("user", (told, self.game.picture()))
        return Step(verdict.reward, (message,), _status(moves[-1]), verdict, invalid=not all_known)

    def state_key(self) -> str:
        return self.game.state_key()

    def _listed(self) -> str:
        return ", ".join(self.game.actions)

    def _explanation(self) -> str:
        most = self.config.max_actions
        many = f" Take up to {most} at a time, separated by {self.config.separator!r}." if most > 1 else ""
        return f"{self.game.rules}\nActions: {self._listed()}.{many}\n{self.format.instructions}\n"

    def _told(self, parsed: Parsed, names: Sequence[str], known: Sequence[str], done: Sequence[str]) -> str:
        """Feedback on a turn: the executed actions and the errors."""
        most = self.config.max_actions
        told = [f"Done: {', '.join(done)}." if done else "Nothing was done."]
        if len(known) < min(len(names), most):
            told.append(f"There is no action {names[len(known)][:40]!r}; the actions are {self._listed()}.")
        elif len(names) > most:
            told.append(f"Only {most} actions count in a turn.")
        if parsed.unfinished:
            told.append(UNFINISHED_FEEDBACK)
        if not parsed.right or not names:
            told.append(f"Write {self.format.form}")
        return " ".join(told) + "\n"


def _status(move: Move) -> EpisodeStatus | None:
    if move.solved:
        return EpisodeStatus.SOLVED
    if move.over:
        return EpisodeStatus.LOST
    return EpisodeStatus.TRUNCATED if move.truncated else None
