"""A judge that fails too often ends what asks it, and says why once."""

from __future__ import annotations

import pytest

from npu_vlrl.rollout.judgements import Judgements, RolloutError


def counted(*errors: str | None) -> Judgements:
    judgements = Judgements()
    for number, error in enumerate(errors):
        judgements.count(f"t/{number}", True, error and f"t/{number}: task t/{number}: {error}", {})
        judgements.count(f"t/{number}", False, None, {})  # a tool call
    return judgements


def test_equal_messages_are_told_once_with_their_number() -> None:
    judgements = counted("late", None, "broken", "broken")
    assert (judgements.answers, judgements.failed) == (4, 3)
    assert judgements.messages() == [
        "the judge failed on 2 of 4 answers: broken",
        "the judge failed on 1 of 4 answers: late",
    ]
    assert counted(None).messages() == []


def test_of_many_different_messages_a_few_are_told() -> None:
    told = counted(*(f"odd {n}" for n in range(9))).messages()
    assert len(told) == 6 and told[-1] == "the judge failed on 4 of 9 answers in other ways"


def test_more_failures_than_the_share_end_the_run_with_the_message() -> None:
    counted("broken", None).check(0.5, "step3")
    Judgements().check(0.0, "step3")
    counted("broken").check(1.0, "step3")
    with pytest.raises(
        RolloutError,
        match=r"2 of 3 answers of step3, more than rollout\.max_failed_share=0\.5; .*\n  .*2 of 3.*: broken",
    ):
        counted("broken", "broken", None).check(0.5, "step3")
