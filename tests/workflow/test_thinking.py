"""Episodes under the published templates of Qwen3-VL Instruct and Thinking: calls, answers, formats and feedback."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from npu_vlrl.config import ConfigError, EnvironmentConfig
from npu_vlrl.rollout.demonstrations import played
from npu_vlrl.tasks.geo3k import reward as geometry3k
from npu_vlrl.tasks.turned import script
from npu_vlrl.training.warm_start import demonstrated_samples
from npu_vlrl.types import EpisodeStatus, Image, SegmentKind, StopReason, Task, Trajectory, Verdict
from npu_vlrl.workflow.environments import GameEnvironment
from npu_vlrl.workflow.export import export
from npu_vlrl.workflow.render import Renderer
from npu_vlrl.workflow.rewards import InlineJudge, tagged
from npu_vlrl.workflow.thought import UNFINISHED_FEEDBACK
from npu_vlrl.workflow.vision_multiturn import VisionMultiTurnAgenticWorkflow
from tests.support.corridor import Corridor
from tests.support.scripted import (
    END,
    Script,
    Verdicts,
    a_task,
    an_image,
    cut,
    decode,
    encode,
    flat,
    play,
    processor,
    tokenizer,
    workflow,
)
from tests.support.tokenizers import template

INSTRUCT, THINKING = "qwen3_vl", "qwen3_vl_thinking"
OPENED = {INSTRUCT: "", THINKING: "<think>\n"}
"""What each template writes of a thought into the generation prompt."""

ROTATE = '<tool_call>\n{"name": "rotate", "arguments": {"angle": 90}}\n</tool_call>'
FLIP = '<tool_call>\n{"name": "flip", "arguments": {"direction": "vertical"}}\n</tool_call>'
LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
FEEDBACK = "No. Try again."
BOTH = pytest.mark.parametrize("name", OPENED)


@cache
def renderer(name: str) -> Renderer:
    return Renderer(tokenizer(), processor(), template_name=name, chat_template=template(name))


def turn(name: str, thought: str, answer: str) -> str:
    """What a policy samples: it writes `<think>` itself only where the template has not."""
    opening = "" if OPENED[name] else "<think>\n"
    return f"{opening}{thought}\n</think>\n\n{answer}"


def geometry(**settings: Any) -> Any:
    return InlineJudge(geometry3k.score, geometry3k.check_gold)


def episode(name: str, lines: list[Any], judge: Any = None, **settings: Any) -> tuple[Trajectory, Script]:
    said = Script(lines)
    flow = workflow(judge or geometry(), renderer(name), sees=processor(), **settings)
    return play(flow, said, a_task(an_image(), "What is x?", answer="60")), said


@BOTH
def test_who_opens_the_thought(name: str) -> None:
    chat = renderer(name)
    assert chat.opens_thought == bool(OPENED[name])
    assert chat.open(a_task().messages).opened_thought == OPENED[name]


@BOTH
def test_an_episode_with_a_tool_earns_its_format_reward(name: str) -> None:
    """A call is drafted, another one made; an answer is drafted, another one given."""
    lines = [
        turn(name, f"I could write {FLIP} or {ROTATE}. The tag <tool_call> begins a call.", ROTATE),
        turn(name, f"Not \\boxed{{59}}, and no {FLIP}.", "\\boxed{60}"),
    ]
    done, said = episode(name, lines, tools=("rotate", "flip"), tool_call_reward=0.3)
    assert done.status is EpisodeStatus.SOLVED
    first, second = done.turns
    assert [call.name for call in first.tool_calls] == ["rotate"] and first.verdict is None
    assert first.action.reward == 0.3
    assert second.verdict == Verdict(1.0, True, terms={"accuracy": 0.9, "format": 0.1})
    # all is kept as it was sampled, and the history of the second turn goes on from it
    for turn_, line in zip(done.turns, lines, strict=True):
        assert turn_.action.token_ids == (*encode(line), *encode(END))
        assert turn_.text == OPENED[name] + line
    assert done.rewritten_turn() is None
    assert said.contexts[1][:2] == (*first.context, first.action)
    opened = f"<|im_start|>assistant\n{OPENED[name]}"
    assert decode(said.contexts[0]).endswith(opened) and decode(said.contexts[1]).endswith(opened)
    (sample,) = export([done], "concat", "best", 1.0, name)
    assert sum(sample.loss_mask) == sum(len(encode(line)) + 1 for line in lines)


@BOTH
@pytest.mark.parametrize("ended", [True, False])
def test_a_thought_without_an_end_calls_nothing_and_answers_nothing(name: str, ended: bool) -> None:
    """Cut off by the token budget, or ended by the policy: the rule is asked about an empty text."""
    start = "" if OPENED[name] else "<think>\n"
    line = f"{start}Maybe {ROTATE} and then \\boxed{{60}}"
    judge = Verdicts([Verdict(-1.0, False, "Your answer has no box."), Verdict(1.0, True)])
    done, said = episode(name, [line if ended else cut(line), turn(name, "hm", "4")], judge, tools=("rotate",))
    first = done.turns[0]
    assert first.action.stop_reason is (StopReason.END_OF_TURN if ended else StopReason.TURN_BUDGET)
    assert (first.tool_calls, first.tool_results) == ((), ())
    assert first.verdict is not None and first.action.reward == -1.0
    assert first.feedback == UNFINISHED_FEEDBACK and "<think>" not in UNFINISHED_FEEDBACK
    answer = f"<think>\n{'hm'}\n</think>\n\n4"
    assert judge.seen == [("", []), (answer, [f"<think>\nMaybe {ROTATE} and then \\boxed{{60}}"])]
    # the template shows a thought without an end as it was sampled
    assert said.contexts[1][:2] == (*first.context, first.action)
    assert decode(said.contexts[1]).count("<think>") == 1 + bool(OPENED[name])


def test_a_judge_sees_no_thought_without_an_end() -> None:
    """A function of a user's may look for a box anywhere in the text."""
    judge = Verdicts([Verdict(0.0, False), Verdict(0.0, False, "Look again."), Verdict(1.0, True)])
    lines = [cut("Sure. <think>\\boxed{60}"), cut("\\boxed{5}\n<think>No, \\boxed{60}"), "\\boxed{6}"]
    done, _ = episode(INSTRUCT, lines, judge)
    assert [text for text, _ in judge.seen] == ["Sure. ", "\\boxed{5}\n", "\\boxed{6}"]
    assert [t.feedback for t in done.turns] == [FEEDBACK, "Look again.", None]


