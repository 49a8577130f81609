"""Contexts built turn by turn equal transformers' render of the whole conversation, id for id (real vocabulary)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_vlrl.types import Image, Message, Sample, SegmentKind, ToolResult
from npu_vlrl.workflow.render import Conversation
from tests.support.chat import VISION_TEMPLATES, action, an_image, flat, reference_ids, renderer, words
from tests.support.tokenizers import TEMPLATES, qwen_tokenizer

IM_START, IM_END, ENDOFTEXT = 151644, 151645, 151643
NEWLINE = 198
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Sehen ≥ 1\n", "parameters": {"type": "object", "properties": {}}},
}

# Fragments whose tokens or normal form depend on their neighbours, added words, and anything at all.
FRAGMENTS = st.sampled_from(
    [
        "\n",
        "\n\n",
        " ",
        "   ",
        "\t",
        "\r\n",
        "é",
        "e\u0301",
        "\u0301",
        "\u212b",
        "👩\u200d👩",
        "中文",
        "123",
        "don't",
        "?!\n",
        "x",
        " y",
    ]
    + [
        "<tool_call>",
        "</tool_call>",
        '{"name": "look"}',
        "<answer>",
        "\\boxed{1}",
        "<|",
        "|>",
        "\ufdd0",
        "\ufdd1",
        "\ufdd01\ufdd1",
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=6).map("".join)
IMAGES = [an_image(56, 56, 1), an_image(90, 40, 2), an_image(33, 120, 3)]


def continues(text: str) -> bool:
    """Whether the ids of `text` do not depend on the newline that the template writes before an answer."""
    return words("assistant\n" + text) == [*words("assistant\n"), *words(text)]


ANSWERS = TEXTS.filter(continues)


@dataclass(frozen=True)
class Step:
    answer: str
    ending: tuple[int, ...]
    """Ids after the answer's: the closing token, `<|endoftext|>`, or none when the turn was cut."""
    new: tuple[Message | ToolResult, ...]


def messages(role: str, with_images: bool) -> st.SearchStrategy[Message]:
    part = TEXTS | st.sampled_from(IMAGES) if with_images else TEXTS
    few = st.lists(part, max_size=5).filter(lambda parts: sum(isinstance(item, Image) for item in parts) <= 3)
    return few.map(lambda parts: Message(role, tuple(parts)))


def steps(with_images: bool, answers: st.SearchStrategy[str] = ANSWERS) -> st.SearchStrategy[Step]:
    images = st.lists(st.sampled_from(IMAGES), max_size=3) if with_images else st.just([])
    result = st.builds(lambda text, shown: ToolResult(text, tuple(shown)), TEXTS, images)
    feedback = messages("user", with_images).map(lambda message: (message,))
    return st.builds(
        Step,
        answers,
        st.sampled_from([(IM_END,), (ENDOFTEXT,), ()]),
        feedback | st.lists(result, min_size=1, max_size=3).map(tuple),
    )


def openings(with_images: bool) -> st.SearchStrategy[tuple[Message, ...]]:
    system = st.just(()) | messages("system", False).map(lambda message: (message,))
    return st.builds(lambda first, user: (*first, user), system, messages("user", with_images))


def play(name: str, opening: Sequence[Message], turns: Sequence[Step], tools: list[dict] | None) -> Conversation:
    chat = renderer(name)
    conversation = chat.open(opening, tools)
    for turn in turns:
        new = [item for item in turn.new if isinstance(item, Message)]
        new += chat.tool_messages([item for item in turn.new if isinstance(item, ToolResult)])
        conversation = chat.reply(conversation, action([*words(turn.answer), *turn.ending], chat.special), new)
    return conversation


def check_whole(name: str, conversation: Conversation, tools: list[dict] | None) -> None:
    """The property itself: the context is the whole render, apart from `<|endoftext|>`, which no template writes."""
    assert [token for token in flat(conversation.context) if token != ENDOFTEXT] == reference_ids(
        name, conversation.messages, tools
    )


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_context_equals_the_render_of_the_whole_conversation(name: str, data: st.DataObject) -> None:
    with_images = name in VISION_TEMPLATES
    opening = data.draw(openings(with_images))
    turns = data.draw(st.lists(steps(with_images), max_size=4))
    tools = None if name == "qwen2_5_vl" else data.draw(st.sampled_from([None, [LOOK]]))
    conversation = play(name, opening, turns, tools)

    assert not conversation.rewritten
    check_whole(name, conversation, tools)
    kinds = [segment.kind for segment in conversation.context]
    assert kinds == [SegmentKind.PROMPT] + [SegmentKind.ACTION, SegmentKind.OBSERVATION] * len(turns)
    shown = [image for message in conversation.messages for image in message.images]
    assert [item.image for segment in conversation.context for item in segment.images] == shown


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_sampled_ids_are_kept_whatever_they_are(name: str, data: st.DataObject) -> None:
    """Random ids (control tokens too) stay, and what surrounds them is the render around any other answer."""
    # The thinking tokens are left out: they make the Qwen3 template rewrite history.
    ids = st.integers(0, 151654) | st.sampled_from([IM_START, IM_END, 151652, 151657, 151665])
    chat, tokenizer = renderer(name), qwen_tokenizer()
    feedback = (Message("user", ("Try again.",)),)
    sampled = data.draw(st.lists(st.lists(ids, min_size=1, max_size=12), min_size=1, max_size=4))
    conversation = chat.open([Message("user", ("Question",))])
    for turn in sampled:
        conversation = chat.reply(conversation, action(turn, chat.special), feedback)
    plain = play(name, [Message("user", ("Question",))], [Step("ok", (), feedback)] * len(sampled), None)

    assert not conversation.rewritten
    assert [list(segment.token_ids) for segment in conversation.context[1::2]] == sampled
    for turn, found, expected in zip(sampled, conversation.context[2::2], plain.context[2::2], strict=True):
        assert found.token_ids == expected.token_ids[turn[-1] == IM_END :]
    assert conversation.context[0] == plain.context[0]
    texts = [message.text for message in conversation.messages if message.role == "assistant"]
    ended = (IM_END, ENDOFTEXT)
    assert texts == [tokenizer.decode(turn[:-1] if turn[-1] in ended else turn) for turn in sampled]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("answer", ["", " ", "\n", " \n\n\t", "\n\nfour"])
