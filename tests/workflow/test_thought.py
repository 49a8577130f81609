"""Where a thought begins and ends, and that nothing in it counts: for no rule, no tool and no format."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.tasks.benchmark import reward as benchmark
from npu_vlrl.tasks.geo3k import reward as geometry3k
from npu_vlrl.tasks.rotation import broad as rotation_broad
from npu_vlrl.tasks.rotation import strict as rotation_strict
from npu_vlrl.types import ToolCall, Verdict
from npu_vlrl.workflow.rewards import math_verify, tagged
from npu_vlrl.workflow.thought import SplitTurn, opened_thought, split_thought
from npu_vlrl.workflow.tools import parse_tool_calls

CALL = '<tool_call>{"name": "rotate", "arguments": {"angle": 90}}</tool_call>'
ROTATE = ToolCall("rotate", {"angle": 90})

CASES = [
    # text, first thought, answer, finished
    ("", None, "", True),
    ("60", None, "60", True),
    ("<think>a</think>60", "a", "60", True),
    ("  <think>\na\n</think>\n\n60\n", "\na\n", "60", True),
    ("<think></think>", "", "", True),
    # a template opened it
    ("a\n</think>\n\n60", "a\n", "60", True),
    ("</think>60", "", "60", True),
    # cut off
    ("<think>a", None, "", False),
    ("<think>", None, "", False),
    ("<think>\n\\boxed{1} <think> \\boxed{2}", None, "", False),
    ("So: <think>a", None, "So:", False),
    # text before
    ("So: <think>a</think>60", "a", "So:  60", True),
    # tags inside of a thought
    ("<think>a <think> b</think>60", "a <think> b", "60", True),
    ("<think><think>a</think>60", "<think>a", "60", True),
    ("<think>a <think>b</think> c</think> 60", "a <think>b", "c</think> 60", True),
    # several thoughts
    ("<think>a</think><think>b</think>60", "a", "60", True),
    ("<think>a</think>6 <think>b</think>0", "a", "6  0", True),
    ("a</think>b<think>c</think>60", "a", "b 60", True),
    ("<think>a</think><think>60", "a", "", False),
    ("<think>a</think>59\n  <think>60", "a", "59", False),
    # mentions in the answer
    ("<think>a</think>The tag </think> ends it: 60", "a", "The tag </think> ends it: 60", True),
    ("<think>a</think>The tag <think> begins it: 60", "a", "The tag <think> begins it: 60", True),
    ("<think>a</think>6 </think> 0 <think> 0", "a", "6 </think> 0 <think> 0", True),
    # other tags
    ("<thinking>a</thinking>60", None, "<thinking>a</thinking>60", True),
    ("< think>a</ think>60", None, "< think>a</ think>60", True),
]


@pytest.mark.parametrize(("text", "thought", "answer", "finished"), CASES)
def test_split(text: str, thought: str | None, answer: str, finished: bool) -> None:
    said = split_thought(text)
    assert (said.thought, said.answer, said.finished) == (thought, answer, finished)
    assert said.holds_nothing == (not finished and not answer)
    assert split_thought(said.finished_text).answer == answer and split_thought(said.finished_text).finished


@pytest.mark.parametrize(("text", "thought", "answer", "finished"), CASES)
def test_a_turn_with_the_tag_of_the_template_reads_like_what_was_sampled(
    text: str, thought: str | None, answer: str, finished: bool
) -> None:
    """Sampled text without any opening tag, and the same behind the template's `<think>`."""
    if "<think>" not in text and "</think>" in text:
        assert split_thought(f"<think>{text}").answer == answer
        assert split_thought(f"<think>{text}").thought == thought


def test_without_an_end_all_that_follows_the_templates_tag_is_thought() -> None:
    """Only the workflow, which knows the generation prompt, can tell this from an answer."""
    assert split_thought("\\boxed{1}").answer == "\\boxed{1}"
    assert split_thought("<think>\n\\boxed{1}").holds_nothing


TOKENS = st.sampled_from(["<think>", "</think>", "a", "b", " ", "\n", "<", ">"])


@given(st.lists(TOKENS, max_size=12).map("".join))
@settings(max_examples=400, deadline=None)
def test_nothing_is_lost_and_positions_stay(text: str) -> None:
    said = split_thought(text)
    assert len(said.blanked) == len(text)
    assert all(said.blanked[a:b] == " " * (b - a) for a, b in said.spans)
    kept = [i for i in range(len(text)) if not any(a <= i < b for a, b in said.spans)]
    assert all(said.blanked[i] == text[i] for i in kept)
    assert "".join("".join(text[i] for i in kept).split()) == "".join(said.answer.split())
    assert [a for a, _ in said.spans] == sorted(a for a, _ in said.spans)
    ended = said.spans if said.finished else said.spans[:-1]
    assert all(text[:b].endswith("</think>") for _, b in ended)
    assert said.finished or said.spans[-1][1] == len(text)


@given(st.lists(TOKENS, max_size=12).map("".join))
@settings(max_examples=400, deadline=None)
def test_the_first_thought_by_a_regular_expression(text: str) -> None:
    found = re.match(r"(?:(?:(?!</?think>).)*<think>)?((?:(?!</think>).)*)</think>", text, re.DOTALL)
    assert split_thought(text).thought == (None if found is None else found[1])


