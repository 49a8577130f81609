"""Guards around a game or an environment of the user's own.

Its exceptions and unusable results become a DataError that names file, method and remedy, so that it fails an episode
and not the run. It runs in this process: one that hangs stops the whole training.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from npu_vlrl.data.images import to_image
from npu_vlrl.types import (
    MAX_REWARD,
    DataError,
    Environment,
    EpisodeStatus,
    Image,
    Message,
    Step,
    Task,
    ToolCall,
    ToolResult,
    Turn,
    Verdict,
)
from npu_vlrl.workflow.environments.game import Move
from npu_vlrl.workflow.texts import shown, told
from npu_vlrl.workflow.user_code import UserCode

ENDS = (EpisodeStatus.SOLVED, EpisodeStatus.LOST, EpisodeStatus.TRUNCATED, EpisodeStatus.STOPPED)
"""Statuses by which a user's environment may end an episode."""

MESSAGE = 'give a list of messages such as Message("user", (image, "text"))'


def made(spec: str, make: Callable[[], Any]) -> OwnGame | OwnEnvironment:
    """Guards the object that the function of `spec` returns: one with the methods `reset` and `step` is an environment,
    any other a game. Raises DataError for an unusable object, and passes on a ValueError of the function.
    """
    guard = UserCode(spec, "function")
    own = guard.called("", make, ValueError)
    is_environment = all(callable(getattr(own, method, None)) for method in ("reset", "step"))
    return OwnEnvironment(spec, own) if is_environment else OwnGame(spec, own)


class OwnGame(UserCode):
    """Guard of a user's game, see `environments.game.Game`. Every method raises DataError with the remedy."""

    def __init__(self, spec: str, own: Any) -> None:
        super().__init__(spec, "game")
        self.own = own
        actions = self.called("its actions ", lambda: getattr(own, "actions", None))
        if not isinstance(actions, (tuple, list)) or not actions or not all(isinstance(a, str) for a in actions):
            raise self.wrong(
                f"its actions are {shown(actions)}",
                'write a tuple of words, such as ("Left", "Right"), or for an environment without a list of actions '
                "the methods reset and step",
            )
        self.actions: tuple[str, ...] = tuple(self.text("an action", action) for action in actions)

    @property
    def rules(self) -> str:
        """Rules, read after the start, since they may depend on it."""
        rules = self.called("its rules ", lambda: getattr(self.own, "rules", None))
        if not isinstance(rules, str):
            raise self.wrong(f"its rules are {shown(rules)}", "write a text")
        return self.text("its rules", rules)

    def try_once(self) -> None:
        """Calls every method but `act` once, before a model is loaded."""
        self.start(0)
        assert self.rules is not None
        self.picture()
        self.state_key()
        self.solution()
        if not callable(getattr(self.own, "act", None)):
            raise self.wrong("it has no method act", "write act(self, action), which returns a Move")

    def start(self, seed: int) -> None:
        self._asked("start", seed)

    def act(self, action: str) -> Move:
        move = self._asked("act", action)
        if not isinstance(move, Move):
            raise self.wrong(f"act({action!r}) returned {shown(move)}", "return a Move")
        try:
            terms = self.numbers(move.terms)
            plain = Move(terms, bool(move.solved), bool(move.over), bool(move.truncated))
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.wrong(
                f"act({action!r}) returned a Move that cannot be used ({error})",
                "give terms as names with numbers, and solved, over and truncated as True or False",
            ) from error
        if not all(math.isfinite(value) for value in terms.values()):
            raise self.wrong(f"act({action!r}) earned {shown(terms)}, which is not finite", "give finite numbers")
        if sum(map(abs, terms.values())) > MAX_REWARD:
            raise self.wrong(f"act({action!r}) earned {shown(terms)}", f"give at most {MAX_REWARD:g} for a move")
        return plain

    def picture(self) -> Image:
        image, where = self._asked("picture"), f"{self._spec}: picture()"
        return self.called("picture() ", lambda: to_image(image, where), DataError)  # Pillow may read its file now

    def state_key(self) -> str:
        key = self._asked("state_key")
        if not isinstance(key, str):
            raise self.wrong(f"state_key() returned {shown(key)}", "return a text, equal exactly for equal states")
        return self.text("state_key()", key)

    def solution(self) -> list[str] | None:
        solution = self._asked("solution")
        if solution is None:
            return None
        if not isinstance(solution, (list, tuple)):
            raise self.wrong(f"solution() returned {shown(solution)}", "return a list of actions, or None")
        for action in solution:
            if action not in self.actions:
                raise self.wrong(
                    f"solution() names {shown(action)}, which is none of its actions {', '.join(self.actions)}",
                    "write the action as in actions",
                )
        return list(solution)

    def _asked(self, method: str, *arguments: Any) -> Any:
        shown = f"{method}({', '.join(map(repr, arguments))}) "
        return self.called(shown, lambda: getattr(self.own, method)(*arguments))


