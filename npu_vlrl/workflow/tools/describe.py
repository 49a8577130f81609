"""Tells the model what tools there are, for chat templates that have no place for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from npu_vlrl.workflow.tools.hermes import FORM


def describe_tools(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Text for the system message: one JSON schema a line, and the form of a call."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return f"You can call these tools, given as JSON schemas:\n<tools>\n{lines}\n</tools>\nTo call one, write {FORM}"
