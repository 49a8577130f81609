"""A game of the user's own: whatever it raises, or returns that cannot be used, becomes a DataError that names it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from npu_vlrl.data.images import to_image
from npu_vlrl.types import MAX_REWARD, DataError, Image
from npu_vlrl.workflow.environments.game import Move
from npu_vlrl.workflow.texts import described, flaw, shown


class OwnGame:
    """See `environments.game.Game`. All that is asked of it raises DataError, naming file, function and the remedy.

    The game runs in this process: one that hangs does so to the whole training.
    """

    def __init__(self, spec: str, make: Callable[[], Any]) -> None:
        """`spec`: `path/to/file.py:function`; `make`: calls that function. What it refuses stays a ValueError."""
        self._spec, self._file = spec, str(Path(spec.rpartition(":")[0]).resolve())
        self.own = self._called("", make, ValueError)
        actions = self._called("its actions ", lambda: getattr(self.own, "actions", None))
        if not isinstance(actions, (tuple, list)) or not actions or not all(isinstance(a, str) for a in actions):
            raise self._wrong(f"its actions are {shown(actions)}", 'write a tuple of words, such as ("Left", "Right")')
        self.actions: tuple[str, ...] = tuple(self._text("an action", action) for action in actions)

    @property
    def rules(self) -> str:
        """Asked for after the start, since they may depend on it."""
        rules = self._called("its rules ", lambda: getattr(self.own, "rules", None))
        if not isinstance(rules, str):
            raise self._wrong(f"its rules are {shown(rules)}", "write a text")
        return self._text("its rules", rules)

    def try_once(self) -> None:
        """Asks for all but a move, before a model is loaded."""
        self.start(0)
        assert self.rules is not None
        self.picture()
        self.state_key()
        self.solution()
        if not callable(getattr(self.own, "act", None)):
            raise self._wrong("it has no method act", "write act(self, action), which returns a Move")

    def start(self, seed: int) -> None:
        self._asked("start", seed)

    def act(self, action: str) -> Move:
        move = self._asked("act", action)
        if not isinstance(move, Move):
            raise self._wrong(f"act({action!r}) returned {shown(move)}", "return a Move")
        try:
            # plain numbers, since numpy's own cannot be written to the records
            terms = {self._text("the name of a term", str(name)): float(value) for name, value in move.terms.items()}
            plain = Move(terms, bool(move.solved), bool(move.over))
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._wrong(
                f"act({action!r}) returned a Move that cannot be used ({error})",
                "give terms as names with numbers, and solved and over as True or False",
            ) from error
        if not all(math.isfinite(value) for value in terms.values()):
            raise self._wrong(f"act({action!r}) earned {shown(terms)}, which is not finite", "give finite numbers")
        if sum(map(abs, terms.values())) > MAX_REWARD:
            raise self._wrong(f"act({action!r}) earned {shown(terms)}", f"give at most {MAX_REWARD:g} for a move")
        return plain

    def picture(self) -> Image:
        picture, where = self._asked("picture"), f"{self._spec}: picture()"
        return self._called("picture() ", lambda: to_image(picture, where), DataError)  # Pillow may read its file now

    def state_key(self) -> str:
        key = self._asked("state_key")
        if not isinstance(key, str):
            raise self._wrong(f"state_key() returned {shown(key)}", "return a text, equal exactly for equal states")
        return self._text("state_key()", key)

    def solution(self) -> list[str] | None:
        solution = self._asked("solution")
        if solution is None:
            return None
        if not isinstance(solution, (list, tuple)):
            raise self._wrong(f"solution() returned {shown(solution)}", "return a list of actions, or None")
        for action in solution:
            if action not in self.actions:
                raise self._wrong(
                    f"solution() names {shown(action)}, which is none of its actions {', '.join(self.actions)}",
                    "write the action as in actions",
                )
        return list(solution)

    def _text(self, what: str, text: str) -> str:
        if problem := flaw(text):
            raise self._wrong(f"{what} holds {problem}", "replace it")
        return text

    def _asked(self, method: str, *arguments: Any) -> Any:
        shown = f"{method}({', '.join(map(repr, arguments))}) "
        return self._called(shown, lambda: getattr(self.own, method)(*arguments))

    def _called(self, what: str, function: Callable[[], Any], *passed: type[Exception]) -> Any:
        try:
            return function()
        except passed:
            raise
        except (Exception, SystemExit) as error:  # it is the user's code, and may raise anything
            lines = [
                frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self._file
            ]
            where = f" (line {lines[-1]})" if lines else ""
            problem = " ".join(described(error).split())[:300]
            raise self._wrong(f"{what}raised {problem}{where}", "correct the game") from error

    def _wrong(self, problem: str, remedy: str) -> DataError:
        return DataError(f"{self._spec}: {problem}; {remedy}")