def test_answers_of_whitespace(name: str, answer: str) -> None:
    chat = renderer(name)
    start = chat.open([Message("user", ("2+2?",))])
    after = chat.reply(start, action([*words(answer), IM_END], chat.special), [Message("user", ("Why?",))])
    assert flat(after.context[:1]) == reference_ids(name, start.messages)
    assert flat(after.context[1:2]) == [*words(answer), IM_END]
    assert flat(after.context[2:]) == words("\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert after.messages[1] == Message("assistant", (answer,))


def test_masks_by_hand() -> None:
    """Trained: exactly what was sampled, the closing token included, the newline after it not."""
    chat = renderer("qwen2_5_vl")
    conversation = chat.open([Message("user", ("Hi",))])
    sampled = [*words("Hello"), IM_END]
    turn = action(sampled, chat.special)
    conversation = chat.reply(conversation, turn, [Message("user", ("Bye",))])
    sample = Sample("s", "g", conversation.context, trained=(1,), reward=0.0, outcome=0.0, episode="e")
    header = [IM_START, *words("system"), NEWLINE, *words("You are a helpful assistant."), IM_END, NEWLINE]
    question = [IM_START, *words("user"), NEWLINE, *words("Hi"), IM_END, NEWLINE]
    answer_header = [IM_START, *words("assistant"), NEWLINE]
    feedback = [NEWLINE, IM_START, *words("user"), NEWLINE, *words("Bye"), IM_END, NEWLINE]
    prompt = header + question + answer_header
    observation = feedback + answer_header
    assert sample.token_ids == prompt + sampled + observation
    assert sample.loss_mask == [False] * len(prompt) + [True] * len(sampled) + [False] * len(observation)


@pytest.mark.parametrize("ending", [(), (ENDOFTEXT,)])
def test_a_turn_without_its_closing_token_is_closed_by_the_observation(ending: tuple[int, ...]) -> None:
    chat = renderer("qwen3_vl")
    conversation = chat.open([Message("user", ("Hi",))])
    turn = action([*words("Hello wor"), *ending], chat.special)
    conversation = chat.reply(conversation, turn, [Message("user", ("Bye",))])
    assert conversation.context[1] is turn
    assert conversation.context[2].token_ids[:3] == (IM_END, NEWLINE, IM_START)
    assert conversation.messages[1].text == "Hello wor"


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_second_system_prompt(name: str) -> None:
    turns = [Step("a", (IM_END,), (Message("user", ("b",)),))] * 3
    custom = play(name, [Message("system", ("Be brief.",)), Message("user", ("Hi",))], turns, None)
    assert custom.text.count("<|im_start|>system") == 1
    assert "helpful" not in custom.text
    default = play(name, [Message("user", ("Hi",))], turns, None)
    assert default.text.count("<|im_start|>system") == (1 if name.startswith("qwen2_5") else 0)


def test_the_whole_check_sees_a_missing_newline_and_a_missing_closing_token(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = renderer("qwen2_5_vl")
    encode = chat._control.encode
    opening = [Message("user", (IMAGES[0], "Hi"))]
    feedback = (Message("user", ("b", IMAGES[1])),)
    turns = [Step("cut", (), feedback)]
    check_whole("qwen2_5_vl", play("qwen2_5_vl", opening, turns, None), None)
    for lost in (NEWLINE, IM_END):

        def broken(rendered: str, lost: int = lost) -> list[int]:
            ids = encode(rendered)
            first = ids.index(lost)
            return ids[:first] + ids[first + 1 :]

        conversation = play("qwen2_5_vl", opening, [], None)
        monkeypatch.setattr(chat._control, "encode", broken)
        after = chat.reply(conversation, action(words("cut"), chat.special), feedback)
        monkeypatch.undo()
        with pytest.raises(AssertionError):
            check_whole("qwen2_5_vl", after, None)
