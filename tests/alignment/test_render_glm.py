"""Turns of GLM: they end by the control token that begins the next turn, or by `</answer>`, which is said."""

from __future__ import annotations

import pytest

from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.tiny import tiny_tokenizer
from npu_vlrl.types import Message
from npu_vlrl.workflow.render import Renderer
from tests.support.chat import action, flat

FAMILY = FAMILIES["glm4v"]
OBSERVING = FAMILY.tiny_template.replace("'assistant') -%}", "'assistant', 'observation') -%}")
"""As templates of later models write the result of a tool."""
QUESTION = Message("user", ("Which way?",))


def made(template: str | None = None) -> Renderer:
    return Renderer(tiny_tokenizer(FAMILY), None, "glm", template, FAMILY.chat)


def ids(text: str) -> list[int]:
    found = tiny_tokenizer(FAMILY).encode(text, add_special_tokens=False)
    assert isinstance(found, list)
    return found


def test_the_prompt() -> None:
    opened = made().open([Message("system", ("Look.",)), QUESTION])
    assert flat(opened.context) == ids("[gMASK]<sop><|system|>\nLook.<|user|>\nWhich way?<|assistant|>\n")


@pytest.mark.parametrize(
    ("said", "text", "goes_on"),
    [
        ("up<|user|>", "up", "\nNo.<|assistant|>\n"),  # the token is there already
        ("<answer>up</answer>", "<answer>up</answer>", "<|user|>\nNo.<|assistant|>\n"),
        ("<answer>up</answer><|user|>", "<answer>up</answer>", "\nNo.<|assistant|>\n"),
        ("up<|endoftext|>", "up", "<|user|>\nNo.<|assistant|>\n"),
        ("up<|observation|>", "up", "<|user|>\nNo.<|assistant|>\n"),
        ("u", "u", "<|user|>\nNo.<|assistant|>\n"),  # cut
    ],
)
def test_what_follows_a_turn(said: str, text: str, goes_on: str) -> None:
    renderer = made()
    opened = renderer.open([QUESTION])
    turn = action(ids(said), renderer.special)
    assert renderer.decode(turn.token_ids) == text
    after = renderer.reply(opened, turn, [Message("user", ("No.",))])
    assert not after.rewritten and after.context[:-1] == (*opened.context, turn)
    assert list(after.context[-1].token_ids) == ids(goes_on)


def test_the_result_of_a_tool_follows_the_token_that_asked_for_it() -> None:
    renderer = made(OBSERVING)
    turn = action(ids("x<|observation|>"), renderer.special)
    after = renderer.reply(renderer.open([QUESTION]), turn, [Message("observation", ("seen",))])
    assert list(after.context[-1].token_ids) == ids("\nseen<|assistant|>\n")


def test_a_thought_in_a_question_is_none_of_the_turn_that_follows() -> None:
    assert made().open([Message("user", ("Write <think> first.",))]).opened_thought == ""
    prompt = "'<|assistant|>\\n'"
    opening = FAMILY.tiny_template.replace(prompt, f"{prompt[:-1]}<think>'")
    assert made(opening).open([QUESTION]).opened_thought == "<think>"
    assert made(opening).opens_thought and not made().opens_thought


def test_content_is_no_control_token() -> None:
    special = made().special
    prompt = made().open([Message("user", ("<|observation|><|image|>",))]).context[0]
    assert not {special.image, *special.end_of_turn[2:3]} & set(prompt.token_ids)