class OwnEnvironment(UserCode):
    """Guard of a user's environment, see `types.Environment`. Every method raises DataError for unusable results."""

    def __init__(self, spec: str, own: Any) -> None:
        super().__init__(spec, "environment")
        self.own = own
        for method, form in (("reset", "(self, task)"), ("step", "(self, text, history)"), ("close", "(self)")):
            if not inspect.iscoroutinefunction(getattr(own, method, self.close)):
                raise self.wrong(
                    f"its {method} is no async method",
                    f"write `async def {method}{form}`; an environment of gymnasium is played by "
                    "environment.name=gymnasium",
                )

    @property
    def names_states(self) -> bool:
        """Whether the environment defines its own `state_key`."""
        key = getattr(type(self.own), "state_key", None)
        return key is not None and key is not Environment.state_key

    async def reset(self, task: Task) -> Sequence[Message]:
        what = f"reset(task {shown(task.id)})"
        # a task that it refuses is told in its own words
        messages = await self.awaited(f"{what} ", lambda: self.own.reset(task), DataError)
        opening = self._messages(what, messages, ("system", "user", "assistant"))
        if not opening:
            raise self.wrong(f"{what} returned no message", MESSAGE)
        return opening

    async def step(self, text: str, history: Sequence[Turn]) -> Step:
        what = f"step({shown(text)})"
        step = await self.awaited(f"{what} ", lambda: self.own.step(text, history))
        if not isinstance(step, Step):
            raise self.wrong(f"{what} returned {shown(step)}", "return a Step")
        if step.status is not None and step.status not in ENDS:
            raise self.wrong(f"{what} ended with {shown(step.status)}", f"end with one of {', '.join(map(repr, ENDS))}")
        reward = self._number(what, "reward", step.reward)
        messages = self._messages(what, step.messages, ("user", "tool"))
        calls, results = self._tools(what, step)
        if step.status is None and not messages and not results:
            raise self.wrong(f"{what} goes on without a message", "give messages, or a status that ends the episode")
        verdict = step.verdict
        if verdict is None and not calls and not results:
            verdict = Verdict(reward, step.status is EpisodeStatus.SOLVED)
        elif verdict is not None:
            verdict = self._verdict(what, verdict)
        problem = None if step.judge_error is None else told(str(step.judge_error))
        return Step(reward, messages, step.status, verdict, calls, results, problem, bool(step.invalid))

    def state_key(self) -> str | None:
        if not self.names_states:
            return None
        key = self.called("state_key() ", lambda: self.own.state_key())
        if key is None:
            return None
        if not isinstance(key, str):
            raise self.wrong(f"state_key() returned {shown(key)}", "return a text, equal exactly for equal states")
        return self.text("state_key()", key)

    async def close(self) -> None:
        if callable(getattr(self.own, "close", None)):
            await self.awaited("close() ", lambda: self.own.close())

    def _messages(self, what: str, messages: Any, roles: Sequence[str]) -> tuple[Message, ...]:
        if not isinstance(messages, (list, tuple)) or not all(isinstance(m, Message) for m in messages):
            raise self.wrong(f"{what} gave the messages {shown(messages)}", MESSAGE)
        for message in messages:
            if message.role not in roles:
                raise self.wrong(f"{what} gave a message of the role {shown(message.role)}", f"use {', '.join(roles)}")
            self.text(what, message.text)
            self._images(what, message.images)
        return tuple(messages)

    def _images(self, what: str, images: Sequence[Any]) -> None:
        for image in images:
            to_image(image, f"{self._spec}: {what}")

    def _tools(self, what: str, step: Step) -> tuple[tuple[ToolCall, ...], tuple[ToolResult, ...]]:
        """Tool calls and results in a form that can be recorded."""
        calls, results = step.tool_calls, step.tool_results
        try:
            calls = tuple(ToolCall(call.name, json.loads(json.dumps(dict(call.arguments)))) for call in calls)
            results = tuple(ToolResult(str(r.text), tuple(r.images), bool(r.error)) for r in results)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self.wrong(
                f"{what} has tool calls or results that cannot be used ({error})",
                "give tuples of ToolCall, with arguments that are JSON, and of ToolResult",
            ) from error
        for result in results:
            self.text(what, result.text)
            self._images(what, result.images)
        return calls, results

    def _verdict(self, what: str, verdict: Any) -> Verdict:
        if not isinstance(verdict, Verdict):
            raise self.wrong(f"{what} gave the verdict {shown(verdict)}", "give a Verdict, or leave it out")
        try:
            terms = self.numbers(verdict.terms)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.wrong(f"{what} gave terms that cannot be used ({error})", "give names with numbers") from error
        for name, value in terms.items():
            self._number(what, f"term {name!r}", value)
        reward = self._number(what, "verdict", verdict.reward)
        return Verdict(reward, bool(verdict.solved), terms=terms)

    def _number(self, what: str, name: str, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= MAX_REWARD:  # nor is a NaN
            raise self.wrong(
                f"{what} has the {name} {shown(value)}", f"give a finite number of at most ±{MAX_REWARD:g}"
            )
        return number
