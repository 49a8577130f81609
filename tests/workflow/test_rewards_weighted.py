"""Weighted sums: every term by name, what decides `solved`, golds, hostile answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_vlrl.common.registry import RULES
from npu_vlrl.report.verdicts import disagrees
from npu_vlrl.types import DataError, JudgeError, Message, Task, Verdict
from npu_vlrl.workflow.rewards import JudgePool, WeightedJudge, make_judge

FILE = """
import time

def brevity(task, text, history, images):
    if text == "hang":
        time.sleep(60)
    return {"reward": 1 - len(text) / 100, "solved": False, "feedback": "Be brief." if len(text) > 50 else None}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "brief.py"
    path.write_text(FILE)
    return path


def terms(file: Path) -> dict[str, Any]:
    return {
        "accuracy": {"rule": "geometry3k", "weight": 0.8},
        "brief": {"rule": f"{file}:brevity", "weight": 0.2},
        "angle": {"rule": "rotation_strict", "weight": -1, "options": {"distance": "linear"}},
    }


@pytest.fixture(scope="module")
def judge(file: Path) -> Iterator[WeightedJudge]:
    made = make_judge("weighted", {"terms": terms(file)}, workers=1, deadline_s=1.5)
    assert isinstance(made, WeightedJudge)
    yield made
    made.close()


def ask(judge: Any, text: str, answer: str | None = "5") -> Verdict:
    return asyncio.run(judge.judge(Task("t/1", (Message("user", ("?",)),), answer, "test"), text, ()))


@pytest.mark.parametrize(
    ("text", "accuracy", "brief", "angle"),
    [
        ("\\boxed{5}", 0.9, 0.91, 0.0),
        ("\\boxed{6}", 0.0, 0.91, 0.0),
        ("<think>a</think>\\boxed{5}", 1.0, 0.75, 0.0),
        ("\\boxed{5}<answer>14</answer>", 0.9, 0.72, 0.8),
    ],
)
def test_every_term_is_kept_by_name(
    judge: WeightedJudge, text: str, accuracy: float, brief: float, angle: float
) -> None:
    verdict = ask(judge, text)
    assert verdict.terms == pytest.approx({"accuracy": 0.8 * accuracy, "brief": 0.2 * brief, "angle": -angle})
    assert list(verdict.terms) == ["accuracy", "brief", "angle"]
    assert verdict.reward == pytest.approx(0.8 * accuracy + 0.2 * brief - angle)
    assert verdict.solved is ("{5}" in text)  # by the first term


def test_solved_by_another_term_and_feedback_of_all(file: Path) -> None:
    options = {"terms": {**terms(file), "again": {"rule": "math_verify", "weight": 0}}, "solved_by": "angle"}
    judge = make_judge("weighted", options, 1, 10.0)
    assert ask(judge, "<answer>4</answer>").solved
    verdict = ask(judge, "\\boxed{5}")
    assert not verdict.solved and verdict.terms["again"] == 1.0
    said = str(ask(judge, "x" * 60).feedback)
    judge.close()
    assert said == (
        "Your answer has no \\boxed{}. Put your final answer in \\boxed{}. Be brief. "
        "Your answer holds no angle. Write it in degrees as <answer>90</answer>."
    )


SECOND = """
import time

def second(text):
    if "hang" in text:
        time.sleep(60)
    return {"reward": 7.0, "solved": "yes" in text, "feedback": "Of the second checker."}
"""


def test_a_term_of_weight_0_is_recorded_with_its_own_reward_and_has_no_say(tmp_path: Path) -> None:
    (tmp_path / "second.py").write_text(SECOND)
    both = {
        "accuracy": {"rule": "tagged", "weight": 2, "options": {"format_weight": 0}},
        "second": {"rule": f"{tmp_path}/second.py:second", "weight": 0},
    }
    judge = make_judge("weighted", {"terms": both}, 1, 2.0)
    right = ask(judge, "yes <answer>5</answer>")
    assert right == Verdict(2.0, True, None, {"accuracy": 2.0, "second": 7.0}, {"second": True})
    assert disagrees(right) is False
    wrong = ask(judge, "yes <answer>6</answer>")
    assert wrong == Verdict(0.0, False, None, {"accuracy": 0.0, "second": 7.0}, {"second": True})
    assert disagrees(wrong) is True
    unknown = ask(judge, "hang <answer>5</answer>")  # a checker that fails costs the answer nothing
    assert (unknown.reward, unknown.solved, unknown.terms, disagrees(unknown)) == (2.0, True, {"accuracy": 2.0}, None)
    assert unknown.checks == {"second": "task t/1: the rule 'python' took longer than 2 s and was stopped"}
    judge.close()
    deciding = make_judge("weighted", {"terms": both, "solved_by": "second"}, 1, 10.0)
    verdict = ask(deciding, "yes <answer>6</answer>")
    assert verdict == Verdict(0.0, True, "Of the second checker.", {"accuracy": 0.0, "second": 7.0}, {"second": True})
    deciding.close()


