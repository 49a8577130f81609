"""Which functions of the user's are taken, what they are called with, and what they may return."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_vlrl.types import JudgeError, Verdict
from npu_vlrl.workflow.rewards import make_judge
from npu_vlrl.workflow.rewards.forms import Asked, Chat, adapted
from npu_vlrl.workflow.rewards.python import MAX_TERMS, score

TASK = {"id": "t/1", "answer": "5", "data_source": "geo", "extra": {"unit": "cm", "difficulty": 3}}
MESSAGES = [("system", "Be brief."), ("user", "Find x.")]


def called(function: Callable[..., Any], text: str = "said") -> Verdict:
    return score(adapted(function, "mine.py:f"), "mine.py:f", Asked(TASK, text, ["before"], [], MESSAGES))


def test_our_own_names_in_any_order_and_number() -> None:
    def whole(images: Any, history: Any, text: Any, task: Any) -> bool:
        return (task, text, history, images) == (TASK, "said", ["before"], [])

    assert called(whole).solved
    assert called(lambda text: text == "said").solved
    assert called(lambda text, *, more=3: (text, more) == ("said", 3)).solved
    assert called(lambda task, **rest: set(rest) == {"text", "history", "images"}).solved


def test_verls_parameters_are_given_by_their_names() -> None:
    def whole(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
        assert (data_source, solution_str, ground_truth, extra_info) == ("geo", "said", "5", TASK["extra"])
        return 0.5

    def some(ground_truth: Any, solution_str: Any, method: str = "strict", **more: Any) -> bool:
        rest = {"data_source": "geo", "extra_info": TASK["extra"]}
        return (ground_truth, solution_str, method, more) == ("5", "said", "strict", rest)

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


def test_verls_batch_functions_are_given_lists_of_one() -> None:
    def whole(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, scale: float = 2.0) -> Any:
        assert (data_sources, extra_infos) == (["geo"], [TASK["extra"]])
        return [
            {"score": scale * (solution == gold)} for solution, gold in zip(solution_strs, ground_truths, strict=True)
        ]

    def plain(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> Any:
        return np.array([float(solution == gold) for solution, gold in zip(solution_strs, ground_truths, strict=True)])

    assert called(whole, "5") == Verdict(2.0, True, terms={})
    assert called(whole, "6").reward == 0.0
    assert called(plain, "5") == Verdict(1.0, True)
    with pytest.raises(JudgeError, match=r"mine\.py:f: it returned 0\.5, and was asked about a list of one answer"):
        called(lambda solution_strs, ground_truths: 0.5)
    with pytest.raises(JudgeError, match=r"it returned \[1\.0, 1\.0\]"):
        called(lambda solution_strs: [1.0, 1.0])


def test_trls_functions_as_its_documents_write_them() -> None:
    def longer(completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    def formatted(completions: Any, **kwargs: Any) -> list[float]:
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.match(r"^<answer>.*?</answer>$", content) else 0.0 for content in contents]

    def right(completions: Any, ground_truth: Any, **kwargs: Any) -> list[float]:
        found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
        contents = [match.group(1) if match else "" for match in found]
        return [1.0 if c == gold else 0.0 for c, gold in zip(contents, ground_truth, strict=True)]

    def with_columns(
        prompts: Any, completions: Any, solution: Any, difficulty: Any, log_extra: Any = None
    ) -> list[Any]:
        assert log_extra is None and prompts[0][-1] == {"role": "user", "content": "Find x."}
        return [d * (str(c) == gold) for c, gold, d in zip(completions, solution, difficulty, strict=True)]

    assert called(longer, "12345").reward == 5.0
    assert called(formatted, "<answer>5</answer>").reward == 1.0
    assert called(formatted, "5").reward == 0.0
    assert called(right, "so \\boxed{5}").reward == 1.0
    assert called(right, "so \\boxed{6}").reward == 0.0
    assert called(with_columns, "5").reward == 3.0
    assert called(lambda completions, **columns: [columns["unit"] == ["cm"] and columns["id"] == ["t/1"]]).solved
    with pytest.raises(JudgeError, match="returned reward=None"):  # "not for this row", in TRL
        called(lambda completions, **_: [None])
    with pytest.raises(JudgeError, match="it takes colour, and the task has only answer, solution, ground_truth, id,"):
        called(lambda completions, colour: [1.0])


def test_a_chat_is_a_text_and_messages_and_says_when_it_cannot_be_both() -> None:
    chat = Chat([("user", "{a"), ("assistant", "b}")])
    assert chat == "{a\nb}" and len(chat) == 5 and "a\nb" in chat and chat[1:3] == "a\n" and chat.upper() == "{A\nB}"
    assert chat[0] == {"role": "user", "content": "{a"} and chat[-1]["content"] == "b}"
    assert type(str(chat)) is str and str(chat)[0] == "{"
    for wrong in (list, lambda c: c[0] == "{", lambda c: c[0] != "{", lambda c: c[0] in ("{", "[")):
        with pytest.raises(TypeError, match="write str"):
            wrong(chat)  # type: ignore[operator]


def test_easyr1s_functions() -> None:
    def one(reward_input: dict[str, Any], format_weight: float = 0.1) -> dict[str, float]:
        if not isinstance(reward_input, dict):
            raise ValueError
        accuracy = float(reward_input["response"] == reward_input["ground_truth"])
        return {"overall": (1 - format_weight) * accuracy, "format": 0.0, "accuracy": accuracy}

    def batch(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
        if not isinstance(reward_inputs, list):
            raise ValueError
        return [one(each, format_weight) for each in reward_inputs]

    for function in (one, batch):  # solved though the format is missing
        assert called(function, "5") == Verdict(0.9, True, terms={"format": 0.0, "accuracy": 1.0})
        assert called(function, "6") == Verdict(0.0, False, terms={"format": 0.0, "accuracy": 0.0})
    with pytest.raises(
        JudgeError, match=r"mine\.py:f: it uses 'response_length' of its input, where only response, gro"
    ):
        called(lambda reward_inputs: [{"overall": each["response_length"]} for each in reward_inputs])
    with pytest.raises(JudgeError, match="EasyR1's form returns a dict with 'overall'"):
        called(lambda reward_input: 0.5)


def test_areals_functions() -> None:
    def equal(prompt: Any, completions: Any, prompt_ids: Any, completion_ids: Any, answer: Any, **kwargs: Any) -> int:
        assert (prompt, kwargs["unit"]) == ("Be brief.\nFind x.", "cm")
        return int(completions.strip() == answer.strip())

    assert called(equal, " 5 ") == Verdict(1.0, True)
    assert called(equal, "6") == Verdict(0.0, False)
    for uses in (len, list, bool, lambda ids: ids[0], lambda ids: ids.tolist()):
        with pytest.raises(JudgeError, match=r"mine\.py:f: it uses completion_ids, and a reward is told texts"):
            called(lambda prompt, completions, prompt_ids, completion_ids, uses=uses: uses(completion_ids))


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        ("", "these parameters are of none"),
        ("a, b, c, d", "these parameters are of none"),
        ("*given", "these parameters are of none"),
        ("*args, **kwargs", "these parameters are of none"),
        ("response, label", "these parameters are of none"),
        ("completion_ids, **kwargs", "these parameters are of none"),
        ("task, text, history, ground_truth", "task, text, history cannot be given in verl's"),
        ("task, text, pictures", "pictures cannot be given in ours"),
        ("text, ground_truth=None", "text cannot be given in verl's"),
        ("task, /, text", "task cannot be given in ours"),
        ("solution_str, answer", "answer cannot be given in verl's"),
        ("solution_str, ground_truth, images=()", "images cannot be given in verl's"),
        ("data_source, solution_strs", "solution_strs cannot be given in verl's"),
        ("completions, trainer_state, **kwargs", "trainer_state cannot be given in TRL's"),
        ("reward_inputs, max_response_length", "max_response_length cannot be given in EasyR1's"),
    ],
)
def test_any_other_function_is_refused_by_name(signature: str, reason: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def f({signature}): return 1.0", names)
    message = r"mine\.py:f takes \(.*\); write it as def f\(task, text, history, images\), or with verl's .*"
    message += re.escape(reason)
    with pytest.raises(ValueError, match=message) as refused:
        adapted(names["f"], "mine.py:f")
    for form in ("verl's", "TRL's", "EasyR1's", "AReaL's"):
        assert form in str(refused.value)


def test_it_is_refused_before_an_answer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(data_sourcez, solution_strz, golds, extras): return 0.0\n")
    with pytest.raises(ValueError, match=r"mine\.py:f takes \(data_sourcez, solution_strz, golds, extras\)"):
        make_judge(f"{tmp_path}/mine.py:f", {}, 1, 5.0)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (1e308, "returned reward=1e+308; it must be a finite number of at most ±1e+06"),
        (-1_000_001, "returned reward=-1000001"),
        (10**400, "returned reward=1000000"),
        (10**5000, "returned reward=a value of type int (ValueError)"),
        (float("inf"), "returned reward=inf"),
        ({"reward": 0, "terms": {"a": float("nan")}}, "returned terms['a']=nan"),
        ({"reward": 0, "terms": {"a": 10**400}}, "returned terms['a']=1000"),
        (
            {"reward": 0, "feedback": "no \ud83d"},
            "returned a feedback that holds half a surrogate pair, '\\ud83d' (char",
        ),
        ({"reward": 0, "feedback": "\x00"}, "returned a feedback that holds a NUL"),
        ({"reward": 0, "feedback": "x" * 10**6}, "returned a feedback that holds 1,000,000 characters, more than 100"),
        ({"reward": 0, "terms": {"a\udc00": 1}}, "returned a term whose name holds half a surrogate pair"),
        ({"reward": 0, "terms": {"a" * 300: 1}}, "returned a term whose name holds 300 characters"),
        ({"reward": 0, "terms": {str(i): 1 for i in range(MAX_TERMS + 1)}}, "returned terms={'0': 1, "),
        ({"reward": 0, "\ud800": 1}, "returned the unknown key '\\ud800'"),
        ("x" * 10**6, "returned reward='xxx"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_training_can_use_is_the_judges_failure(returned: Any, reason: str) -> None:
    with pytest.raises(JudgeError, match=re.escape(f"mine.py:f {reason}")) as failed:
        called(lambda text: returned)
    assert len(str(failed.value)) < 500
    str(failed.value).encode()


def test_the_largest_reward_and_messages_of_exceptions() -> None:
    assert called(lambda text: -1e6) == Verdict(-1e6, False)
    assert called(lambda solution_str: {"score": 1, "time": 1.7e9}).terms == {"time": 1.7e9}  # which nothing sums

    def raises(text: str) -> float:
        raise ValueError("a\ud800" + "x" * 10**6)

    with pytest.raises(
        JudgeError, match=r"mine\.py:f raised ValueError: a\\ud800x.*… \(1,000,014 characters\)"
    ) as failed:
        called(raises)
    assert len(str(failed.value)) < 3000
