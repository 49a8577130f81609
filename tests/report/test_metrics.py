"""Numbers about a step's rollouts, by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from npu_vlrl.config import WorkflowConfig
from npu_vlrl.report.evaluated import means_by_source
from npu_vlrl.report.metrics import FIRST_TURNS, rollout_metrics, throughput
from npu_vlrl.report.results import task_result
from npu_vlrl.report.run_folder import trajectory_record
from npu_vlrl.report.verdicts import labelled_terms, verdict_of
from npu_vlrl.rollout.judgements import Judgements
from npu_vlrl.types import EpisodeStatus, JudgeError, StopReason, Trajectory, Verdict
from npu_vlrl.workflow.export import export
from tests.support.scripted import Verdicts, a_task, an_image, cut, encode, play, workflow

LOOK = '<tool_call>{"name":"look","arguments":{}}</tool_call>'
RIGHT, WRONG = Verdict(1.0, True), Verdict(0.0, False)


def episode(member: int, group: str, lines: list[Any], *verdicts: Verdict | Exception) -> Trajectory:
    settings: dict[str, Any] = {"tools": ("look",), "describe_tools": False, "max_turns": 3}
    task = a_task(an_image(28), "?", hidden_image=an_image(56))
    done = play(workflow(Verdicts(verdicts), **settings), lines, task)
    return dataclasses.replace(done, member=member, group=group)


def test_by_hand() -> None:
    full = dataclasses.replace(cut("a"), stop_reason=StopReason.CONTEXT_FULL)
    trajectories = [
        episode(0, "a", [LOOK, LOOK, "up"], RIGHT),  # the second look is an error
        episode(1, "a", ["down", "up"], WRONG, RIGHT),
        episode(0, "b", [cut("abc"), full, "a"], WRONG, JudgeError("gone"), WRONG),
        episode(1, "b", ["a", "a", "a"], WRONG, WRONG, WRONG),
    ]
    samples = export(trajectories, "concat", "sum", 0.5, "tiny")
    assert [sample.reward for sample in samples] == [0.25, 0.5, 0.0, 0.0]
    settings = WorkflowConfig(reward_mode="sum", turn_discount=0.5)
    metrics = rollout_metrics(trajectories, samples, settings)
    said = [LOOK, LOOK, "up", "down", "up", "a", "a", "a", "a"]
    tokens = sum(len(encode(text)) + 1 for text in said) + len(encode("abc")) + len(encode("a"))

    def n(text: str) -> int:
        """With the token that ends a turn; the two that were cut have none."""
        return len(encode(text)) + 1

    expected = {
        "reward": 0.1875,
        "reward_std": (((0.0625**2) + (0.3125**2) + 2 * 0.1875**2) / 4) ** 0.5,
        "first_try_accuracy": 0.25,
        "solved": 0.5,
        "turns": 11 / 4,
        "tool_calls": 0.5,
        "tool_errors": 0.25,
        "action_tokens": tokens / 11,
        "response_tokens": tokens / 4,
        "action_tokens/turn1": (n(LOOK) + n("down") + n("abc") - 1 + n("a")) / 4,
        "action_tokens/turn2": (n(LOOK) + n("up") + n("a") - 1 + n("a")) / 4,
        "action_tokens/turn3": (n("up") + n("a") + n("a")) / 3,  # one episode was over before
        "sample_tokens": sum(map(len, samples)) / 4,
        "invalid_turns": 0.0,
        "cut_turns": 2 / 11,
        "judge_errors": 1.0,
        "judge_failed": 1 / 9,  # of the answers; two turns only looked
        "trained_groups": 2.0,
        "groups_without_spread": 0.5,
        "status/solved": 0.5,
        "status/max_turns": 0.5,
        **{f"status/{s.value}": 0.0 for s in EpisodeStatus if s.value not in ("solved", "max_turns")},
    }
    assert metrics == pytest.approx(expected)
    shuffled = rollout_metrics(trajectories[::-1], samples[::-1], settings)
    assert shuffled == pytest.approx(expected)


def test_rewards_are_of_all_episodes_whatever_is_trained_on_and_however() -> None:
    """Of an episode its turns' samples have returns of their own, and groups without spread may be left out."""
    trajectories = [
        episode(0, "a", ["down", "up"], WRONG, RIGHT),
        episode(1, "a", ["up"], RIGHT),
        *(episode(member, "b", ["a", "a", "a"], WRONG, WRONG, WRONG) for member in (0, 1)),
    ]
    settings = WorkflowConfig(reward_mode="best", turn_discount=0.5)
    found = rollout_metrics(trajectories, export(trajectories, "concat", "best", 0.5, "tiny"), settings)
    assert (found["reward"], found["groups_without_spread"], found["trained_groups"]) == (0.375, 0.5, 2)
    kept = rollout_metrics(trajectories, export(trajectories[:2], "individual", "best", 0.5, "tiny"), settings)
    told = ("reward", "reward_std", "groups_without_spread")
    assert [kept[name] for name in told] == [found[name] for name in told] and kept["trained_groups"] == 1