def test_a_sum_beyond_what_an_answer_may_earn_is_the_judges_failure(tmp_path: Path) -> None:
    (tmp_path / "much.py").write_text("def much(text): return 1e6\n")
    much = {"rule": f"{tmp_path}/much.py:much"}
    judge = make_judge("weighted", {"terms": {"a": {**much, "weight": 1}, "b": {**much, "weight": 1e-3}}}, 1, 10.0)
    with pytest.raises(
        JudgeError, match=r"task t/1: the weighted sum is 1\.001e\+06, beyond ±1e\+06; lower the weights"
    ):
        ask(judge, "5")
    judge.close()


@pytest.mark.parametrize("hostile", ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{(10^{8})!}", "hang"])
def test_a_hostile_answer_costs_one_deadline_and_the_next_is_judged_right(judge: WeightedJudge, hostile: str) -> None:
    assert ask(judge, "\\boxed{5}").solved  # started
    with pytest.raises(JudgeError, match=r"task t/1: the rule '(geometry3k|python)' took longer than 1\.5 s"):
        ask(judge, hostile)
    assert ask(judge, "\\boxed{5}").solved


def test_golds_are_checked_by_every_term(judge: WeightedJudge) -> None:
    judge.check_gold("5")
    with pytest.raises(DataError, match="reward term 'accuracy': the gold answer '' cannot be parsed"):
        judge.check_gold("")
    with pytest.raises(DataError, match="reward term 'angle': the gold answer 'B' is no angle"):
        judge.check_gold("B")
    with pytest.raises(DataError, match="task t/1 has no answer"):
        ask(judge, "\\boxed{5}", None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "needs the option 'terms', such as"),
        ({"terms": {}}, "needs the option 'terms'"),
        ({"terms": [1]}, "needs the option 'terms'"),
        ({"term": {}}, "unknown option of the rule 'weighted': 'term'; did you mean 'terms'"),
        ({"terms": {"a": "tagged"}}, "reward term 'a' is 'tagged'; it needs rule and weight"),
        ({"terms": {"a": {"rule": "tagged"}}}, "reward term 'a' is .* it needs rule and weight"),
        ({"terms": {"a": {"rule": "tagged", "weight": 1, "wieght": 2}}}, "and nothing else"),
        ({"terms": {"a": {"rule": "tagged", "weight": "1"}}}, "reward term 'a': weight is '1'"),
        ({"terms": {"a": {"rule": "tagged", "weight": True}}}, "weight is True; it must be a finite number"),
        ({"terms": {"a": {"rule": "tagged", "weight": float("nan")}}}, "weight is nan"),
        ({"terms": {"a": {"rule": "tagged", "weight": -1e308}}}, "weight is -1e.308; it must be a finite number of at"),
        ({"terms": {"a": {"rule": "tagged", "weight": 10**400}}}, "it must be a finite number of at most ±1e"),
        ({"terms": {"a": {"rule": "tagged", "weight": 1, "options": [1]}}}, "options a mapping"),
        ({"terms": {"a": {"rule": 3, "weight": 1}}}, "rule must be a name"),
        (
            {"terms": {"a": {"rule": "taged", "weight": 1}}},
            "reward term 'a': unknown reward rule 'taged'; did you mean",
        ),
        (
            {"terms": {"a": {"rule": "tagged", "weight": 1, "options": {"choice": []}}}},
            "'choice'; did you mean 'choices'",
        ),
        (
            {"terms": {"a": {"rule": "tagged", "weight": 1}}, "solved_by": "b"},
            "solved_by is 'b'; it must be one of the terms a",
        ),
    ],
)
def test_bad_options_are_refused_at_start_and_name_the_term(options: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_judge("weighted", options, 1, 1.0)


def test_a_refused_sum_leaves_no_process_behind(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[JudgePool] = []
    close = JudgePool.close
    monkeypatch.setattr(JudgePool, "close", lambda pool: (closed.append(pool), close(pool)))
    with pytest.raises(ValueError, match="reward term 'other': unknown reward rule"):
        make_judge("weighted", {"terms": {**terms(file), "other": {"rule": "zzz", "weight": 1}}}, 1, 1.0)
    assert len(closed) == 2  # the pools of two terms; the third is judged in place


def test_the_sum_of_the_document_is_made_and_its_table_names_every_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    assert {f"`{rule}`" for rule in [*RULES, "weighted"]} <= set(re.findall(r"^\| (`\w+`)", text, re.MULTILINE))
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_reward.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    reward = yaml.safe_load(block)["reward"]
    judge = make_judge(reward["rule"], reward["options"], 1, 10.0)
    verdict = ask(judge, "\\boxed{5}<answer>14</answer>")
    judge.close()
    assert verdict.terms == pytest.approx({"accuracy": 0.81, "short": 0.072, "angle": 0.4})
    assert verdict.solved
