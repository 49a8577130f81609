"""Tool calls as GLM writes them."""

from __future__ import annotations

import pytest

from npu_vlrl.types import ToolCall
from npu_vlrl.workflow.tools.forms import FORMS
from npu_vlrl.workflow.tools.glm import parse_glm_calls
from npu_vlrl.workflow.tools.hermes import MAX_CALLS

CROP = (
    "<tool_call>crop\n<arg_key>box</arg_key>\n<arg_value>[0, 0, 10, 10]</arg_value>\n"
    '<arg_key>label</arg_key>\n<arg_value>a <b> & "c"</arg_value>\n</tool_call>'
)


def test_a_call_by_hand() -> None:
    found = parse_glm_calls(f"<think><tool_call>drop</tool_call></think>I look.\n{CROP}<tool_call>look\n</tool_call>")
    assert found.errors == ()
    assert found.calls == (ToolCall("crop", {"box": [0, 0, 10, 10], "label": 'a <b> & "c"'}), ToolCall("look", {}))


@pytest.mark.parametrize("arguments", [{}, {"angle": 90.5, "box": [1, 2], "name": "größer", "on": True, "no": None}])
def test_what_is_written_is_read(arguments: dict[str, object]) -> None:
    for one in FORMS.values():
        found = one.parse(one.write("turn", arguments))
        assert found.errors == () and found.calls == (ToolCall("turn", arguments),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>", "it has no name"),
        ("<tool_call>\n<arg_key>a</arg_key>", "it has no name"),
        ("<tool_call>crop\n<arg_key>box</arg_key>\n<arg_value>[0", "broken or cut off"),
        ("<tool_call>crop {}</tool_call>", "broken or cut off"),
        (CROP.replace("label", "box"), "the argument 'box' twice"),
        (CROP.replace("[0, 0, 10, 10]", "[" * 40 + "]" * 40), "nested more than 32 deep"),
        (CROP.replace("[0, 0, 10, 10]", '"\\ud800"'), "it holds"),
    ],
)
def test_what_is_broken_is_told(text: str, reason: str) -> None:
    found = parse_glm_calls(text)
    assert found.calls == () and len(found.errors) == 1 and reason in found.errors[0]
    assert found.errors[0].startswith("Tool call 1 was not run: ")


def test_a_turn_that_repeats_itself() -> None:
    found = parse_glm_calls("<tool_call>look\n</tool_call>" * (MAX_CALLS + 5))
    assert len(found.calls) == MAX_CALLS and "too many at once" in found.errors[0]
