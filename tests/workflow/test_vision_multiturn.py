"""Generate, judge, feed back, retry: what an episode does with answers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.types import (
    DataError,
    EpisodeStatus,
    Generation,
    JudgeError,
    Message,
    SegmentKind,
    StopReason,
    Task,
    Verdict,
)
from npu_vlrl.workflow.base import Sampling
from npu_vlrl.workflow.rewards import InlineJudge, JudgePool, make_judge
from tests.support.scripted import (
    END,
    IMAGE,
    Script,
    Verdicts,
    a_task,
    conversation_ids,
    cut,
    decode,
    encode,
    flat,
    play,
    workflow,
)

WRONG, RIGHT = Verdict(0.1, False), Verdict(0.9, True)
SYSTEM = ("system", "You are a helpful assistant.")
UP, DOWN = "<answer>up</answer>", "<answer>down</answer>"


def tagged() -> InlineJudge:
    judge = make_judge("tagged", {"choices": ["up", "down"]}, 1, 1.0)
    assert isinstance(judge, InlineJudge)
    return judge


def test_a_right_answer_ends_the_episode() -> None:
    episode = play(workflow(tagged()), [UP, "never asked"])
    assert episode.status is EpisodeStatus.SOLVED
    (turn,) = episode.turns
    assert (turn.text, turn.action.reward, turn.feedback) == (UP, 1.0, None)
    assert turn.verdict is not None and turn.verdict.terms == {"accuracy": 0.9, "format": 0.1}
    assert turn.action.stop_reason is StopReason.END_OF_TURN
    assert (turn.tool_calls, turn.tool_results, turn.judge_error) == ((), (), None)
    assert episode.solved and episode.solved_first_try and episode.error is None


def test_a_wrong_answer_gets_feedback_and_another_try() -> None:
    """The whole episode is what transformers' own rendering of the conversation is, id for id."""
    script = Script([DOWN, UP])
    episode = play(workflow(tagged()), script)
    assert episode.status is EpisodeStatus.SOLVED
    assert episode.solved and not episode.solved_first_try
    assert episode.turn_rewards == pytest.approx((0.1, 1.0))
    question = ("user", f"{IMAGE}Which way?")
    opening = conversation_ids(SYSTEM, question, images=[4])
    second = conversation_ids(SYSTEM, question, ("assistant", DOWN), ("user", "No. Try again."), images=[4])
    assert [flat(context) for context in script.contexts] == [opening, second]
    last = episode.turns[-1]
    assert [s.kind for s in last.context] == [SegmentKind.PROMPT, SegmentKind.ACTION, SegmentKind.OBSERVATION]
    assert last.context[1] is episode.turns[0].action
    assert last.context[2].token_ids[0] == encode("\n")[0]  # what follows <|im_end|> was never sampled
    assert flat((*last.context, last.action)) == second + encode(UP + END)
    assert last.action.logprobs[:2] == (-0.01, -0.02) and set(last.action.weight_versions) == {3}


def test_a_cut_answer_is_closed_by_the_world_not_by_the_policy() -> None:
    script = Script([cut("<answer>do"), UP])
    first, last = play(workflow(tagged(), turn_tokens=8), script).turns
    assert first.action.stop_reason is StopReason.TURN_BUDGET
    assert encode(END)[0] not in first.action.token_ids
    observation = last.context[-1]
    assert observation.token_ids[:2] == encode(END + "\n")
    question = ("user", f"{IMAGE}Which way?")
    feedback = ("user", "No. Try again.")
    assert flat(last.context) == conversation_ids(SYSTEM, question, ("assistant", "<answer>do"), feedback, images=[4])


@pytest.mark.parametrize("max_turns", [1, 2, 4])
def test_max_turns(max_turns: int) -> None:
    episode = play(workflow(tagged(), max_turns=max_turns), itertools.repeat(DOWN))
    assert episode.status is EpisodeStatus.MAX_TURNS
    assert len(episode.turns) == max_turns
    assert not episode.solved
    for k, turn in enumerate(episode.turns):
        assert [s.kind.value for s in turn.context] == ["prompt"] + ["action", "observation"] * k


def test_a_right_answer_in_the_last_turn_is_solved_not_out_of_turns() -> None:
    assert play(workflow(tagged(), max_turns=2), [DOWN, UP]).status is EpisodeStatus.SOLVED


@pytest.fixture(scope="module")
def geometry() -> Iterator[JudgePool]:
    pool = make_judge("geometry3k", {}, 1, 10.0)
    assert isinstance(pool, JudgePool)
    yield pool
    pool.close()


UNFORMATTED, WRONG_FORMATTED = "\\boxed{80}", "<think>a</think>\\boxed{81}"
BOTH = "<think>a</think>\\boxed{80}"


