"""Scoring of published benchmarks, by hand from their documented rules."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_vlrl.tasks.benchmark import reward as benchmark
from npu_vlrl.tasks.benchmark.reward import _distance, score
from npu_vlrl.types import DataError, Message, Task, Verdict
from npu_vlrl.workflow.rewards import make_judge
from npu_vlrl.workflow.rewards.extract import boxed, first_letter, letter, number, yes_or_no


def right(name: str, answer: str, text: str, **extra: Any) -> bool:
    verdict = score(answer, text, {"benchmark": name, **extra})
    assert verdict == Verdict(float(verdict.solved), verdict.solved, terms={"accuracy": verdict.reward})
    return verdict.solved


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("100", "\\boxed{105}", True),  # 5 % is allowed
        ("100", "\\boxed{95}", True),
        ("100", "\\boxed{105.1}", False),
        ("100", "\\boxed{94.9}", False),
        ("-2", "-2.05", True),
        ("25%", "\\boxed{0.26}", True),  # a percentage is a share
        ("0.25", "\\boxed{26\\%}", True),
        ("25%", "\\boxed{26}", False),
        ("0", "\\boxed{0}", True),
        ("0", "\\boxed{0.0}", True),
        ("0", "\\boxed{0.001}", False),  # a gold of 0 has no tolerance, as published
        ("1000", "\\boxed{1,020}", True),
        ("5", "\\boxed{\\$5.20}", True),
        ("5 cm", "\\boxed{5 m}", False),
        ("5 million", "\\boxed{5{,}100{,}000}", True),
        ("sey", "\\boxed{yes}", False),
        ("Yes", "\\boxed{yes}", True),
        ("Blue", "\\boxed{\\text{blue}}", True),
        ("Blue", "\\boxed{light blue}", False),
        ("Blue", "blue", True),
        ("Blue", "It is blue", False),
        ("2015", "first 2015, no: \\boxed{1900}", False),
        ("nan", "\\boxed{3}", False),
        ("18-29", "\\boxed{18-29}", True),  # an age group, not -11
        ("18-29", "\\boxed{18–29}", True),
        ("18-29", "\\boxed{-11}", False),
        ("2008-09", "\\boxed{2000}", False),
    ],
)
def test_chartqa(answer: str, text: str, expected: bool) -> None:
    assert right("chartqa", answer, text) is expected


CHOICES = ["12 cm", "15 cm", "150 cm"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{B}", True),
        ("\\boxed{(B) 15 cm}", True),
        ("\\boxed{A}", False),
        ("\\boxed{15 cm}", True),
        ("\\boxed{15cm}", True),  # the most similar one
        ("\\boxed{150 cm}", False),
        ("\\boxed{12cm}", False),
        ("\\boxed{15.0 cm}", True),  # the same length
        ("\\boxed{0.15 m}", True),
        ("\\boxed{\\text{Option B}}", True),
        ("Of \\boxed{x^2 + y^2} the root is right. Answer: B", True),
        ('The answer is "15 cm".', True),
        ("So the answer is B.", True),
        ("So the answer is F.", False),
        ("It must be 15 cm", False),  # nothing says that this is the answer
        ("", False),
    ],
)
def test_mathvista_choices(text: str, expected: bool) -> None:
    assert right("mathvista", "15 cm", text, question_type="multi_choice", choices=CHOICES) is expected


@pytest.mark.parametrize(
    ("kind", "precision", "answer", "text", "expected"),
    [
        ("integer", 0, "14", "\\boxed{14}", True),
        ("integer", 0, "14", "\\boxed{14.9}", True),  # officially int(float(…))
        ("integer", 0, "1400", "in all 1,400 people", True),
        ("integer", 0, "14", "14 or \\boxed{15}", False),
        ("integer", 0, "14", "many", False),
        ("integer", 0, "2", "\\boxed{x_2}", False),  # the digits of a name are no number
        ("integer", 0, "15", "\\boxed{12 of 15}", False),
        ("integer", 0, "3", "\\boxed{2^3}", False),
        ("integer", 0, "8", "\\boxed{2^3}", True),
        ("integer", 0, "14", "\\boxed{14 cm}", True),
        ("integer", 0, "1400", "\\boxed{1\\,400}", True),
        ("float", 1, "0.5", "\\boxed{\\frac{1}{2}}", True),
        ("float", 1, "1.2", "\\boxed{1.24}", True),
        ("float", 1, "1.2", "\\boxed{1.26}", False),
        ("float", 2, "0.21", "about 0.2149 m", True),
        ("list", 0, "[1, 2]", "\\boxed{[1, 2]}", True),
        ("list", 0, "[1, 2]", "\\boxed{[2, 1]}", False),
        ("list", 0, "[1, 2]", "\\boxed{[1,2.0]}", True),
        ("text", 0, "yes", "\\boxed{\\text{Yes}}", True),
        ("text", 0, "yes", "\\boxed{sey}", False),
    ],
)
def test_mathvista_free_form(kind: str, precision: int, answer: str, text: str, expected: bool) -> None:
    extra = {"question_type": "free_form", "answer_type": kind, "precision": precision, "choices": []}
    assert right("mathvista", answer, text, **extra) is expected


@pytest.mark.parametrize(
    ("kind", "answer", "text", "expected"),
    [
        ("multi-choice", "C", "\\boxed{C}", True),
        ("multi-choice", "C", "Therefore the answer is (C) 40°", True),
        ("multi-choice", "C", "\\boxed{B}, so not C", False),
        ("free-form", "2\\sqrt{3}", "\\boxed{\\sqrt{12}}", True),
        ("free-form", "$20 \\mathrm{cm}$", "\\boxed{20 \\text{cm}}", True),
        ("free-form", "2\\sqrt{3}", "\\boxed{3\\sqrt{2}}", False),
        ("free-form", "2", "2", False),
    ],
)
def test_mathverse(kind: str, answer: str, text: str, expected: bool) -> None:
    assert right("mathverse", answer, text, question_type=kind) is expected


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("Yes", "Yes", True),
        ("Yes", "yes.", True),
        ("Yes", "Y", True),
        ("Yes", "Yes, there is a dog.", True),
        ("Yes", "No", False),
        ("No", "No, there is none", True),
        ("No", "There is no dog", False),  # only the first four letters count
        ("No", "I think \\boxed{No}", True),
        ("No", "", False),
    ],
)
def test_mme(answer: str, text: str, expected: bool) -> None:
    assert right("mme", answer, text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B", True),
        ("b", True),
        ("B: the red one", True),
        ("(B)", True),
        ("Option B", True),
        ("The answer is B", True),
        ("A", False),
        ("It is B", False),
        ("thinking \\boxed{B}", True),
        ("B? \\boxed{C}", False),
        ("", False),
        ("the answer is ", False),
    ],
)
def test_mmstar(text: str, expected: bool) -> None:
    assert right("mmstar", "B", text) is expected


@pytest.mark.parametrize(
    ("name", "answer", "text", "expected"),
    [
        ("gpqa", "D", "The correct answer is (D)", True),
        ("gpqa", "D", "The correct answer is (A). No: \\boxed{D}", True),
        ("gpqa", "D", "D", False),
        ("aime", "73", "\\boxed{073}", True),
        ("aime", "73", "\\boxed{72}", False),
        ("aime", "73", "73", False),
        ("math500", "\\frac{1}{2}", "\\boxed{0.5}", True),
        ("math500", "\\frac{1}{23}", "\\boxed{\\frac{12}{3}}", False),
        ("math500", "\\text{Evelyn}", "\\boxed{Evelyn}", True),
        ("math500", "\\text{Evelyn}", "\\boxed{Carla}", False),
        ("math500", "\\left(3, \\frac{\\pi}{2}\\right)", "\\boxed{(3,\\frac{\\pi}{2})}", True),
    ],
)
def test_letters_and_mathematics(name: str, answer: str, text: str, expected: bool) -> None:
    assert right(name, answer, text) is expected


def test_finding_by_hand() -> None:
    assert [letter(t) for t in ("\\boxed{a cat}", "answer: b", "Answer: B", "answer **C**", "answers B")] == [
        None,
        None,
        "B",
        "C",
        None,
    ]
    assert [number(t) for t in ("5-3", "is -3", "1,234.5", "x", "1e9999", ".5")] == [3.0, -3.0, 1234.5, None, None, 0.5]
    assert boxed(" as it is ") == "as it is" and boxed("\\boxed{$x$}") == "x"
    assert (first_letter("1"), yes_or_no("maybe")) == (None, None)


@given(st.text(alphabet="boxed{}\\answer is()AB 12.,-%yesno", max_size=60))
def test_any_text_is_judged(text: str) -> None:
    for name in benchmark._RULES:
        extra = {"benchmark": name, "question_type": "multi_choice", "choices": ["1", "2"]}
        assert score("A", text, extra).reward in (0.0, 1.0)
        assert score("1.5", text, {"benchmark": name, "answer_type": "float", "precision": 1}).reward in (0.0, 1.0)


@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_edit_distance_by_its_definition(one: str, other: str) -> None:
    @functools.cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        same = one[i - 1] == other[j - 1]
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (not same))

    assert _distance(one, other) == distance(len(one), len(other))


def test_a_judge_of_a_configuration_reads_the_task(tmp_path: Any) -> None:
    judge = make_judge("benchmark", {}, workers=1, deadline_s=60)
    try:
        judge.check_gold("B")
        with pytest.raises(DataError, match="the gold answer is empty"):
            judge.check_gold(" ")
        extra = {"benchmark": "mathvista", "question_type": "multi_choice", "choices": CHOICES}
        task = Task("t", (Message("user", ("?",)),), "15 cm", "mathvista", extra)
        verdict = asyncio.run(judge.judge(task, "\\boxed{B}", ()))
        assert verdict == Verdict(1.0, True, terms={"accuracy": 1.0})
        with pytest.raises(DataError, match=r"task t: extra_info\.benchmark is None; make the data with"):
            asyncio.run(judge.judge(Task("t", task.messages, "x", "mine"), "\\boxed{B}", ()))
    finally:
        judge.close()
    with pytest.raises(ValueError, match="option of the rule 'benchmark'"):
        make_judge("benchmark", {"name": "mme"}, workers=1, deadline_s=60)
