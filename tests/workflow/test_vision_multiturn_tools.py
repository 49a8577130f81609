"""Turns that call tools: new images, composed calls, what goes wrong, and how tools are described."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_vlrl.types import EpisodeStatus, Generation, Image, Message, SegmentKind, StopReason, Task, Verdict
from npu_vlrl.workflow.tools import Toolbox
from npu_vlrl.workflow.tools.describe import describe_tools
from tests.support.chat import reference_ids, renderer, words
from tests.support.scripted import (
    IMAGE,
    Script,
    Verdicts,
    a_task,
    an_image,
    conversation_ids,
    cut,
    decode,
    flat,
    play,
    processor,
    workflow,
)

SYSTEM = ("system", "You are a helpful assistant.")
RIGHT = Verdict(1.0, True)
TOOLS: dict[str, Any] = {"tools": ("rotate", "look"), "describe_tools": False}


def rotate(angle: object, image: object = 0) -> str:
    return f'<tool_call>{{"name": "rotate", "arguments": {{"angle": {angle}, "image": {image}}}}}</tool_call>'


LOOK = '<tool_call>{"name":"look","arguments":{}}</tool_call>'


def response(text: str, images: int = 1) -> str:
    return f"<tool_response>\n{text}{IMAGE * images}\n</tool_response>"


def test_a_tools_image_enters_as_a_new_image_with_its_placeholders() -> None:
    task = a_task(an_image(56), "Which way?")
    script = Script([rotate(90), "up"])
    episode = play(workflow(Verdicts([RIGHT]), tool_call_reward=0.3, **TOOLS), script, task)
    assert episode.status is EpisodeStatus.SOLVED
    called, answered = episode.turns
    assert (called.verdict, called.feedback, called.action.reward) == (None, None, 0.3)
    (result,) = called.tool_results
    turned = Image(np.rot90(task.images[0].rgb).copy())
    assert result.images == (turned,) and not result.error
    observation = answered.context[2]
    assert observation.kind is SegmentKind.OBSERVATION
    assert [image.image for image in observation.images] == [turned]
    text = "Image 1 is image 0 rotated by 90 degrees counter-clockwise."
    said = [SYSTEM, ("user", f"{IMAGE}Which way?"), ("assistant", rotate(90)), ("user", response(text))]
    assert flat(answered.context) == conversation_ids(*said, images=[4, 4])
    assert episode.solved_first_try  # a call is no try


def test_calls_compose_within_a_turn_and_over_turns() -> None:
    task = a_task(an_image(56, seed=1), an_image(28, seed=2), "?")
    first, second = task.images
    lines = [rotate(90, 1) + " then " + rotate(90, 2), rotate(-90, 3), "up"]
    episode = play(workflow(Verdicts([RIGHT]), max_turns=3, **TOOLS), lines, task)
    one, two = episode.turns[0].tool_results
    assert [r.text.split()[1] for r in (one, two)] == ["2", "3"]
    assert one.images[0] == Image(np.rot90(second.rgb).copy())
    assert two.images[0] == Image(np.rot90(second.rgb, 2).copy())
    assert episode.turns[1].tool_results[0].images[0] == one.images[0]
    assert episode.turns[1].tool_results[0].text.startswith("Image 4 is image 3")
    seen = [image.image for segment in episode.turns[2].context for image in segment.images]
    assert seen == [first, second, one.images[0], two.images[0], one.images[0]]
    said = [
        SYSTEM,
        ("user", f"{IMAGE}{IMAGE}?"),
        ("assistant", lines[0]),
        ("user", f"{response(one.text)}\n{response(two.text)}"),
        ("assistant", lines[1]),
        ("user", response(episode.turns[1].tool_results[0].text)),
    ]
    assert flat(episode.turns[2].context) == conversation_ids(*said, images=[4, 1, 1, 1, 1])


def test_look_shows_what_the_task_keeps_back() -> None:
    hidden = an_image(56, seed=9)
    task = a_task(an_image(28), "?", hidden_image=hidden)
    episode = play(workflow(Verdicts([RIGHT]), max_turns=9, **TOOLS), [LOOK, LOOK, rotate(0, 1), "up"], task)
    shown, again, turned, _ = episode.turns
    assert shown.tool_results[0].images == (hidden,)
    assert again.tool_results[0].error and "looked already" in again.tool_results[0].text
    assert turned.tool_results[0].images == (hidden,)  # number 1, by zero degrees


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (rotate('"much"'), "rotate: 'angle' must be a number, not 'much'."),
        (rotate(90, 7), "rotate: there is no image 7 (they are numbered 0 to 0)."),
        ('<tool_call>{"name": "zoom", "arguments": {}}</tool_call>', "There is no tool 'zoom'. Available: rotate("),
        ('<tool_call>{"name": "rotate", "arguments": {"angle": 9}</tool_call>', "Tool call 1 was not run: its JSON is"),
        ('<tool_call>{"name": "rotate", "arguments": [90]}</tool_call>', 'its "arguments" are not an object'),
        ('<tool_call>{"name": "rotate"', "Tool call 1 was not run: its JSON is broken or cut off"),
        (LOOK, "look: there is nothing more to look at in this task."),
    ],
)
def test_what_a_model_calls_wrongly_is_told_to_it_and_costs_what_is_configured(line: str, told: str) -> None:
    script = Script([line, "up"])
    flow = workflow(Verdicts([RIGHT]), tool_error_reward=-0.25, tool_call_reward=0.5, **TOOLS)
    episode = play(flow, script)
    assert episode.status is EpisodeStatus.SOLVED
    assert episode.turn_rewards == (-0.25, 1.0)
    (result,) = episode.turns[0].tool_results
    assert result.error and not result.images and told in result.text
    observation = script.contexts[1][-1]
    assert f"<tool_response>\n{result.text}\n</tool_response>" in decode([observation])
    assert not observation.images


def test_one_bad_call_among_good_ones() -> None:
    """The good ones run, the image numbers do not shift, and the turn earns the price of an error."""
    lines = [f'{rotate(90)}<tool_call>{{"name": }}</tool_call>{rotate(90, 5)}{rotate(180, 1)}', "up"]
    flow = workflow(Verdicts([RIGHT]), tool_error_reward=-1.0, tool_call_reward=0.5, **TOOLS)
    episode = play(flow, lines)
    results = episode.turns[0].tool_results
    assert [r.error for r in results] == [False, True, False, True]
    assert [r.text.split(" was ")[0][:22] for r in results][2:] == ["Image 2 is image 1 rot", "Tool call 2"]
    assert len(episode.turns[0].tool_calls) == 3
    assert episode.turn_rewards == (-1.0, 1.0)
    assert len(episode.turns[1].context[-1].images) == 2


def test_a_call_that_the_budget_cut_off_is_not_run() -> None:
    episode = play(workflow(Verdicts([RIGHT]), **TOOLS), [cut(rotate(90)[:-14]), "up"])
    assert episode.turns[0].tool_calls == ()
    assert episode.turns[0].tool_results[0].error
    assert episode.turns[0].action.stop_reason is StopReason.TURN_BUDGET


def test_without_tools_a_call_is_an_answer() -> None:
    judge = Verdicts([Verdict(0.0, False), RIGHT])
    episode = play(workflow(judge), [rotate(90), "up"])
    assert episode.turns[0].tool_results == () and episode.turns[0].verdict is not None
    assert [text for text, _ in judge.seen] == [rotate(90), "up"]


def test_a_call_in_the_last_turn_ends_the_episode() -> None:
    episode = play(workflow(Verdicts([]), max_turns=1, tool_call_reward=0.5, **TOOLS), [rotate(90)])
    assert (episode.status, episode.turn_rewards) == (EpisodeStatus.MAX_TURNS, (0.5,))
    assert len(episode.turns[0].tool_results[0].images) == 1
    assert not episode.solved and not episode.solved_first_try


USER_TOOL = '''
from npu_vlrl.types import ToolResult

def both(ctx, n: int):
    """Shows the first image n times."""
    return ToolResult("Look:", (ctx.image(0),) * n)
'''


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_one_placeholder_run_for_each_image_of_a_result(tmp_path: Path, n: int) -> None:
    (tmp_path / "mine.py").write_text(USER_TOOL)
    line = f'<tool_call>{{"name": "both", "arguments": {{"n": {n}}}}}</tool_call>'
    script = Script([line, "up"])
    play(workflow(Verdicts([RIGHT]), tools=(f"{tmp_path}/mine.py:both",), describe_tools=False), script)
    said = [SYSTEM, ("user", f"{IMAGE}Which way?"), ("assistant", line), ("user", response("Look:", n))]
    assert flat(script.contexts[1]) == conversation_ids(*said, images=[4] * (n + 1))
    assert [image.n_tokens for image in script.contexts[1][-1].images] == [4] * n


def test_tools_are_described_in_the_system_message_where_the_template_has_no_place_for_them() -> None:
    schemas = Toolbox(["rotate"]).schemas()
    described = describe_tools(schemas)
    for system, expected in ((None, described), ("Be brief.", f"Be brief.\n\n{described}")):
        script = Script(["up"])
        play(workflow(Verdicts([RIGHT]), tools=("rotate",)), script, a_task("?", system=system))
        assert flat(script.contexts[0]) == conversation_ids(("system", expected), ("user", "?"))
    silent = Script(["up"])
    play(workflow(Verdicts([RIGHT]), tools=("rotate",), describe_tools=False), silent, a_task("?"))
    assert flat(silent.contexts[0]) == conversation_ids(SYSTEM, ("user", "?"))
    assert '"name": "rotate"' in described and FORM in described


FORM = '<tool_call>{"name": "…", "arguments": {…}}</tool_call>'


def test_an_image_of_the_system_message_survives_the_description() -> None:
    shown, asked = an_image(28, seed=1), an_image(56, seed=2)
    messages = (Message("system", (shown, "See.")), Message("user", (asked, "?")))
    script = Script([rotate(180, 1), "up"])
    task = Task("t/1", messages, "up", "test")
    episode = play(workflow(Verdicts([RIGHT, RIGHT]), tools=("rotate",)), script, task)
    assert [image.image for image in script.contexts[0][0].images] == [shown, asked]
    assert episode.turns[0].tool_results[0].images[0] == Image(asked.rgb[::-1, ::-1].copy())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            (Message("system", (an_image(28, seed=1), "See.")), Message("user", ("?",))),
            "which holds 1 images; write it as",
        ),
        ((Message("system", ("See.",)),), "which is the whole prompt; write it as"),
    ],
)
def test_a_system_message_that_cannot_be_replaced(messages: tuple[Message, ...], words: str) -> None:
    flow = workflow(Verdicts([RIGHT]), tools=("rotate",), describe_tools=False, system_prompt="Be brief.")
    episode = play(flow, Script(["up"]), Task("t/1", messages, "up", "test"))
    assert episode.status is EpisodeStatus.FAILED and not episode.turns
    assert episode.error is not None and f"workflow.system_prompt replaces the system message, {words}" in episode.error


def said(text: str) -> Generation:
    ids = (*words(text), *words("<|im_end|>"))
    return Generation(ids, (-0.5,) * len(ids), (0,) * len(ids), StopReason.END_OF_TURN)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_published_templates(name: str) -> None:
    """Qwen3-VL's shows tools and has a role for their results; Qwen2.5-VL's has neither."""
    schemas = Toolbox(["rotate"]).schemas()
    task = a_task(an_image(64), "Which way?", system="Be brief.")
    script = Script([said(rotate(90)), said("up")])
    episode = play(workflow(Verdicts([RIGHT]), renderer(name), tools=("rotate",)), script, task)
    (result,) = episode.turns[0].tool_results
    user, answer = task.messages[1], Message("assistant", (rotate(90),))
    if name == "qwen3_vl":
        messages = [task.messages[0], user, answer, Message("tool", (result.text, *result.images))]
        tools = schemas
    else:
        system = Message("system", (f"Be brief.\n\n{describe_tools(schemas)}",))
        shown = Message("user", (f"<tool_response>\n{result.text}", *result.images, "\n</tool_response>"))
        messages, tools = [system, user, answer, shown], None
    assert list(flat(script.contexts[0])) == reference_ids(name, messages[:2], tools)
    assert list(flat(script.contexts[1])) == reference_ids(name, messages, tools)


def crop(box: list[float], image: int = 0) -> str:
    return f'<tool_call>{{"name": "crop", "arguments": {{"bbox": {box}, "image": {image}}}}}</tool_call>'


def test_boxes_are_in_the_pixels_that_the_model_saw_also_of_results() -> None:
    """An image of 40 x 100 becomes 28 x 112 for the tiny model; its lower half, 40 x 50, becomes 28 x 56."""
    stored = Image(np.random.default_rng(0).integers(0, 256, (100, 40, 3), dtype=np.uint8))
    task = a_task(stored, "?")
    lines = [crop([0, 56, 28, 112]) + crop([14, 0, 28, 28], 1), crop([7, 14, 14, 28], 1), "up"]
    flow = workflow(Verdicts([RIGHT]), sees=processor(), max_turns=3, tools=("crop",), describe_tools=False)
    episode = play(flow, lines, task)
    assert [image.grid for image in episode.turns[1].context[-1].images] == [(1, 4, 2), (1, 2, 2)]
    half, quarter = (result.images[0] for result in episode.turns[0].tool_results)
    assert half == Image(stored.rgb[50:].copy())
    assert quarter == Image(stored.rgb[50:75, 20:].copy())
    (later,) = episode.turns[1].tool_results[0].images
    assert later == Image(stored.rgb[50 + 12 : 50 + 25, 10:20].copy())  # rows 12.5 to 25 of the half


def test_boxes_are_in_stored_pixels_where_no_processor_changes_them() -> None:
    stored = an_image(100)
    episode = play(
        workflow(Verdicts([RIGHT]), tools=("crop",), describe_tools=False),
        [crop([90, 0, 100, 10]), "up"],
        a_task(stored, "?"),
    )
    assert episode.turns[0].tool_results[0].images == (Image(stored.rgb[:10, 90:].copy()),)


def test_a_box_outside_of_what_was_seen_is_told_with_the_limits() -> None:
    settings: dict[str, Any] = {"tools": ("crop",), "describe_tools": False, "tool_error_reward": -0.5}
    flow = workflow(Verdicts([RIGHT]), sees=processor(), **settings)
    episode = play(flow, [crop([0, 0, 40, 100]), "up"], a_task(Image(np.zeros((100, 40, 3), np.uint8)), "?"))
    (told,) = episode.turns[0].tool_results
    assert told.error and "must be [left, top, right, bottom] inside [0, 0, 28, 112]" in told.text
    assert episode.turn_rewards == (-0.5, 1.0)