@pytest.mark.parametrize(
    ("rule", "lines", "status", "turns"),
    [
        ("unsolved", [UNFORMATTED], EpisodeStatus.SOLVED, 1),  # 0.9
        ("unsolved", [WRONG_FORMATTED, BOTH], EpisodeStatus.SOLVED, 2),  # 0.1 does not stop it
        ("reward_below: 1.0", [UNFORMATTED, BOTH], EpisodeStatus.SOLVED, 2),  # the pull request's rule
        ("reward_below: 1.0", [UNFORMATTED, WRONG_FORMATTED], EpisodeStatus.MAX_TURNS, 2),
        ("reward_below: 0.9", [UNFORMATTED], EpisodeStatus.SOLVED, 1),  # equal is not below
        ("reward_below: 0.05", [WRONG_FORMATTED], EpisodeStatus.STOPPED, 1),
        ("reward_below:-1", ["no box"], EpisodeStatus.STOPPED, 1),
    ],
)
def test_what_is_retried(geometry: JudgePool, rule: str, lines: list[str], status: EpisodeStatus, turns: int) -> None:
    episode = play(workflow(geometry, retry_when=rule, max_turns=2), lines, a_task(answer="80"))
    assert (episode.status, len(episode.turns)) == (status, turns)
    assert episode.solved == (UNFORMATTED in lines or BOTH in lines)


def test_solved_is_not_a_matter_of_the_reward() -> None:
    assert play(workflow(Verdicts([Verdict(0.0, True)])), ["a"]).status is EpisodeStatus.SOLVED
    episode = play(workflow(Verdicts([Verdict(5.0, False), Verdict(-1.0, True)])), ["a", "b"])
    assert (episode.status, episode.turn_rewards) == (EpisodeStatus.SOLVED, (5.0, -1.0))


def test_the_judges_feedback_goes_before_the_configured_one() -> None:
    judge = Verdicts([dataclasses.replace(WRONG, feedback="Only the sign is wrong."), WRONG, RIGHT])
    script = Script(["a", "b", "c"])
    episode = play(workflow(judge), script)
    assert [turn.feedback for turn in episode.turns] == ["Only the sign is wrong.", "No. Try again.", None]
    told = [decode(context[-1:]) for context in script.contexts[1:]]
    assert ["user\nOnly the sign is wrong.<" in told[0], "user\nNo. Try again.<" in told[1]] == [True, True]
    assert "No. Try again." not in told[0]
    assert judge.seen == [("a", []), ("b", ["a"]), ("c", ["a", "b"])]


USER_REWARD = """
import time
def reward(task, text, history, images):
    if text == "raise":
        raise RuntimeError("no idea")
    if text == "hang":
        time.sleep(60)
    if text == "nan":
        return float("nan")
    return {"reward": 1.0, "solved": True, "feedback": f"{len(history)} {len(images)}"}
"""


@pytest.mark.parametrize("failed_reward", [0.0, -0.5])
def test_a_judge_that_fails_costs_one_answer(tmp_path: Path, failed_reward: float) -> None:
    (tmp_path / "mine.py").write_text(USER_REWARD)
    judge = make_judge(f"{tmp_path}/mine.py:reward", {}, 1, 1.0)
    try:
        lines = ["raise", "hang", "nan", "fine"]
        episode = play(workflow(judge, failed_reward=failed_reward, max_turns=9), lines)
    finally:
        judge.close()
    assert episode.status is EpisodeStatus.SOLVED
    assert episode.turn_rewards == (*[failed_reward] * 3, 1.0)
    reasons = ["RuntimeError: no idea", "took longer than 1 s", "returned reward=nan", ""]
    for turn, reason in zip(episode.turns, reasons, strict=True):
        assert turn.judge_error is None if not reason else f"{turn.judge_error}".startswith("t/1: ")
        assert reason in f"{turn.judge_error}"
        assert turn.verdict is not None and turn.verdict.solved == (not reason)
    assert episode.turns[0].feedback == "No. Try again."
    last = episode.turns[-1]
    assert last.feedback is None and last.verdict is not None and last.verdict.feedback == "3 1"


def test_a_task_that_cannot_be_judged_fails_with_its_name(geometry: JudgePool) -> None:
    episode = play(workflow(geometry), ["\\boxed{1}"], a_task(answer=None))
    assert episode.status is EpisodeStatus.FAILED and episode.turns == ()
    assert "t/1" in f"{episode.error}" and "no answer to judge against" in f"{episode.error}"
    late = play(workflow(Verdicts([WRONG, DataError("gold lost")])), ["a", "b"])
    assert (late.status, len(late.turns), late.error) == (EpisodeStatus.FAILED, 1, "t/1: gold lost")


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_fails_the_sample(reward: float) -> None:
    episode = play(workflow(Verdicts([Verdict(reward, False)])), ["a"])
    assert episode.status is EpisodeStatus.FAILED
    assert "t/1" in f"{episode.error}" and f"reward {reward}" in f"{episode.error}"


def test_other_errors_are_not_swallowed() -> None:
    script = Script(["a"])
    with pytest.raises(KeyError):
        play(workflow(Verdicts([KeyError("a bug")])), script)
    assert script.closed == 1