def test_second_checkers_are_compared_with_the_term_that_decides() -> None:
    def of(solved: bool, *checks: bool | str) -> Verdict:
        return Verdict(float(solved), solved, checks={f"c{k}": check for k, check in enumerate(checks)})

    done = [
        episode(0, "a", [LOOK, "a", "up"], of(False, False, True), of(True, True, True)),  # one of two disagrees
        episode(1, "a", ["a", "b", "c"], of(False, False, "late"), of(False, "late", "late"), of(False, True)),
        episode(0, "b", ["a", "up"], WRONG, RIGHT),  # no checker
        episode(1, "b", ["up"], of(True, True)),
    ]
    metrics = rollout_metrics(done, export(done, "concat", "best", 1.0, "tiny"), WorkflowConfig())
    assert metrics["judge_disagreement"] == 2 / 5  # the answer on which both checkers failed decides nothing
    assert metrics["judge_checks_failed"] == 2 / 6
    found = by_source(done, "best", 1.0)["all"]
    assert found["judge_disagreement"] == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)  # and nothing where no checker was
    assert list(found)[-1] == "judge_disagreement"
    alone = rollout_metrics(done[2:3], export(done[2:3], "concat", "best", 1.0, "tiny"), WorkflowConfig())
    assert not [name for name in (*alone, *by_source(done[2:3], "best", 1.0)["all"]) if name.startswith("judge_dis")]
    judgements = Judgements()
    judgements.add(done)
    assert judgements.messages() == [
        "a checker of weight 0 failed on 2 of 8 answers: c1: late",
        "a checker of weight 0 failed on 1 of 8 answers: c0: late",
    ]
    judgements.check(0.0, "step0")  # they do not end a run


def test_checks_survive_the_records() -> None:
    verdict = Verdict(1.0, True, terms={"a": 1.0, "b": 0.5}, checks={"b": False, "c": "late"})
    record = json.loads(json.dumps(trajectory_record(episode(0, "a", ["up"], verdict), {})))["turns"][0]["verdict"]
    assert record == {"reward": 1.0, "solved": True, "terms": {"a": 1.0, "b": 0.5}, "checks": {"b": False, "c": "late"}}
    assert verdict_of(record) == verdict
    assert labelled_terms(verdict) == {"a": 1.0, "b (weight 0)": 0.5}
    assert verdict_of({"reward": 0.0, "solved": False, "terms": {}}) == Verdict(0.0, False)  # of an earlier version


def by_source(done: Sequence[Trajectory], mode: Any, discount: float) -> dict[str, dict[str, float]]:
    results = [task_result(t.task, [trajectory_record(t, {})], mode, discount, patch_size=14) for t in done]
    return means_by_source(results)


