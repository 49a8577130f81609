"""Templates that open a thought in the generation prompt: histories equal transformers' own render, ids stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_vlrl.types import Message, SegmentKind, ToolResult
from npu_vlrl.workflow.render import Conversation, Renderer
from tests.support.chat import Describer, action, an_image, as_dicts, flat, reference_ids, renderer, words
from tests.support.tokenizers import TEMPLATES, qwen_tokenizer, template

THINKING = ("qwen3_vl_thinking", "qwen3_5_think")
IM_END, THINK, END_OF_THOUGHT = 151645, 151667, 151668
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
IMAGES = [an_image(56, 56, 1), an_image(90, 40, 2)]


@pytest.mark.parametrize("name", [*TEMPLATES, "qwen3_5_nothink", *THINKING])
def test_which_templates_open_a_thought(name: str) -> None:
    chat = (
        Renderer(qwen_tokenizer(), Describer(16), name, template(name)) if name == "qwen3_5_nothink" else renderer(name)
    )
    opened = chat.open([Message("user", ("q",))]).opened_thought
    assert opened == ("<think>\n" if name in THINKING else "")
    assert chat.opens_thought == (name in THINKING)


@dataclass(frozen=True)
class Step:
    thought: str
    answer: str
    finished: bool
    """The thought has an end, with the white space that the template writes."""
    ended: bool
    """The turn has an end."""
    reply: tuple[Message | ToolResult, ...]

    @property
    def sampled(self) -> str:
        return f"{self.thought}\n</think>\n\n{self.answer}" if self.finished else self.thought


WORDS = st.lists(st.sampled_from(["hm", " so", " 4", "\nthen", " é", " <tool_call>", " 中文"]), min_size=1, max_size=4)
TEXTS = WORDS.map("".join).map(str.strip)
SHOWN = st.lists(st.sampled_from(IMAGES), max_size=2)
RESULTS = st.lists(st.builds(lambda text, shown: ToolResult(text, tuple(shown)), TEXTS, SHOWN), min_size=1, max_size=2)
FEEDBACK = st.builds(lambda text, shown: (Message("user", (text, *shown)),), TEXTS, SHOWN)
STEPS = st.builds(Step, TEXTS, TEXTS | st.just(CALL), st.booleans(), st.booleans(), RESULTS.map(tuple) | FEEDBACK)


def play(name: str, steps: Sequence[Step]) -> list[Conversation]:
    chat = renderer(name)
    conversations = [chat.open([Message("user", (IMAGES[0], "q"))])]
    for step in steps:
        new = [item for item in step.reply if isinstance(item, Message)]
        new += chat.tool_messages([item for item in step.reply if isinstance(item, ToolResult)])
        segment = action([*words(step.sampled), *([IM_END] if step.ended else [])], chat.special)
        conversations.append(chat.reply(conversations[-1], segment, new))
    return conversations


@pytest.mark.parametrize("name", THINKING)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, min_size=1, max_size=4))
def test_every_context_is_what_transformers_renders(name: str, steps: list[Step]) -> None:
    """The reference is given the thought as Qwen documents it: in the content of the assistant's message."""
    conversations = play(name, steps)
    for step, before, after in zip(steps, conversations, conversations[1:], strict=False):
        turn = next(m for m in after.messages[len(before.messages) :] if m.role == "assistant")
        assert turn.text == f"<think>\n{step.sampled}"
        assert flat(after.context) == reference_ids(name, after.messages)
        assert after.opened_thought == "<think>\n"
        sampled = [*words(step.sampled), *([IM_END] if step.ended else [])]
        if after.rewritten:
            assert [segment.kind for segment in after.context] == [SegmentKind.PROMPT]
        else:
            assert after.context[: len(before.context)] == before.context
            assert after.context[-2].kind is SegmentKind.ACTION
            assert list(after.context[-2].token_ids) == sampled


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, min_size=1, max_size=4))
def test_when_qwen3_vl_thinking_rewrites(steps: list[Step]) -> None:
    """Feedback drops the finished thoughts since the question before it; results of tools drop none."""
    held = False
    for step, after in zip(steps, play("qwen3_vl_thinking", steps)[1:], strict=True):
        held = held or step.finished
        told = isinstance(step.reply[0], Message)
        assert after.rewritten == (told and held)
        held = held and not told


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, min_size=1, max_size=3))
def test_thoughts_given_apart_render_alike(steps: list[Step]) -> None:
    """`reasoning_content` beside the content, as a server would store it, gives the same ids."""
    name = "qwen3_vl_thinking"
    finished = [step for step in steps if step.finished]
    if not finished:
        return
    after = play(name, finished)[-1]
    messages = as_dicts(name, after.messages)
    steps_left = iter(finished)
    for message in messages:
        if message["role"] == "assistant":
            step = next(steps_left)
            message |= {"reasoning_content": step.thought, "content": [{"type": "text", "text": step.answer}]}
    text = qwen_tokenizer().apply_chat_template(
        messages, chat_template=template(name), add_generation_prompt=True, tokenize=False
    )
    assert text == after.text


def test_white_space_of_its_own_around_a_thought_counts_as_rewriting() -> None:
    tool = (ToolResult("4"),)
    for sampled, rewritten in (("hm\n</think>\n\n", False), ("hm</think>", True), ("\nhm\n</think>\n\n", True)):
        chat = renderer("qwen3_vl_thinking")
        start = chat.open([Message("user", ("2+2?",))])
        after = chat.reply(start, action([*words(sampled + CALL), IM_END], chat.special), chat.tool_messages(tool))
        assert after.rewritten == rewritten
        assert flat(after.context) == reference_ids("qwen3_vl_thinking", after.messages)


def test_published_ids_of_the_tags() -> None:
    (prompt,) = renderer("qwen3_vl_thinking").open([Message("user", ("q",))]).context
    assert prompt.token_ids[-2:] == (THINK, 198)
    assert words("\n</think>\n\n") == [198, END_OF_THOUGHT, 271]