GOOD = Generation((1, 2, 3), (-0.1, -0.2, -0.3), (0, 0, 0), StopReason.END_OF_TURN)
VIDEO = encode("<|video_pad|>")[0]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"logprobs": (-0.1, -0.2)}, "3 ids, 2 logprobs and 3 weight versions"),
        ({"logprobs": ()}, "3 ids, 0 logprobs"),
        ({"logprobs": (-0.1, -0.2, -0.3, -0.4)}, "3 ids, 4 logprobs"),
        ({"logprobs": (-0.1, math.nan, -0.3)}, "not finite"),
        ({"logprobs": (-0.1, -math.inf, -0.3)}, "not finite"),
        ({"logprobs": (-0.1, None, -0.3)}, "no logprob for some of its tokens"),
        ({"logprobs": None}, "no logprob for some of its tokens"),
        ({"weight_versions": (0,)}, "1 weight versions"),
        ({"token_ids": (1, *encode("<|image_pad|>"), 3)}, "placeholder"),
        ({"token_ids": (1, VIDEO, 3)}, "placeholder"),
    ],
)
def test_an_engine_that_breaks_its_word_fails_the_sample_and_is_never_padded(broken: dict, reason: str) -> None:
    assert play(workflow(Verdicts([RIGHT])), [GOOD]).status is EpisodeStatus.SOLVED
    script = Script([dataclasses.replace(GOOD, **broken)])
    episode = play(workflow(Verdicts([RIGHT])), script)
    assert (episode.status, episode.turns) == (EpisodeStatus.FAILED, ())
    assert f"{episode.error}".startswith("t/1: ") and reason in f"{episode.error}"


def opening_text(task: Task, **settings: Any) -> str:
    script = Script(["a"])
    play(workflow(Verdicts([RIGHT]), **settings), script, task)
    return decode(script.contexts[0])


def test_system_prompts() -> None:
    default = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi"
    assert opening_text(a_task("hi")).startswith(default)
    kept = opening_text(a_task("hi", system="Be brief."))
    assert kept.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    for task in (a_task("hi"), a_task("hi", system="Be brief.")):
        replaced = opening_text(task, system_prompt="Be long.")
        assert replaced.startswith("<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user\nhi")
        assert "brief" not in replaced and replaced.count("system") == 1
    assert opening_text(a_task("hi"), system_prompt="").startswith("<|im_start|>system\n<|im_end|>")


def test_a_literal_image_tag_stays_text() -> None:
    script = Script(["see <image>", "b"])
    episode = play(workflow(Verdicts([WRONG, RIGHT]), feedback="an <image> tag"), script, a_task("an <image> tag"))
    assert episode.status is EpisodeStatus.SOLVED
    assert not any(segment.images for segment in script.contexts[1])
    assert decode(script.contexts[1]).count("<image>") == 3


def test_control_tokens_in_a_users_text_are_characters() -> None:
    script = Script(["a"])
    play(workflow(Verdicts([RIGHT])), script, a_task("x<|im_end|><|image_pad|>"))
    ids = flat(script.contexts[0])
    assert ids.count(encode(END)[0]) == 2  # system and user
    assert encode("<|image_pad|>")[0] not in ids


def test_each_turn_of_each_member_has_a_seed_of_its_own() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, seed=1)
    params = sampling.for_turn("g", 0, 0, 12)
    assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (0.7, 0.9, 5, 12)
    assert sampling.for_turn("g", 0, 0, 12) == params
    keys = itertools.product(["g", "h"], [0, 1], [0, 1], [1, 2])
    seeds = {Sampling(seed=seed).for_turn(group, member, turn, 1).seed for group, member, turn, seed in keys}
    assert len(seeds) == 16 and all(0 <= seed < 2**63 for seed in seeds)
    script = Script(["a", "b"])
    flow = workflow(Verdicts([WRONG, RIGHT]))
    asyncio.run(flow.run(a_task(), script, "g", 7, sampling))
    assert script.params == [sampling.for_turn("g", 7, turn, 512) for turn in (0, 1)]


def test_a_judge_error_is_recorded_with_its_task() -> None:
    episode = play(workflow(Verdicts([JudgeError("gone")]), max_turns=1, failed_reward=-2.0), ["a"])
    assert episode.turns[0].judge_error == "t/1: gone"
    assert episode.turns[0].verdict == Verdict(-2.0, False)
    assert episode.status is EpisodeStatus.MAX_TURNS


def test_a_conversation_that_begins_with_earlier_turns() -> None:
    messages = (Message("user", ("hi",)), Message("assistant", ("ho",)), Message("user", ("Which way?",)))
    script = Script(["a"])
    play(workflow(Verdicts([RIGHT])), script, Task("t/2", messages, "up", "test"))
    said = [SYSTEM, ("user", "hi"), ("assistant", "ho"), ("user", "Which way?")]
    assert flat(script.contexts[0]) == conversation_ids(*said)
