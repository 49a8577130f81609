"""Rewritten history, tool results, images and refusals, for real templates and the real vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from npu_vlrl.types import (
    DataError,
    EpisodeStatus,
    Image,
    Message,
    SegmentKind,
    SpecialTokens,
    Task,
    ToolResult,
    Trajectory,
    Turn,
)
from npu_vlrl.workflow.render import Conversation, Renderer
from tests.support.chat import (
    IMAGE_PAD,
    VISION_TEMPLATES,
    Describer,
    action,
    an_image,
    flat,
    processor,
    reference_ids,
    renderer,
    words,
)
from tests.support.tokenizers import ADDED_WORDS, CONTROL_TOKENS, TEMPLATES, byte_tokenizer, qwen_tokenizer, template

IM_END = 151645
SMALL, WIDE, TALL = an_image(56, 56, 1), an_image(200, 60, 2), an_image(40, 150, 3)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def user(*parts: str | Image) -> Message:
    return Message("user", parts)


def answer(name: str, conversation: Conversation, text: str, *new: Message) -> Conversation:
    chat = renderer(name)
    return chat.reply(conversation, action([*words(text), IM_END], chat.special), new)


# The vocabulary itself


def test_published_ids() -> None:
    tokenizer = qwen_tokenizer()
    assert tokenizer.convert_tokens_to_ids(CONTROL_TOKENS + ADDED_WORDS) == list(range(151643, 151669))
    assert len(tokenizer) == 151669
    assert words("Hello, world!\n") == [9707, 11, 1879, 4894]
    assert words("\n") == [198]


@pytest.mark.parametrize("name", TEMPLATES)
def test_special_tokens(name: str) -> None:
    vision = (151655, 151656, 151652, 151653) if name in VISION_TEMPLATES else (None,) * 4
    assert renderer(name).special == SpecialTokens((151645, 151643), *vision)


# Against the processors


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_ids_and_grids_equal_the_real_processor(name: str) -> None:
    look = renderer(name).tool_messages([ToolResult("here", (TALL,))])
    conversation = renderer(name).open([user(SMALL, "What is ", WIDE, "?")])
    conversation = answer(name, conversation, "<tool_call>\n{}\n</tool_call>", *look)
    text = conversation.text
    images = [Pillow.fromarray(image.rgb) for image in (SMALL, WIDE, TALL)]
    made = processor(name)(text=[text], images=images)
    assert flat(conversation.context) == list(made["input_ids"][0])
    grids = [item.grid for segment in conversation.context for item in segment.images]
    assert grids == [tuple(grid) for grid in np.asarray(made["image_grid_thw"]).tolist()]


def test_a_fresh_prompt_equals_the_real_processor() -> None:
    name = "qwen3_5_think"
    conversation = answer(name, renderer(name).open([user(WIDE, "a")]), "hm\n</think>\n\n4", user("no", SMALL))
    assert conversation.rewritten
    made = processor(name)(text=[conversation.text], images=[Pillow.fromarray(image.rgb) for image in (WIDE, SMALL)])
    assert flat(conversation.context) == list(made["input_ids"][0])


# Templates that rewrite history


def test_qwen3_strips_earlier_thoughts() -> None:
    start = renderer("qwen3").open([user("2+2?")])
    second = answer("qwen3", start, "<think>\nfive?\n</think>\n\n5", user("Wrong."))
    assert second.rewritten
    assert [segment.kind for segment in second.context] == [SegmentKind.PROMPT]
    assert flat(second.context) == reference_ids("qwen3", second.messages)
    assert "five?" in second.messages[1].text
    assert "five?" not in renderer("qwen3").decode(flat(second.context))

    third = answer("qwen3", second, "4", user("Sure?"))  # nothing to strip: it continues the fresh prompt
    assert not third.rewritten
    assert third.context[0] == second.context[0]
    assert flat(third.context) == reference_ids("qwen3", third.messages)


def test_qwen3_keeps_thoughts_between_tool_calls_and_strips_them_later() -> None:
    chat = renderer("qwen3")
    start = chat.open([user("2+2?")], [TOOL])
    call = '<think>\nlet me look\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    second = answer("qwen3", start, call, *chat.tool_messages([ToolResult("4")]))
    assert not second.rewritten
    assert flat(second.context) == reference_ids("qwen3", second.messages, [TOOL])
    third = answer("qwen3", second, "5", user("Wrong."))
    assert third.rewritten
    assert flat(third.context) == reference_ids("qwen3", third.messages, [TOOL])


def test_unusual_white_space_around_a_thought_counts_as_rewriting() -> None:
    chat = renderer("qwen3")
    start = chat.open([user("2+2?")])
    second = answer(
        "qwen3", start, "<think>look</think><tool_call>{}</tool_call>", *chat.tool_messages([ToolResult("4")])
    )
    assert second.rewritten
    assert flat(second.context) == reference_ids("qwen3", second.messages)


def test_a_vision_template_that_rewrites_keeps_all_images_in_order() -> None:
    name = "qwen3_5_think"
    start = renderer(name).open([Message("system", (" S ",)), user(SMALL, "a", WIDE)])
    look = renderer(name).tool_messages([ToolResult("seen", (TALL, SMALL))])
    second = answer(name, start, "hm\n</think>\n\n<tool_call>\n</tool_call>", *look)
    assert not second.rewritten  # this template keeps thoughts until the next question
    assert flat(second.context) == reference_ids(name, second.messages)
    third = answer(name, second, "so\n</think>\n\n4", user("Wrong.", WIDE))
    assert third.rewritten
    (prompt,) = third.context
    assert [item.image for item in prompt.images] == [SMALL, WIDE, TALL, SMALL, WIDE]
    assert list(prompt.token_ids) == reference_ids(name, third.messages)


def test_a_trajectory_knows_which_turn_was_rewritten() -> None:
    def episode(texts: list[str]) -> Trajectory:
        chat, turns = renderer("qwen3"), []
        conversation = chat.open([user("q")])
        for text in texts:
            segment = action([*words(text), IM_END], chat.special)
            turns.append(Turn(conversation.context, segment, text))
            conversation = chat.reply(conversation, segment, [user("again")])
        return Trajectory(Task("t", (), None, "d"), "g", 0, tuple(turns), EpisodeStatus.MAX_TURNS)

    assert episode(["a", "b", "c"]).rewritten_turn() is None
    assert episode(["a", "<think>\nx\n</think>\n\nb", "c"]).rewritten_turn() == 2


# Tool results

RESULTS = [ToolResult("rotated", (SMALL,)), ToolResult("", (WIDE, TALL)), ToolResult("Error: no such tool", error=True)]


def test_tool_results_read_alike_with_and_without_the_role() -> None:
    """Qwen2.5-VL's template has no role for tools; the user message then says what Qwen3-VL's template writes."""
    with_role, without = (renderer(name).tool_messages(RESULTS) for name in ("qwen3_vl", "qwen2_5_vl"))
    assert [message.role for message in with_role] == ["tool"] * 3
    assert [message.role for message in without] == ["user"]
    texts = []
    for name, new in (("qwen3_vl", with_role), ("qwen2_5_vl", without)):
        start = renderer(name).open([user("q")])
        after = answer(name, start, "<tool_call>{}</tool_call>", *new)
        texts.append(after.text.partition("</tool_call><|im_end|>")[2])
        assert [item.image for item in after.context[2].images] == [SMALL, WIDE, TALL]
        assert flat(after.context) == reference_ids(name, after.messages)
    assert texts[0] == texts[1]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert texts[0] == (
        f"\n<|im_start|>user\n<tool_response>\nrotated{image}\n</tool_response>\n"
        f"<tool_response>\n{image}{image}\n</tool_response>\n"
        "<tool_response>\nError: no such tool\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", [*TEMPLATES, "qwen3_5_think"])
def test_which_templates_have_the_role(name: str) -> None:
    (message,) = renderer(name).tool_messages([ToolResult("x")])
    assert message.role == ("user" if name == "qwen2_5_vl" else "tool")
    assert renderer(name).tool_messages([]) == []


def test_the_role_is_found_by_looking_at_what_the_template_writes() -> None:
    deaf = template("qwen3_vl").replace('message.role == "tool"', 'message.role == "nobody"')
    assert deaf != template("qwen3_vl")
    chat = Renderer(qwen_tokenizer(), Describer(16), "deaf", deaf)
    assert chat.tool_messages([ToolResult("x", (SMALL,))])[0].role == "user"


def test_a_role_for_tools_that_hides_images_is_not_used() -> None:
    """A text template with a role for tools, fed images, must not lose them."""
    before, role, after = template("qwen3_vl").rpartition('message.role == "tool"')
    blind = before + role + after.replace("content.type == 'image'", "false").replace("'image' in content", "false")
    for written in (template("qwen3"), blind):
        chat = Renderer(qwen_tokenizer(), Describer(16), "blind", written)
        assert chat.tool_messages([ToolResult("x")])[0].role == "user"


def test_tools_reach_every_later_render() -> None:
    start = renderer("qwen3_vl").open([user("q")], [TOOL])
    after = answer("qwen3_vl", answer("qwen3_vl", start, "a", user("b")), "c", user("d"))
    assert flat(after.context) == reference_ids("qwen3_vl", after.messages, [TOOL])
    assert after.tools == (TOOL,)
    assert after.text.count('"name": "look"') == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_ignores_tools_writes_the_same_text(name: str) -> None:
    chat = renderer(name)
    ignored = chat.open([user("q")], [TOOL]).text == chat.open([user("q")]).text
    assert ignored == (name == "qwen2_5_vl")


# Images and refusals


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_one_placeholder_an_image_expanded_by_hand(name: str) -> None:
    """56x56 is 2x2 merged patches of 28 pixels; of 32 pixels it rounds to 64x64, also 2x2."""
    (prompt,) = renderer(name).open([user(SMALL, SMALL, "two", SMALL)]).context
    assert prompt.token_ids.count(IMAGE_PAD) == 12
    starts = [index for index, token in enumerate(prompt.token_ids) if token == 151652]
    assert [prompt.token_ids[index + 1 : index + 6] for index in starts] == [(IMAGE_PAD,) * 4 + (151653,)] * 3


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_images_for_a_text_only_model(name: str) -> None:
    with pytest.raises(DataError, match=f"'{name}' belongs to a text-only model, but the messages hold 2 images"):
        renderer(name).open([user(SMALL, "q", SMALL)])
    start = renderer(name).open([user("q")])
    with pytest.raises(DataError, match="text-only model"):
        answer(name, start, "a", user(SMALL))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen2_5", "cannot render messages of the roles \\[user\\]"),
        ("qwen3", "writes 0 image placeholders for 1 images"),
    ],
)
def test_a_vision_model_with_a_text_template(name: str, message: str) -> None:
    chat = Renderer(qwen_tokenizer(), Describer(14), name, template(name))
    assert flat(chat.open([user("q")]).context) == reference_ids(name, [user("q")])
    with pytest.raises(DataError, match=f"'{name}' {message}"):
        chat.open([user(SMALL, "q")])


def test_an_image_where_the_template_takes_none() -> None:
    start = renderer("qwen3_vl").open([user("q")])
    for messages in ([Message("system", (SMALL, "s")), user("q")], [user("q"), Message("assistant", (SMALL,)), user()]):
        with pytest.raises(DataError, match="writes 0 image placeholders for 1 images: put images where"):
            renderer("qwen3_vl").open(messages)
    with pytest.raises(DataError, match="writes 1 image placeholders for 2 images"):
        answer("qwen3_vl", start, "a", user(SMALL), Message("system", (SMALL,)))


def test_a_role_that_the_template_drops() -> None:
    with pytest.raises(DataError, match="'qwen3_vl' drops text of a 'human' message"):
        renderer("qwen3_vl").open([Message("human", ("What is it?",)), user("Well?")])
    start = renderer("qwen3_vl").open([user("What is it?")])
    with pytest.raises(DataError, match="drops text of a 'human' message"):  # though the same words stand above
        answer("qwen3_vl", start, "a", Message("human", ("What is it?",)))


def test_earlier_answers_may_lose_their_thoughts_and_nothing_else() -> None:
    earlier = [user("q"), Message("assistant", ("<think>hm</think>\n\nA tree.",)), user("Which?")]
    assert "hm" not in (shown := renderer("qwen3").open(earlier).text) and "A tree." in shown
    one_sided = "{% for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    chat = Renderer(qwen_tokenizer(), None, "t", one_sided + "{% endfor %}<|im_start|>assistant\n")
    with pytest.raises(DataError, match="'t' drops text of a 'assistant' message"):
        chat.open(earlier)


def test_a_template_that_raises() -> None:
    with pytest.raises(
        DataError, match="'qwen3_5_think' cannot render messages of the roles \\[system\\]: No user query"
    ):
        renderer("qwen3_5_think").open([Message("system", ("s",))])


def test_a_tokenizer_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="'of the tokenizer': the tokenizer has none; add chat_template.jinja"):
        Renderer(qwen_tokenizer(), None)
    plain = byte_tokenizer(["<|endoftext|>"])
    with pytest.raises(ValueError, match="no special token <|im_end|>"):
        Renderer(plain, None, "t", template("qwen2_5"))
    text_only = byte_tokenizer(["<|im_start|>", "<|im_end|>"])
    with pytest.raises(ValueError, match="no special token <|image_pad|>"):
        Renderer(text_only, Describer(14), "t", template("qwen2_5_vl"))
    assert Renderer(text_only, None, "t", template("qwen2_5")).special == SpecialTokens((257,))


def test_the_tokenizer_brings_its_template() -> None:
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = template("qwen3")
    chat = Renderer(tokenizer, None)
    assert (
        chat.decode(flat(chat.open([user("né")]).context)) == "<|im_start|>user\nné<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_takes_only_lists_of_parts() -> None:
    """Some vision templates would loop over the letters of a plain string."""
    loop = "{% for c in message['content'] %}{{ c['text'] if c['type'] == 'text' else '<|image_pad|>' }}{% endfor %}"
    lists = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n" + loop + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = Renderer(qwen_tokenizer(), Describer(14), "lists", lists)
    start = chat.open([Message("system", ("s",)), user("a", SMALL, "b")])
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|image_pad|>b<|im_end|>\n<|im_start|>assistant\n"
    assert start.text == expected
    after = chat.reply(start, action([*words("c"), IM_END], chat.special), [user()])
    assert after.text == expected + "c<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    assert chat.tool_messages([ToolResult("x")])[0].role == "user"


def test_decode() -> None:
    decode = renderer("qwen2_5_vl").decode
    assert decode([*words("a <b> , 'm"), IM_END]) == "a <b> , 'm"
    assert decode([*words("a"), 151643]) == "a"
    assert decode([151657, IM_END, *words("b")]) == "<tool_call><|im_end|>b"
    assert decode([]) == decode([IM_END]) == ""


def test_only_the_delta_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    chat: Any = renderer("qwen2_5_vl")
    seen: list[str] = []
    encode = chat._control.encode

    def watched(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    start = chat.open([user("long " * 200)])
    monkeypatch.setattr(chat._control, "encode", watched)
    chat.reply(start, action([*words("a"), IM_END], chat.special), [user("b")])
    assert seen == ["\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"]