@BOTH
def test_an_unfinished_thought_scores_what_no_answer_scores(name: str) -> None:
    start = "" if OPENED[name] else "<think>\n"
    done, _ = episode(name, [cut(f"{start}\\boxed{{60}}")], max_turns=1)
    (only,) = done.turns
    assert only.verdict is not None and not only.verdict.solved and only.action.reward == 0.0


@BOTH
def test_feedback_after_a_thought(name: str) -> None:
    """Thinking drops the thought of an earlier turn, so the next turn has a fresh prompt; Instruct keeps it."""
    lines = [turn(name, "five?", "\\boxed{5}"), turn(name, "sixty", "\\boxed{60}")]
    done, said = episode(name, lines)
    first, second = done.turns
    assert [t.verdict and t.verdict.terms["format"] for t in done.turns] == [0.1, 0.1]
    assert first.feedback == FEEDBACK
    assert first.action.token_ids == (*encode(lines[0]), *encode(END))
    if name == INSTRUCT:
        assert second.context[:2] == (*first.context, first.action)
        assert len(export([done], "concat", "best", 1.0, name)) == 1
        return
    assert [segment.kind for segment in second.context] == [SegmentKind.PROMPT]
    history = decode(second.context)
    assert "five?" not in history and "\\boxed{5}<|im_end|>" in history
    assert history.endswith(f"{FEEDBACK}<|im_end|>\n<|im_start|>assistant\n<think>\n")
    with pytest.raises(ConfigError, match="qwen3_vl_thinking rewrote the history before turn 2"):
        export([done], "concat", "best", 1.0, name)
    samples = export([done], "individual", "best", 1.0, name)
    assert [flat(s.segments) for s in samples] == [flat((*t.context, t.action)) for t in done.turns]
    assert [sum(s.loss_mask) for s in samples] == [len(t.action) for t in done.turns]


def test_a_template_can_decide_for_each_conversation() -> None:
    """Some templates open a thought unless the system message says otherwise."""
    marker = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    closed = "{%- if messages[0].role == 'system' %}{{- '\\n</think>\\n\\n' }}{%- endif %}"
    assert marker in template(THINKING)
    chat = Renderer(tokenizer(), processor(), "both", template(THINKING).replace(marker, marker + closed))
    flow = workflow(geometry(), chat)
    opened = play(flow, ["hm\n</think>\n\n\\boxed{60}"], a_task("x?", answer="60"))
    shut = play(flow, ["\\boxed{60}"], a_task("x?", answer="60", system="/no_think"))
    assert [t.turns[0].text for t in (opened, shut)] == ["<think>\nhm\n</think>\n\n\\boxed{60}", "\\boxed{60}"]
    assert [t.turns[0].action.reward for t in (opened, shut)] == [1.0, 0.9]