def test_evaluation_by_data_source_by_hand() -> None:
    """A failed sample counts as wrong; a tool call is a turn and no try."""

    def of(source: str, trajectory: Trajectory) -> Trajectory:
        return dataclasses.replace(trajectory, task=dataclasses.replace(trajectory.task, data_source=source))

    done = [
        of("b", episode(0, "0", [LOOK, "up"], RIGHT)),
        of("a", episode(0, "1", ["down", "up"], WRONG, Verdict(0.5, True))),
        of("b", Trajectory(a_task(), "2", 0, (), EpisodeStatus.FAILED, "too long")),
        of("b", episode(0, "3", ["a", "a", "a"], Verdict(-1.0, False), Verdict(-0.5, False), Verdict(-1.0, False))),
    ]
    found = by_source(done, "best", 1.0)
    assert list(found) == ["a", "b", "all"]
    names = ("tasks", "accuracy", "after_retries", "reward", "turns", "failed", "judge_failed")
    assert found == {
        source: pytest.approx(dict(zip(names, values, strict=True)))
        for source, values in {
            "a": (1, 0, 1, 0.5, 2, 0, 0),
            "b": (3, 1 / 3, 1 / 3, 0.5 / 3, 5 / 3, 1 / 3, 0),
            "all": (4, 0.25, 0.5, 0.25, 7 / 4, 0.25, 0),
        }.items()
    }
    assert by_source([], "best", 1.0) == {"all": {"tasks": 0}}
    gone = episode(0, "4", [LOOK, "up", "up"], JudgeError("gone"), WRONG)
    assert by_source([gone, done[1]], "best", 1.0)["all"]["judge_failed"] == 0.25  # one of two answers, and none
    assert by_source([gone, done[2]], "best", 1.0)["all"]["judge_failed"] == 0.5  # of the other nothing was judged
    assert "judge_failed" not in by_source([done[2]], "best", 1.0)["all"]


@pytest.mark.parametrize(("mode", "first", "second"), [("best", 0.25, 0.2), ("last", 0.25, 0.05), ("sum", 0.25, 0.25)])
def test_the_reward_of_an_evaluation_is_the_one_that_is_trained(mode: Any, first: float, second: float) -> None:
    """Turns halve. The first episode pays 0.5 for looking and earns 1.5 a turn later; the second never looks.

    The best turn alone, without discount or price, would say 1.5 and 0.2.
    """
    settings: dict[str, Any] = {"tools": ("look",), "describe_tools": False, "max_turns": 2, "tool_call_reward": -0.5}
    task = a_task(an_image(28), "?", hidden_image=an_image(56))
    looked = play(workflow(Verdicts([Verdict(1.5, True)]), **settings), [LOOK, "up"], task)
    guessed = play(workflow(Verdicts([Verdict(0.2, False), Verdict(0.1, False)]), **settings), ["a", "a"], task)
    assert looked.turn_rewards == (-0.5, 1.5)
    for played, reward in ((looked, first), (guessed, second)):
        assert by_source([played], mode, 0.5)["all"]["reward"] == pytest.approx(reward)
        assert [sample.reward for sample in export([played], "concat", mode, 0.5, "tiny")] == [pytest.approx(reward)]


def test_throughput_counts_what_was_sampled_by_the_seconds_of_a_step() -> None:
    done = [episode(0, "a", ["down", "up"], WRONG, RIGHT), episode(1, "a", ["up"], RIGHT)]
    sampled = sum(len(encode(text)) + 1 for text in ("down", "up", "up"))
    assert throughput(done, 0.5) == {"sampled_tokens_per_second": sampled * 2, "trajectories_per_second": 4.0}


def test_only_the_first_turns_are_told_one_by_one() -> None:
    done = episode(0, "a", ["a"], RIGHT)
    long = dataclasses.replace(done, turns=done.turns * (FIRST_TURNS + 1))
    found = rollout_metrics([long], export([done], "concat", "sum", 1.0, "tiny"), WorkflowConfig())
    told = [name for name in found if "/turn" in name]
    assert told == [f"action_tokens/turn{k + 1}" for k in range(FIRST_TURNS)]
