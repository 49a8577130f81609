"""Warnings about problems in a training, each reported once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from npu_vlrl.config import WorkflowConfig
from npu_vlrl.data.source import TaskSource
from npu_vlrl.learner.group import LearnerGroup
from npu_vlrl.rollout.collect import Rollout
from npu_vlrl.workflow.export import pays_for_failing


class Troubles:
    """Remembers the reported warnings."""

    def __init__(self, workflow: WorkflowConfig, tasks: TaskSource, wrong_replies: Callable[[], int]) -> None:
        """`wrong_replies`: function that counts those of all judges and tools, so far."""
        self._workflow = workflow
        self._tasks = tasks
        self._wrong_replies = wrong_replies
        self._told_records = self._told_updates = self._told_replies = 0
        self._told_that_failing_pays = False

    def told_before(self, learner: LearnerGroup) -> None:
        """Counts rows that a resumed run has already skipped as reported."""
        self._told_records, self._told_updates = len(self._tasks.skipped), len(learner.skipped)

    def new_wrong_replies(self) -> int:
        """Number of wrong replies since the last call."""
        before, self._told_replies = self._told_replies, self._wrong_replies()
        return self._told_replies - before

    def of_step(self, rollout: Rollout, learner: LearnerGroup) -> Iterator[str]:
        """Warnings since the last call, except wrong replies."""
        yield from rollout.errors
        yield from rollout.judgements.messages()
        verdicts = ((t.id, turn.verdict) for t in rollout.trajectories for turn in t.turns if turn.verdict is not None)
        lowest, name = min(((verdict.reward, name) for name, verdict in verdicts), default=(0.0, ""))
        yield from self.failing_pays(lowest, f"the judge of {name}")
        records = list(self._tasks.skipped.values())
        yield from (f"skipped {message}" for message in records[self._told_records :])
        yield from (f"update skipped, not finite: sample {name}" for name in learner.skipped[self._told_updates :])
        self.told_before(learner)

    def failing_pays(self, lowest: float, whose: str) -> Iterator[str]:
        """Warning that longer failures earn more, where a judge's verdicts may be as low as `lowest`."""
        mode, gamma = self._workflow.reward_mode, self._workflow.turn_discount
        if pays_for_failing(mode, gamma, lowest) and not self._told_that_failing_pays:
            self._told_that_failing_pays = True
            yield (
                f"workflow.reward_mode={mode} with workflow.turn_discount={gamma:g} pays for failing longer: {whose} "
                f"gives {lowest:g} for a wrong answer, and turn k, from 0, counts {gamma:g}^k of it; set "
                "workflow.turn_discount=1 or workflow.reward_mode=sum, or choose a rule that gives nothing below 0"
            )


def wrong_replies_message(replies: int) -> list[str]:
    """Message about wrong replies of workers; None without any."""
    if not replies:
        return []
    return [
        f"{replies} replies of judges or tools were not to their requests, and ended their processes; let no function "
        "leave a forked process behind"
    ]
