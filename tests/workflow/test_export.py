"""Trajectories to samples: rewards, credit, and what is trained."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.algorithms.equality import equal
from npu_vlrl.config import ConfigError
from npu_vlrl.types import EpisodeStatus, SegmentKind, Trajectory, Verdict
from npu_vlrl.workflow.export import export, pays_for_failing, returns_to_go, trajectory_reward
from npu_vlrl.workflow.render import Renderer
from tests.support.scripted import END, Verdicts, a_task, an_image, encode, flat, play, processor, tokenizer, workflow

LOOK = '<tool_call>{"name":"look","arguments":{}}</tool_call>'


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("best", {(0.0, 1.0, 0.5): 0.5, (0.3, 0.4): 0.3, (-1.0, -1.0): -0.5, (2.0,): 2.0, (): 0.0}),
        ("last", {(0.0, 1.0, 0.5): 0.125, (0.3, 0.4): 0.2, (-1.0, -1.0): -0.5, (2.0,): 2.0, (): 0.0}),
        ("sum", {(0.0, 1.0, 0.5): 0.625, (0.3, 0.4): 0.5, (-1.0, -1.0): -1.5, (2.0,): 2.0, (): 0.0}),
    ],
)
def test_trajectory_rewards_by_hand_with_discount_a_half(mode: Any, expected: dict) -> None:
    for rewards, value in expected.items():
        assert trajectory_reward(rewards, rewards, mode, 0.5) == pytest.approx(value)


@given(st.permutations([0.1, 0.2, 0.3, 0.7, -0.4, 1e-9]), st.permutations([0.1, 0.2, 0.3, 0.7, -0.4, 1e-9]))
def test_the_order_of_a_sum_changes_nothing(one: list[float], other: list[float]) -> None:
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1  # as floats are added
    assert trajectory_reward(one, one, "sum", 1.0) == trajectory_reward(other, other, "sum", 1.0)
    nothing = [None] * len(one)  # earned by calling tools
    assert trajectory_reward(one, nothing, "best", 1.0) == trajectory_reward(other, nothing, "best", 1.0)


def test_a_sum_that_overflows_is_infinite_and_no_error() -> None:
    assert trajectory_reward([1e308] * 3, [1e308] * 3, "sum", 1.0) == math.inf


@pytest.mark.parametrize(
    ("lowest", "highest", "same"),
    [
        (0.3, 0.1 + 0.2, True),
        (0.0, 0.1 + 0.2 - 0.3, True),
        (-0.3, -0.3, True),
        (1e6 / 3, 1e6 / 3 + 1e-9, True),
        (0.3, 0.3 + 1e-8, False),
        (0.0, 1e-9, False),
        (-1.0, 1.0, False),
        (1e100, 1.1e100, False),
    ],
)
def test_rewards_are_equal_but_for_rounding(lowest: float, highest: float, same: bool) -> None:
    assert bool(equal(lowest, highest)) is same


@given(
    st.sampled_from(["best", "last", "sum"]),
    st.sampled_from([0.25, 0.5, 0.9, 1.0]),
    st.sampled_from([-1.0, -0.5, 0.0]),
)
def test_what_pays_for_failing_longer_is_found(mode: Any, discount: float, wrong: float) -> None:
    """By playing: two wrong answers against three."""
    earned = [trajectory_reward([wrong] * n, [wrong] * n, mode, discount) for n in (2, 3)]
    assert pays_for_failing(mode, discount, wrong) is (earned[1] > earned[0])


@pytest.mark.parametrize(("mode", "expected"), [("best", 0.5), ("last", 0.25), ("sum", 0.75)])
def test_what_tool_calls_earn_and_cost_is_added_in_every_mode(mode: Any, expected: float) -> None:
    """Turns: a call for 0.4, an answer for 1, a failed call for -0.8, an answer for 2, with discount a half."""
    rewards, verdicts = (0.4, 1.0, -0.8, 2.0), (None, 1.0, None, 2.0)
    calls = 0.4 - 0.2
    answered = {"best": max(0.5, 0.25), "last": 0.25, "sum": 0.75}[mode]
    assert answered == expected
    assert trajectory_reward(rewards, verdicts, mode, 0.5) == pytest.approx(expected + calls)
    assert trajectory_reward(rewards[:1], verdicts[:1], mode, 0.5) == 0.4
    assert trajectory_reward((-1.0,), (None,), mode, 0.5) == -1.0


@pytest.mark.parametrize(("mode", "expected"), [("best", 0.5 - 1.2), ("last", 0.5 - 1.2), ("sum", 0.5 - 1.2)])
def test_what_a_long_answer_costs_is_taken_in_every_mode(mode: Any, expected: float) -> None:
    """A wrong answer that is too long, 0 - 1, and a right one that is a little so, 1 - 0.4, at discount a half."""
    assert trajectory_reward((-1.0, 0.6), (0.0, 1.0), mode, 0.5) == pytest.approx(expected)


def test_returns_to_go_by_hand() -> None:
    assert returns_to_go([0.3, 0.0, 1.0], 0.5) == pytest.approx([0.55, 0.5, 1.0])
    assert returns_to_go([1.0, 2.0, 3.0], 1.0) == [6.0, 5.0, 3.0]
    assert returns_to_go([], 0.9) == []


@given(st.lists(st.floats(-10, 10), max_size=6), st.floats(0.05, 1.0))
@settings(max_examples=60)
def test_rewards_are_their_definitions(rewards: list[float], discount: float) -> None:
    powers = [math.pow(discount, k) for k in range(len(rewards))]
    terms = [p * r for p, r in zip(powers, rewards, strict=True)]
    assert trajectory_reward(rewards, rewards, "sum", discount) == pytest.approx(math.fsum(terms), abs=1e-9)
    assert trajectory_reward(rewards, rewards, "best", discount) == pytest.approx(max(terms, default=0.0), abs=1e-9)
    assert trajectory_reward(rewards, rewards, "last", discount) == pytest.approx(terms[-1] if terms else 0.0, abs=1e-9)
    brute = [
        math.fsum(math.pow(discount, j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))
    ]
    assert returns_to_go(rewards, discount) == pytest.approx(brute, abs=1e-9)


def episode(*rewards: float) -> Trajectory:
    """A look, then one answer for each reward but the first."""
    judge = Verdicts([Verdict(reward, False) for reward in rewards[1:]])
    settings: dict[str, Any] = {"tools": ("look",), "describe_tools": False, "tool_call_reward": rewards[0]}
    task = a_task(an_image(28), "?", hidden_image=an_image(56))
    lines = [LOOK, *"abcdefg"[: len(rewards) - 1]]
    return play(workflow(judge, max_turns=len(rewards), **settings), lines, task)


def test_concat_is_one_sample_with_every_action_trained() -> None:
    done = episode(0.3, 0.0, 1.0)
    (sample,) = export([done], "concat", "sum", 0.5, "tiny")
    assert (sample.id, sample.group, sample.episode, sample.credit) == ("g/0", "g", "g/0", None)
    assert sample.reward == pytest.approx(0.3 + 0.25)
    kinds = [segment.kind.value for segment in sample.segments]
    assert kinds == ["prompt", "action", "observation", "action", "observation", "action"]
    assert sample.trained == (1, 3, 5)
    assert [sample.segments[i] for i in sample.trained] == [turn.action for turn in done.turns]
    assert [image.n_tokens for image in sample.images] == [1, 4]
    # mask 1 exactly on what was sampled: the closing token is, the newline after it is not
    end, newline = encode(END)[0], encode("\n")[0]
    masked = list(zip(sample.token_ids, sample.loss_mask, strict=True))
    after = [masked[i + 1] for i, (token, kept) in enumerate(masked[:-1]) if token == end and kept]
    assert after == [(newline, False)] * 2
    assert sum(sample.loss_mask) == sum(len(turn.action) for turn in done.turns)
    for mode, value in (("best", 0.3 + 0.25), ("last", 0.3 + 0.25)):
        assert export([done], "concat", mode, 0.5, "tiny")[0].reward == pytest.approx(value)  # type: ignore[arg-type]


def test_individual_is_one_sample_for_each_action() -> None:
    done = episode(0.3, 0.0, 1.0)
    samples = export([done], "individual", "best", 0.5, "tiny")
    assert [s.id for s in samples] == ["g/0/0", "g/0/1", "g/0/2"]
    assert [s.reward for s in samples] == pytest.approx([0.55, 0.5, 1.0])
    assert [s.trained for s in samples] == [(1,), (3,), (5,)]
    for sample, turn in zip(samples, done.turns, strict=True):
        assert sample.group == "g"
        assert sample.segments == (*turn.context, turn.action)
        assert tuple(sample.behaviour_logprobs) == turn.action.logprobs
    (whole,) = export([done], "concat", "best", 0.5, "tiny")
    assert [i for s in samples for i in s.behaviour_logprobs] == whole.behaviour_logprobs
    assert samples[-1].token_ids == whole.token_ids


def test_samples_keep_the_order_of_trajectories_and_empty_ones_give_none() -> None:
    first, second = episode(0.0), dataclasses.replace(episode(0.0, 1.0), member=1)
    empty = Trajectory(a_task(), "g", 2, (), EpisodeStatus.FAILED, "g: no")
    for style, ids in (("concat", ["g/1", "g/0"]), ("individual", ["g/1/0", "g/1/1", "g/0/0"])):
        samples = export([second, empty, first], style, "sum", 1.0, "tiny")  # type: ignore[arg-type]
        assert [sample.id for sample in samples] == ids
    assert export([empty], "concat", "sum", 1.0, "tiny") == []


def rewriting() -> Trajectory:
    template = str(tokenizer().chat_template)
    for text in ("message.content", "part.text"):
        template = template.replace(f"{{{{ {text} }}}}", f"{{{{ {text}.split('</think>')[-1] }}}}")
    renderer = Renderer(tokenizer(), processor(), "forgetful", chat_template=template)
    judge = Verdicts([Verdict(0.0, False), Verdict(0.0, False), Verdict(1.0, True)])
    return play(workflow(judge, renderer), ["plain", "<think>hm</think>b", "c"])


def test_concat_refuses_a_template_that_rewrote_history_and_names_the_turn() -> None:
    done = rewriting()
    with pytest.raises(ConfigError, match=r"g/0.*of forgetful rewrote.*before turn 3.*export_style=individual"):
        export([done], "concat", "best", 1.0, "forgetful")
    samples = export([done], "individual", "sum", 1.0, "forgetful")
    assert [s.reward for s in samples] == [1.0, 1.0, 1.0]
    assert [len(s.segments) for s in samples] == [2, 4, 2]
    assert samples[2].segments[0].kind is SegmentKind.PROMPT
    for sample, turn in zip(samples, done.turns, strict=True):
        assert tuple(sample.token_ids) == flat(turn.context) + turn.action.token_ids