@pytest.mark.parametrize("evil", ["<think>", "</think>", "x<think>", "\n<think>", "<think></think>", " ", "</think> "])
def test_time_is_linear(evil: str) -> None:
    for text in (evil * 200_000, f"<think></think>{evil * 200_000}"):
        began = time.process_time()
        said = split_thought(text)
        assert isinstance(said.answer, str) and len(said.blanked) == len(text)
        assert time.process_time() - began < 20  # quadratic time would take hours


def test_generation_prompts() -> None:
    head = "<|im_start|>assistant\n"
    assert opened_thought(head) == ""
    assert opened_thought(head + "<think>\n") == "<think>\n"
    assert opened_thought(head + "<think>\n\n</think>\n\n") == ""
    assert opened_thought(head + "<think>\nLet me") == "<think>\nLet me"
    assert opened_thought(head + "<think>\n</think>\n<think>") == "<think>"


# Calls


@pytest.mark.parametrize(
    ("text", "calls", "errors"),
    [
        (f"<think>I might write {CALL} later.</think>\n{CALL}", 1, 0),
        (f"<think>No {CALL} is needed.</think>\n\\boxed{{60}}", 0, 0),
        (f"No {CALL} is needed.\n</think>\n\n\\boxed{{60}}", 0, 0),
        ("<think>The tag <tool_call> is of no use here.</think>\n\\boxed{60}", 0, 0),
        (f"<think>I might write {CALL}", 0, 0),  # cut off
        (f"<think>a</think>{CALL}<think>Or {CALL}</think>{CALL}", 2, 0),
        (f"<think>a</think>{CALL}\n<think>Or {CALL}", 1, 0),
        (f"{CALL}<think>Or {CALL}", 1, 0),
        (f"<think>{CALL}", 0, 0),
        ("<think>a</think><tool_call>", 0, 1),
        (f"<think>a</think>{CALL}</think>", 1, 0),
    ],
)
def test_calls_outside_of_thoughts_are_read(text: str, calls: int, errors: int) -> None:
    parsed = parse_tool_calls(text)
    assert parsed.calls == (ROTATE,) * calls
    assert len(parsed.errors) == errors


def test_arguments_keep_tags_of_thoughts() -> None:
    arguments = '{"label": "<think>a</think> <think>"}'
    parsed = parse_tool_calls(f'<think>b</think><tool_call>{{"name": "note", "arguments": {arguments}}}</tool_call>')
    assert parsed.calls == (ToolCall("note", {"label": "<think>a</think> <think>"}),)


# Rules

Score = Callable[[str], Verdict]
CHOICES = {"benchmark": "mmstar"}
RULES: dict[str, tuple[Score, str, str]] = {
    "math_verify": (lambda text: math_verify.score("60", text), "\\boxed{60}", "\\boxed{61}"),
    "geometry3k": (lambda text: geometry3k.score("60", text), "\\boxed{60}", "\\boxed{61}"),
    "tagged": (lambda text: tagged.score("up", text), "<answer>up</answer>", "<answer>down</answer>"),
    "rotation_broad": (lambda text: rotation_broad.score("90", text), "<answer>90</answer>", "<answer>180</answer>"),
    "rotation_strict": (lambda text: rotation_strict.score("90", text), "<answer>90</answer>", "<answer>180</answer>"),
    "mmstar": (lambda text: benchmark.score("B", text, {"benchmark": "mmstar"}), "\\boxed{B}", "\\boxed{C}"),
    "gpqa": (lambda text: benchmark.score("B", text, {"benchmark": "gpqa"}), "The answer is B", "The answer is C"),
    "mme": (lambda text: benchmark.score("Yes", text, {"benchmark": "mme"}), "Yes", "No"),
    "math500": (lambda text: benchmark.score("60", text, {"benchmark": "math500"}), "\\boxed{60}", "\\boxed{61}"),
    "chartqa": (lambda text: benchmark.score("Fox", text, {"benchmark": "chartqa"}), "\\boxed{Fox}", "\\boxed{Owl}"),
    "mathvista": (
        lambda text: benchmark.score("60", text, {"benchmark": "mathvista", "answer_type": "integer"}),
        "\\boxed{60}",
        "\\boxed{61}",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_judges_what_is_drafted_in_a_thought(rule: str) -> None:
    score, right, wrong = RULES[rule]
    plain, empty = score(right), score("")
    assert plain.solved and not score(wrong).solved
    for opening in ("<think>", "<think>\n", ""):
        assert score(f"{opening}Maybe {wrong}.</think>{right}").solved
        assert not score(f"{opening}Maybe {right}.</think>{wrong}").solved
        assert score(f"{opening}Maybe {right}.</think>").reward == empty.reward
    assert score(f"<think>Maybe {right}") == empty  # cut off: nothing was said
    assert score(f"{right}\n<think>Or {wrong}").solved


def test_the_format_of_a_tagged_answer_is_that_of_what_follows_the_thought() -> None:
    for text in ("<answer>up</answer>", "<think>a</think>\n<answer>up</answer>", "a\n</think>\n\n<answer>up</answer>"):
        assert tagged.score("up", text).terms == {"accuracy": 0.9, "format": 0.1}
    assert tagged.score("up", "<think>a</think>So <answer>up</answer>").terms == {"accuracy": 0.9, "format": 0.0}


def test_a_split_turn_shows_what_it_is_made_of() -> None:
    assert split_thought("<think>a</think>b") == SplitTurn("<think>a</think>b", ((0, 16),), finished=True)
