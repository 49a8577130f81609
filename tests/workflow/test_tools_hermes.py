"""Tool calls in text: good ones are read, broken ones become messages, none is made up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.types import ToolCall
from npu_vlrl.workflow.tools.hermes import MAX_CALLS, ParsedCalls, parse_tool_calls

ROTATE = '{"name": "rotate", "arguments": {"angle": 90}}'
CALL = ToolCall("rotate", {"angle": 90})


def tagged(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize("text", ["", "no call", "</tool_call>", "<tool_call", ROTATE, "<answer>1</answer>"])
def test_text_without_calls(text: str) -> None:
    assert parse_tool_calls(text) == ParsedCalls((), ())


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (tagged(ROTATE), [CALL]),
        (f"I turn it.\n<tool_call>\n  {ROTATE}\r\n\t</tool_call><|im_end|>", [CALL]),
        (tagged(ROTATE) + "\n" + tagged('{"name": "look", "arguments": {}}'), [CALL, ToolCall("look", {})]),
        (tagged('{"arguments": {"angle": 90}, "name": "rotate", "id": 3}'), [CALL]),
        (tagged('{"name": "rotate", "arguments": "{\\"angle\\": 90}"}'), [CALL]),
        (tagged('{"name": "a", "arguments": {"b": {"c": [{"d": "}"}]}}}'), [ToolCall("a", {"b": {"c": [{"d": "}"}]}})]),
        (tagged('{"name": "a", "arguments": {"s": "</tool_call>"}}'), [ToolCall("a", {"s": "</tool_call>"})]),
    ],
)
def test_good_calls(text: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text) == ParsedCalls(tuple(calls), ())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (tagged(ROTATE[:-1]), "broken or cut off"),
        (f"<tool_call>{ROTATE[:20]}", "broken or cut off"),
        ("<tool_call>", "broken or cut off"),
        (tagged(""), "broken or cut off"),
        (tagged("rotate(90)"), "broken or cut off"),
        (tagged("{'name': 'rotate', 'arguments': {}}"), "broken or cut off"),
        (f"<tool_call>{ROTATE}", "not followed by </tool_call>"),
        (f"<tool_call>{ROTATE}</tool", "not followed by </tool_call>"),
        (tagged(ROTATE + "}"), "not followed by </tool_call>"),
        (tagged(ROTATE + ROTATE), "not followed by </tool_call>"),
        (tagged("[1]"), "not an object"),
        (tagged('"rotate"'), "not an object"),
        (tagged('{"arguments": {}}'), 'no "name"'),
        (tagged('{"name": 3, "arguments": {}}'), 'no "name"'),
        (tagged('{"name": "", "arguments": {}}'), 'no "name"'),
        (tagged('{"name": "rotate"}'), '"arguments" are not an object'),
        (tagged('{"name": "rotate", "arguments": null}'), '"arguments" are not an object'),
        (tagged('{"name": "rotate", "arguments": [90]}'), '"arguments" are not an object'),
        (tagged('{"name": "rotate", "arguments": "{\\"angle\\": 90"}'), "a string that is not JSON"),
        (tagged('{"name": "rotate", "arguments": ""}'), "a string that is not JSON"),
        (tagged('{"name": "rotate", "arguments": "[90]"}'), '"arguments" are not an object'),
        (tagged('{"name": "rotate", "arguments": {"angle": NaN}}'), "NaN is not JSON"),
        (tagged('{"name": "rotate", "arguments": {"angle": -Infinity}}'), "-Infinity is not JSON"),
        (tagged('{"name": "rotate", "arguments": {"angle": ' + "9" * 5000 + "}}"), "4300"),
        (tagged("[" * 100_000), "nested too deeply"),
        (tagged(json.dumps({"name": "a", "arguments": "[" * 100_000})), "a string that is not JSON"),
    ],
)
def test_broken_calls_are_told_and_not_run(text: str, reason: str) -> None:
    parsed = parse_tool_calls(text)
    assert parsed.calls == ()
    assert len(parsed.errors) == 1
    assert reason in parsed.errors[0]
    assert parsed.errors[0].startswith("Tool call 1 was not run") and '{"name"' in parsed.errors[0]


def test_one_broken_call_does_not_take_the_others_along() -> None:
    parsed = parse_tool_calls(f"<tool_call>{ROTATE[:-1]} <tool_call>{ROTATE}</tool_call> <tool_call>")
    assert parsed.calls == (CALL,)
    assert [error[:11] for error in parsed.errors] == ["Tool call 1", "Tool call 3"]


@given(st.integers(0, len(tagged(ROTATE)) - 1))
@settings(max_examples=60, deadline=None)
def test_no_truncation_yields_a_call(length: int) -> None:
    parsed = parse_tool_calls(tagged(ROTATE)[:length])
    assert parsed.calls == ()
    assert len(parsed.errors) == (length >= len("<tool_call>"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.sampled_from(["<tool_call>", "</tool_call>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


CALLS = st.tuples(st.text(min_size=1), st.dictionaries(st.text(), VALUES, max_size=3), st.booleans())


@given(st.lists(CALLS, max_size=3))
@settings(max_examples=25, deadline=None)
def test_whatever_was_written_is_read_back(calls: list[tuple[str, dict, bool]]) -> None:
    written = [
        json.dumps({"name": name, "arguments": json.dumps(arguments) if as_string else arguments}, ensure_ascii=False)
        for name, arguments, as_string in calls
    ]
    parsed = parse_tool_calls("text\n".join(map(tagged, written)))
    assert parsed == ParsedCalls(tuple(ToolCall(name, arguments) for name, arguments, _ in calls), ())


def test_too_many_calls_are_told() -> None:
    parsed = parse_tool_calls(tagged(ROTATE) * (MAX_CALLS + 5))
    assert parsed.calls == (CALL,) * MAX_CALLS
    assert parsed.errors == ("The tool calls after the first 32 were not run: these are too many at once.",)
    assert parse_tool_calls(tagged(ROTATE) * MAX_CALLS).errors == ()


def test_hostile_text_is_read_in_linear_time() -> None:
    """Ten million characters: with their square in steps it would not end within the time of a test."""
    for unit in ("<tool_call>", '<tool_call>"', "<tool_call>[", '<tool_call>{"a": "'):
        text = unit * (10_000_000 // len(unit))
        assert parse_tool_calls(text).calls == ()
    assert not parse_tool_calls("<tool_call>" + " " * 10_000_000).calls


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"angle": 1e999}', "1e999 is too large a number"),
        ('"{\\"angle\\": -1e999}"', 'its "arguments" are a string that is not JSON'),
        ('{"a": ' + "[" * 32 + "]" * 32 + "}", 'its "arguments" are nested more than 32 deep'),
        (r'{"a": ["b", {"c": "\ud83d"}]}', "its JSON holds half a surrogate pair, '\\ud83d' (character 1)"),
        (r'{"a\udfff": 1}', "its JSON holds half a surrogate pair, '\\udfff' (character 2)"),
        ('{"a": ' + "[" * 500 + "]" * 500 + "}", 'its "arguments" are nested more than 32 deep'),
    ],
)
def test_what_a_run_folder_could_not_record_is_no_call(arguments: str, reason: str) -> None:
    """JSON has no infinity, and Python writes nothing that is a thousand deep."""
    parsed = parse_tool_calls(tagged(f'{{"name": "rotate", "arguments": {arguments}}}'))
    assert parsed.calls == () and reason in parsed.errors[0]


def test_a_whole_pair_is_one_character_and_a_name_is_checked_too() -> None:
    (call,) = parse_tool_calls(tagged(r'{"name": "a", "arguments": {"b": "\ud83d\ude00"}}')).calls
    assert call.arguments == {"b": "😀"}
    parsed = parse_tool_calls(tagged(r'{"name": "\ud83d", "arguments": {}}'))
    assert parsed.calls == () and "half a surrogate pair" in parsed.errors[0]


def test_arguments_as_deep_as_they_may_be() -> None:
    (call,) = parse_tool_calls(tagged('{"name": "a", "arguments": {"a": ' + "[" * 31 + "1" + "]" * 31 + "}}")).calls
    assert json.dumps(dict(call.arguments)).count("[") == 31