def test_text_of_others_opens_no_thought() -> None:
    for text in ("<think>\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"):
        assert renderer(INSTRUCT).open(a_task(text).messages).opened_thought == ""
        assert renderer(THINKING).open(a_task(f"</think>{text}</think>").messages).opened_thought == "<think>\n"


# Games


def game_flow(name: str, form: str, **changes: Any) -> VisionMultiTurnAgenticWorkflow:
    settings = EnvironmentConfig(name="corridor", format=form, format_reward=0.5, **changes)  # type: ignore[arg-type]
    flow = workflow(Verdicts([]), renderer(name), max_turns=3)
    opened = flow.renderer.opens_thought
    flow.new_environment = lambda: GameEnvironment(Corridor(5, 0.0), settings, opened)
    return flow


def seeded() -> Task:
    return Task("corridor/0", (), None, "corridor", {"seed": 0})


@pytest.mark.parametrize("form", ["free_think", "grounding", "no_think"])
@BOTH
def test_a_demonstration_of_a_game_is_in_the_format(name: str, form: str) -> None:
    flow = game_flow(name, form)
    settings, opened = flow.new_environment().config, flow.renderer.opens_thought  # type: ignore[attr-defined]
    lines = played(Corridor(5, 0.0), 0, settings, 1.0, random.Random(0), opened)
    done = play(flow, lines, seeded())
    assert done.status is EpisodeStatus.SOLVED
    assert all(t.verdict is not None and t.verdict.terms["format"] == 0.5 for t in done.turns)
    sampled = [t.text.removeprefix(OPENED[name]) for t in done.turns]
    assert all(text.startswith("<think>") == (form != "no_think" and name == INSTRUCT) for text in sampled)


@BOTH
def test_a_game_asks_for_no_second_tag(name: str) -> None:
    flow = game_flow(name, "free_think")
    start = "" if OPENED[name] else "<think>"
    lines = [cut(f"{start}Maybe <answer>Right</answer>"), "Right", f"{start}go</think><answer>Right</answer>"]
    done = play(flow, lines, seeded())
    rules = decode(done.turns[0].context)
    own = rules.rpartition("<|im_start|>assistant")[0]
    assert own.count("<think>…") == (name == INSTRUCT)
    assert ("<think> is written already. Go on exactly in this form: …</think>" in own) == (name == THINKING)
    first, second, third = done.turns
    form = "<think>…</think><answer>…</answer>" if name == INSTRUCT else "…</think><answer>…</answer>"
    assert first.feedback == f"Nothing was done. {UNFINISHED_FEEDBACK} Write {form}\n"
    # under Thinking even a bare word is a thought without an end
    said = "" if name == INSTRUCT else f"{UNFINISHED_FEEDBACK} "
    assert second.feedback == f"Nothing was done. {said}Write {form}\n"
    assert third.verdict is not None and third.verdict.terms["format"] == 0.5


# Warm start


@BOTH
def test_demonstrations_of_generated_tasks(name: str) -> None:
    shown = Image(an_image(28, 1).rgb)
    task = a_task(an_image(28), "Which way?", answer="up", hidden_image=shown)
    lines = script(task, 0.0, random.Random(0), 2, renderer(name).opens_thought)
    judge = InlineJudge(tagged.score, tagged.check_gold)
    done = play(workflow(judge, renderer(name), tools=("look",), max_turns=3), lines, task)
    assert done.error is None
    looked, wrong, _ = done.turns
    assert [call.name for call in looked.tool_calls] == ["look"] and looked.tool_results[0].images == (shown,)
    assert wrong.verdict is not None and wrong.verdict.terms == {"accuracy": 0.0, "format": 0.1}
    # the tool's result continues the turn; feedback makes Thinking drop the thoughts before it
    assert done.rewritten_turn() == (2 if name == THINKING else None)
    samples = demonstrated_samples([done], name)
    assert [sum(sample.loss_mask) for sample in samples] == (
        [len(t.action) for t in done.turns] if name == THINKING else [sum(len(t.action) for t in done.turns)]
    )
