"""Judges: rules in worker processes that can be killed, and rules of linear time in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_vlrl.types import DataError, Image, JudgeError, Task, Turn, Verdict
from npu_vlrl.workflow.workers import WorkerError, WorkerPool, check_limits
from npu_vlrl.workflow.workers.wire import json_part


class InlineJudge:
    """Runs a rule in place; only for rules whose time is linear in the text.

    Example: `InlineJudge(tagged.score, tagged.check_gold)`
    """

    wrong_replies = 0
    """Number of wrong replies: always 0, since no other process answers."""

    def __init__(self, score: Callable[[str, str], Verdict], check_gold: Callable[[str], None]) -> None:
        self._score = score
        self.check_gold = check_gold

    async def judge(self, task: Task, text: str, history: Sequence[Turn]) -> Verdict:
        return self._score(_gold(task), text)

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


class JudgePool:
    """Judges answers in `workers` processes (see `WorkerPool`); usable from any event loop and thread.

    Example: `verdict = await JudgePool("math_verify", {}, workers=2, deadline_s=5.0).judge(task, text, [])`
    """

    def __init__(
        self, rule: str, options: Mapping[str, Any], workers: int = 1, deadline_s: float = 5.0, memory_mib: int = 0
    ) -> None:
        """Raises ValueError for an invalid number, or when the user's file of a `python` rule cannot be used."""
        check_limits("judge", workers, deadline_s)
        self._rule = rule
        setup = {"rule": rule, "options": dict(options)}
        service, name = "npu_vlrl.workflow.rewards.worker", f"the rule {rule!r}"
        self._pool = WorkerPool(service, setup, name, workers, deadline_s, memory_mib)
        if rule == "python":
            self._pool.start()

    @property
    def wrong_replies(self) -> int:
        """Number of wrong replies, see `WorkerPool.wrong_replies`."""
        return self._pool.wrong_replies

    async def judge(self, task: Task, text: str, history: Sequence[Turn]) -> Verdict:
        """Raises JudgeError when the rule raises, dies or passes the deadline; DataError when the gold is at fault.

        Raises ValueError when the rule cannot be started at all: that would fail for every answer.
        """
        images: tuple[Image, ...] = ()
        if self._rule == "python":
            images = (*task.images, *(image for turn in history for tool in turn.tool_results for image in tool.images))
            request = {
                "task": _plain_task(task),
                "history": [turn.text for turn in history],
                "messages": [(message.role, message.text) for message in task.messages],
            }
        elif self._rule == "benchmark":
            request = {"answer": _gold(task), "extra": json_part(task.extra)}
        else:
            request = {"answer": _gold(task)}
        try:
            reply, _ = await asyncio.wrap_future(self._pool.submit({**request, "text": text}, images))
        except WorkerError as error:
            raise JudgeError(f"task {task.id}: {error}") from error
        if "data_error" in reply:
            raise DataError(f"task {task.id}: {reply['data_error']}")
        if "error" in reply:
            raise JudgeError(f"task {task.id}: the rule {self._rule!r} failed: {reply['error']}")
        return Verdict(**reply["verdict"])

    def check_gold(self, answer: str) -> None:
        """Blocks for at most the deadline. Raises DataError when `answer` cannot be judged against, or not in time.

        A data loader can call it directly: it is synchronous, and safe on hostile golds.
        """
        if self._rule == "python":
            return
        try:
            reply, _ = self._pool.submit({"answer": answer}).result()
        except WorkerError as error:
            raise DataError(f"the gold answer {answer[:80]!r} cannot be judged: {error}") from error
        if "data_error" in reply:
            raise DataError(reply["data_error"])
        if "error" in reply:
            raise DataError(
                f"the gold answer {answer[:80]!r} cannot be judged: the rule {self._rule!r} failed: {reply['error']}"
            )

    def close(self) -> None:
        """Kills the workers; judgements in flight raise JudgeError."""
        self._pool.close()


def _gold(task: Task) -> str:
    if task.answer is None:
        raise DataError(f"task {task.id} has no answer to judge against; fill its answer field or use another rule")
    return task.answer


def _plain_task(task: Task) -> dict[str, Any]:
    return {"id": task.id, "answer": task.answer, "data_source": task.data_source, "extra": json_part(task.extra)}
