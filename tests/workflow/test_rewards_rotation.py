"""Rewards for an angle, by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.tasks.rotation import broad as rotation_broad
from npu_vlrl.tasks.rotation import strict as rotation_strict
from npu_vlrl.tasks.rotation.angle import NO_ANGLE_FEEDBACK, apart, read_angle
from npu_vlrl.types import DataError, Verdict
from npu_vlrl.workflow.rewards import InlineJudge, make_judge


def said(angle: object) -> str:
    return f"<think>hm</think><answer>{angle}</answer>"


@pytest.mark.parametrize(
    ("gold", "angle", "broad", "strict"),
    [
        ("90", 90, 1.0, 1.0),
        ("90", 81, 0.95, 0.8),
        ("90", 99, 0.95, 0.8),
        ("10", 350, 160 / 180, 25 / 45),
        ("350", 10, 160 / 180, 25 / 45),
        ("0", 360, 1.0, 1.0),
        ("0", -720, 1.0, 1.0),
        ("0", 45, 0.75, 0.0),
        ("0", 45.1, 1 - 45.1 / 180, 0.0),
        ("0", 180, 0.0, 0.0),
        ("-90", 270, 1.0, 1.0),
        ("37.5", 30, 1 - 7.5 / 180, 1 - 7.5 / 45),
    ],
)
def test_circular(gold: str, angle: float, broad: float, strict: float) -> None:
    for rule, reward in ((rotation_broad, broad), (rotation_strict, strict)):
        verdict = rule.score(gold, said(angle))
        assert verdict.reward == pytest.approx(reward)
        assert verdict.terms == {"angle": verdict.reward} and verdict.feedback is None


@pytest.mark.parametrize(
    ("gold", "angle", "broad", "strict"),
    [("10", 350, 0.0, 0.0), ("10", 100, 0.5, 0.0), ("0", 360, 0.0, 0.0), ("350", 341, 0.95, 0.8)],
)
def test_linear(gold: str, angle: float, broad: float, strict: float) -> None:
    assert rotation_broad.score(gold, said(angle), distance="linear").reward == pytest.approx(broad)
    assert rotation_strict.score(gold, said(angle), distance="linear").reward == pytest.approx(strict)


@given(st.floats(-1000, 1000), st.floats(-1000, 1000))
@settings(max_examples=50, deadline=None)
def test_circular_distance_is_that_of_points_on_a_circle(a: float, b: float) -> None:
    dot = math.cos(math.radians(a)) * math.cos(math.radians(b)) + math.sin(math.radians(a)) * math.sin(math.radians(b))
    assert apart(a, b, "circular") == pytest.approx(math.degrees(math.acos(max(-1.0, min(1.0, dot)))), abs=1e-4)
    assert apart(a, b, "linear") == abs(a - b)


@pytest.mark.parametrize(
    ("angle", "within", "solved"), [(95, 5, True), (95.1, 5, False), (90, 0, True), (91, 0, False)]
)
def test_solved_has_a_tolerance_of_its_own(angle: float, within: float, solved: bool) -> None:
    for rule in (rotation_broad, rotation_strict):
        assert rule.score("90", said(angle), solved_within=within).solved is solved


@pytest.mark.parametrize(
    ("content", "angle"),
    [
        ("90", 90.0),
        (" +90.5 ", 90.5),
        ("-.5", -0.5),
        ("90.", 90.0),
        ("90°", 90.0),
        ("90 degrees", 90.0),
        ("1 Degree", 1.0),
        ("90^\\circ", 90.0),
        ("90^{\\circ}", 90.0),
        ("", None),
        ("ninety", None),
        ("90 or 91", None),
        ("1e3", 1000.0),
        ("1,080", 1080.0),
        ("37,5", 37.5),
        ("９０º", 90.0),
        ("\\frac{45}{2}^\\circ", 22.5),
        ("x = 90", 90.0),
        ("\\pi/2", None),
        ("90 rad", None),
        ("90°C", None),
        ("nan", None),
        ("inf", None),
        ("90 cm", None),
        ("٩٠", None),
        ("9" * 41, None),
    ],
)
def test_reading_an_angle(content: str, angle: float | None) -> None:
    assert read_angle(content) == angle
    verdict = rotation_broad.score("90", said(content))
    if angle is None:
        assert verdict == Verdict(0.0, False, NO_ANGLE_FEEDBACK, {"angle": 0.0})


@pytest.mark.parametrize(
    "text", ["", "90", "<answer>90", "90</answer>", "\\boxed{90}", "<answer>90</answer><answer>?</answer>"]
)
def test_without_an_angle_in_the_last_tag_there_is_no_reward(text: str) -> None:
    verdict = rotation_strict.score("90", text)
    assert (verdict.reward, verdict.solved, verdict.feedback) == (0.0, False, NO_ANGLE_FEEDBACK)


def test_golds() -> None:
    for rule in ("rotation_broad", "rotation_strict"):
        judge = make_judge(rule, {"distance": "linear", "solved_within": 2}, 1, 1.0)
        assert isinstance(judge, InlineJudge)
        judge.check_gold("37.5")
        for gold in ("", "left", "nan", "1e400"):
            with pytest.raises(DataError, match="is no angle; write a number of degrees"):
                judge.check_gold(gold)
    with pytest.raises(DataError, match="the gold answer 'up' is no angle"):
        rotation_broad.score("up", said(3))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"distance": "round"}, "distance is 'round'; it must be 'circular' or 'linear'"),
        ({"solved_within": -1}, "solved_within is -1"),
        ({"solved_within": True}, "solved_within is True"),
        ({"solved_within": "5"}, "solved_within is '5'"),
        ({"solved_within": math.nan}, "solved_within is nan"),
        ({"distence": "linear"}, "did you mean 'distance'"),
    ],
)
def test_bad_options_are_refused_at_start(options: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_judge("rotation_strict", options, 1, 1.0)


def test_hostile_texts_have_no_angle() -> None:
    for text in (said("9" * 1_000_000), said("-" * 1_000_000), said(" " * 1_000_000), "<answer>" * 130_000):
        assert rotation_broad.score("90", text).reward == 0.0
