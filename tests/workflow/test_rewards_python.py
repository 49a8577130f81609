"""Which functions of the user's are taken, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.types import JudgeError, Verdict
from npu_vlrl.workflow.rewards import make_judge
from npu_vlrl.workflow.rewards.python import adapted, score

TASK = {"id": "t/1", "answer": "5", "data_source": "geo", "extra": {"unit": "cm"}}


def called(function: Callable[..., Any]) -> Verdict:
    return score(adapted(function, "mine.py:f"), "mine.py:f", TASK, "said", ["before"], [])


def test_verls_parameters_are_given_by_their_names() -> None:
    def whole(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
        assert (data_source, solution_str, ground_truth, extra_info) == ("geo", "said", "5", {"unit": "cm"})
        return 0.5

    def some(ground_truth: Any, solution_str: Any, method: str = "strict", **more: Any) -> bool:
        return (ground_truth, solution_str, method, more) == ("5", "said", "strict", {})

    assert called(whole) == Verdict(0.5, False)
    assert called(some) == Verdict(1.0, True)


def test_verls_result_is_a_score_with_numbers_beside_it() -> None:
    def many(solution_str: Any, ground_truth: Any) -> dict[str, Any]:
        return {"score": 1.0, "acc": True, "format": 0.25, "pred": "5"}

    def odd(solution_str: Any, ground_truth: Any) -> dict[str, Any]:
        return {"score": "high"}

    assert called(many) == Verdict(1.0, True, terms={"acc": 1.0, "format": 0.25})
    with pytest.raises(JudgeError, match="returned reward='high'; it must be a finite number"):
        called(odd)


def test_four_arguments_in_order_are_taken() -> None:
    assert called(lambda a, b, c, d: (a, b, c, d) == (TASK, "said", ["before"], [])).solved
    assert called(lambda *given: len(given) == 4).solved
    assert called(lambda task, text, history, images, more=3: more == 3).solved


@pytest.mark.parametrize(
    "signature",
    ["text", "", "a, b, c, d, e", "a, b, c, *, d", "task, text, history, ground_truth", "solution_str, answer"],
)
def test_any_other_function_is_refused_before_an_answer(tmp_path: Path, signature: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def f({signature}): return 1.0\n")
    with pytest.raises(ValueError, match=r"mine\.py:f takes \(.*def f\(task, text, history, images\), or with verl's"):
        make_judge(f"{file}:f", {}, 1, 5.0)
