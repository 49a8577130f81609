"""Rules called directly: boxes, formats, tags, golds, and what a user's function may return."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import LatexExtractionConfig, parse

from npu_vlrl.tasks.geo3k import reward as geometry3k
from npu_vlrl.types import DataError, JudgeError, Verdict
from npu_vlrl.workflow.rewards import lowest_reward, make_judge, math_verify, python, tagged
from npu_vlrl.workflow.rewards.forms import Asked
from npu_vlrl.workflow.rewards.math_verify import last_box
from npu_vlrl.workflow.thought import split_thought


def boxed(content: str) -> str:
    return f"So it is \\boxed{{{content}}}."


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1 + \boxed{2}}", r"1 + \boxed{2}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{ \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{}", r"\{"),
        (r"\boxed {7}", "7"),
        (r"x = 5 \\\boxed{5}", "5"),
        (r"} {{ \boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{5", None),
        (r"\fbox{42}", None),
        (r"\boxed 42", None),
        (r"\\boxed{42}", None),
        ("The answer is 42.", None),
        ("", None),
    ],
)
def test_last_box(text: str, content: str | None) -> None:
    assert last_box(text) == content


@given(st.text(alphabet=r"\{}abox ed1", max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_box_of_any_balanced_content_is_found(noise: str) -> None:
    """Whatever stands before it, and with the plain braces of `noise` balanced inside it."""
    inside = noise.replace("\\", "").replace("{", "").replace("}", "")
    content = f"{{{inside}}}{inside}"
    assert last_box(noise.replace("\\", "") + " \\boxed{" + content + "}") == content


def test_last_box_is_linear_in_hostile_text() -> None:
    """Ten million characters: with their square in steps it would not end within the time of a test."""
    assert last_box("\\boxed{" * 1_500_000) is None
    assert last_box("\\boxed" + " " * 10_000_000) is None


EQUAL = [
    ("5 \\sqrt { 3 }", "5\\sqrt{3}"),
    ("5 \\sqrt { 3 }", "\\frac{15}{\\sqrt{3}}"),
    ("$5 \\sqrt{3}$", "5\\sqrt{3}"),
    ("11", "11 cm"),
    ("11", "11\\text{ cm}"),
    ("120", "120^\\circ"),
    ("50", "50\\%"),
    ("\\frac{1}{2}", "0.5"),
    ("525/2", "262.5"),
    ("B", "\\text{B}"),
    ("(2,2)", "(2, 2)"),
    ("$\\boxed{\\frac{16}{7}}$", "16/7"),
    ("-3", "\N{MINUS SIGN}3"),
    ("80", "4\\times 20"),
    ("1, 2", "2,1"),
    ("120", "120\N{DEGREE SIGN}"),
    ("5\n", "5"),
]
DIFFERENT = [
    ("\\frac{1}{3}", "\\frac{1}{2}"),
    ("\\frac{1}{23}", "\\frac{12}{3}"),
    ("8.246", "8.2"),
    ("(2,2)", "(3,3)"),
    ("(3,1)", "(4,2)"),
    ("7", "1 \\foo{7}"),
    ("5", ""),
    ("6", "5$ and $6"),
    ("5", "5\x00"),
    ("B", "C"),
]


@pytest.mark.parametrize(("gold", "content"), EQUAL)
def test_math_verify_accepts(gold: str, content: str) -> None:
    verdict = math_verify.score(gold, boxed("99") + boxed(content))
    assert verdict == Verdict(1.0, True, None, {"accuracy": 1.0, "format": 0.0})
    wrong_last = math_verify.score(gold, boxed(content) + boxed("99"))
    assert wrong_last == Verdict(0.0, False, None, {"accuracy": 0.0, "format": 0.0})


@pytest.mark.parametrize(("gold", "content"), DIFFERENT)
def test_math_verify_rejects(gold: str, content: str) -> None:
    verdict = math_verify.score(gold, boxed(content))
    assert (verdict.reward, verdict.solved, verdict.feedback) == (0.0, False, None)


@pytest.mark.parametrize("text", ["", "The answer is 48.", "\\fbox{48}", "\\boxed{48", "48", "$48$"])
def test_math_verify_without_a_box_never_scores(text: str) -> None:
    verdict = math_verify.score("48", text)
    assert (verdict.reward, verdict.solved) == (-1.0, False)
    assert verdict.feedback is not None and "\\boxed{}" in verdict.feedback
    assert sum(verdict.terms.values()) == verdict.reward


def test_an_unparsed_remainder_is_not_dropped() -> None:
    """math-verify's default reads the gold `50 \\sqrt{` as 50: the check that refuses it can fail."""
    assert parse("$50 \\sqrt{$", parsing_timeout=0)[0] == 50
    assert not parse("$50 \\sqrt{$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=0)
    with pytest.raises(DataError, match="cannot be parsed"):
        math_verify.check_gold("50 \\sqrt{")


@pytest.mark.parametrize("gold", [gold for gold, _ in EQUAL] + ["\\frac{x^2}{81}+\\frac{y^2}{9}=1", "60^\\circ", "A"])
def test_good_golds(gold: str) -> None:
    math_verify.check_gold(gold)
    geometry3k.check_gold(gold)


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        ("", "cannot be parsed"),
        ("   ", "cannot be parsed"),
        ("\x0crac{36}{13}", "control character.*backslash"),
        ("2\times 3", "control character"),
        ("\\sqrt{2}\x07", "control character"),
        ("\x00", "control character"),
        ("C\nD", "control character"),
        ("1,5", r"can be read as the list 1, 5 or as the number 1\.5; write a decimal point"),
        ("\\frac{1}{", "cannot be parsed"),
        ("0/0", "does not even equal itself"),
    ],
)
def test_bad_golds_are_data_errors_and_never_a_reward(gold: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        math_verify.check_gold(gold)
    if "itself" not in reason:
        with pytest.raises(DataError, match=reason):
            math_verify.score(gold, boxed(gold))


@pytest.mark.parametrize(
    ("text", "accuracy", "form"),
    [
        ("<think>hm</think>\\boxed{80}", 1, 1),
        ("  <think>hm\nhm</think>\nSo \\boxed{80}.\n", 1, 1),
        ("\\boxed{80}", 1, 0),
        ("<think>hm</think>\\boxed{81}", 0, 1),
        ("<think>\\boxed{80}</think> 80", 0, 0),
        ("<think>\\boxed{81}</think>\\boxed{80}", 1, 1),
        ("<think>The tag <think> is there.</think>\\boxed{80}", 1, 1),
        ("hm\n</think>\n\n\\boxed{80}", 1, 1),
        ("\\boxed{80}</think>", 0, 0),
        ("<think><think>hm</think>\\boxed{80}", 1, 0),
        ("<think>hm</think>\\boxed{80}</think>", 1, 0),
        ("well <think>hm</think>\\boxed{80}", 1, 0),
        ("<think>a</think><think>b</think>\\boxed{80}", 1, 0),
        ("<think>hm \\boxed{80}", 0, 0),
        ("<think>hm</think>\\boxed{80", 0, 0),
        ("<think>hm</think> 80", 0, 0),
        ("", 0, 0),
    ],
)
def test_geometry3k(text: str, accuracy: int, form: int) -> None:
    verdict = geometry3k.score("80", text)
    assert verdict.reward == pytest.approx(0.9 * accuracy + 0.1 * form)
    assert verdict.solved == bool(accuracy)
    assert verdict.terms == pytest.approx({"accuracy": 0.9 * accuracy, "format": 0.1 * form})
    assert (verdict.feedback is None) == (last_box(split_thought(text).answer) is not None)


@pytest.mark.parametrize(
    ("text", "accuracy", "form"),
    [
        ("<answer>left</answer>", 1, 1),
        ("\n <answer> LEFT </answer> ", 1, 1),
        ("<answer>right</answer>", 0, 1),
        ("<answer>sideways</answer>", 0, 0),
        ("I say <answer>left</answer>", 1, 0),
        ("<answer>right</answer><answer>left</answer>", 1, 0),
        ("<answer>left</answer><answer>right</answer>", 0, 0),
        ("<answer><answer>left</answer>", 1, 0),
        ("<answer>left", 0, 0),
        ("left</answer>", 0, 0),
        ("</answer>left<answer>", 0, 0),
        ("<answer></answer>", 0, 0),
        ("left", 0, 0),
        ("", 0, 0),
    ],
)
def test_tagged(text: str, accuracy: int, form: int) -> None:
    verdict = tagged.score("left", text, choices=["Left", "right"])
    assert verdict.reward == pytest.approx(0.9 * accuracy + 0.1 * form)
    assert verdict.solved == bool(accuracy)
    weighted = tagged.score("left", text, choices=["Left", "right"], format_weight=0.25)
    assert weighted.reward == pytest.approx(0.75 * accuracy + 0.25 * form)


def test_tagged_without_choices_takes_any_answer_as_formatted() -> None:
    assert tagged.score("left", "<answer>sideways</answer>").reward == pytest.approx(0.1)
    assert tagged.score("", "<answer></answer>").solved is False


def test_tagged_is_linear_in_hostile_text() -> None:
    assert not tagged.score("left", "<answer>" * 1_300_000).solved
    assert not tagged.score("left", "</answer>" * 1_300_000).solved


@pytest.mark.parametrize("bad", [{"format_weight": 1.5}, {"format_weight": "x"}, {"choices": "left"}, {"choices": [1]}])
def test_tagged_refuses_bad_options_at_start(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        make_judge("tagged", bad, 1, 1.0)


def test_tagged_golds() -> None:
    tagged.check_gold("Left", choices=["left"])
    with pytest.raises(DataError, match="empty"):
        tagged.check_gold(" ")
    with pytest.raises(DataError, match="none of the choices left, right"):
        tagged.check_gold("up", choices=["left", "right"])


def call(result: object) -> Verdict:
    return python.score(lambda asked: result, "mine.py:reward", Asked({}, "", (), ()))


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (True, Verdict(1.0, True)),
        (False, Verdict(0.0, False)),
        (np.bool_(True), Verdict(1.0, True)),
        (1, Verdict(1.0, True)),
        (0.99, Verdict(0.99, False)),
        (np.float32(2.0), Verdict(2.0, True)),
        (-3.5, Verdict(-3.5, False)),
        ({"reward": 0.5}, Verdict(0.5, False)),
        ({"reward": 1.0}, Verdict(1.0, True)),
        ({"reward": 0.9, "solved": np.bool_(True)}, Verdict(0.9, True)),
        (
            {"reward": 1.5, "solved": False, "feedback": "hm", "terms": {"a": 1, "b": np.float64(0.5)}},
            Verdict(1.5, False, "hm", {"a": 1.0, "b": 0.5}),
        ),
    ],
)
def test_what_a_users_function_may_return(result: object, verdict: Verdict) -> None:
    assert call(result) == verdict


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1.0",
        math.nan,
        math.inf,
        np.float32("nan"),
        np.ones(2),
        [1.0],
        {},
        {"reward": None},
        {"reward": math.nan},
        {"reward": 1, "solved": 1},
        {"reward": 1, "feedback": 3},
        {"reward": 1, "terms": [1]},
        {"reward": 1, "terms": {"a": math.inf}},
        {"reward": 1, "score": 2},
    ],
)
def test_what_a_users_function_may_not_return(result: object) -> None:
    with pytest.raises(JudgeError, match=r"mine\.py:reward returned"):
        call(result)


# --- rewards below 0 -------------------------------------------------------------------------------------------------


def test_the_lowest_reward_of_a_rule() -> None:
    assert lowest_reward("math_verify", {}) == -1.0 == math_verify.score("5", "no box").reward
    assert lowest_reward("tagged", {}) == lowest_reward("my.py:score", {}) == 0.0
    terms = {
        "a": {"rule": "math_verify", "weight": 0.5},
        "b": {"rule": "tagged", "weight": 0.25},
        "c": {"rule": "tagged", "weight": -0.125},
    }
    assert lowest_reward("weighted", {"terms": terms}) == -0.5 - 0.125
