"""Schema of a line of `trajectories.jsonl`, and the check of a line that may be anything.

Keys that an older release did not write are optional. Keys that are not named here are dropped.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Ge, Len, Lt
from pydantic import JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

TokenId = Annotated[int, Ge(0), Lt(2**31)]
Patches = Annotated[int, Ge(1), Lt(2**20)]
Numbers = list[float | None]

PER_TOKEN = ("logprobs", "weight_versions", "advantages", "learner_logprobs", "entropy")
"""Arrays of an action with a number for each token; older runs lack some."""


class ImageRecord(TypedDict):
    hash: str
    grid: Annotated[list[Patches], Len(3, 3)]
    """Number of patches: time, rows, columns."""


class SegmentRecord(TypedDict):
    kind: Literal["prompt", "observation", "action"]
    token_ids: list[TokenId]
    images: NotRequired[list[ImageRecord]]


class ActionRecord(SegmentRecord):
    stop_reason: NotRequired[str | None]
    reward: NotRequired[float | None]
    logprobs: NotRequired[Numbers]
    weight_versions: NotRequired[list[int]]
    advantages: NotRequired[Numbers]
    learner_logprobs: NotRequired[Numbers]
    entropy: NotRequired[Numbers]


class ParsedRecord(TypedDict):
    answer: str | None
    thoughts: dict[str, str | None]
    right: bool


class VerdictRecord(TypedDict):
    reward: float
    solved: bool
    terms: NotRequired[dict[str, float]]
    checks: NotRequired[dict[str, bool | str | None]]


class CallRecord(TypedDict):
    name: str
    arguments: dict[str, JsonValue]


class ResultRecord(TypedDict):
    text: str
    images: NotRequired[list[str]]
    """Hashes of the images."""
    error: NotRequired[bool]


class TurnRecord(TypedDict):
    text: str
    new_context: list[SegmentRecord]
    action: ActionRecord
    state: NotRequired[str | None]
    parsed: NotRequired[ParsedRecord | None]
    continues: NotRequired[bool]
    verdict: NotRequired[VerdictRecord | None]
    tool_calls: NotRequired[list[CallRecord]]
    tool_results: NotRequired[list[ResultRecord]]
    feedback: NotRequired[str | None]
    judge_error: NotRequired[str | None]
    invalid: NotRequired[bool]


class TrajectoryRecord(TypedDict):
    step: Annotated[int, Ge(0), Lt(2**53)]
    id: str
    group: str
    turns: NotRequired[list[TurnRecord]]
    task: NotRequired[str | None]
    data_source: NotRequired[str | None]
    answer: NotRequired[str | None]
    status: NotRequired[str | None]
    error: NotRequired[str | None]
    solved: NotRequired[bool | None]
    solved_first_try: NotRequired[bool | None]
    advantages: NotRequired[dict[str, Numbers] | None]
    label: NotRequired[str | None]


_SCHEMA = TypeAdapter(TrajectoryRecord)


def read_record(line: bytes) -> dict[str, Any]:
    """Parses a line as `TrajectoryRecord`. Raises ValueError, with the fault, for any other line."""
    try:
        record: dict[str, Any] = dict(_SCHEMA.validate_python(_DECODER.decode(line.decode()), strict=True))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    for turn in record.get("turns", []):
        action = turn["action"]
        for name in PER_TOKEN:
            if name in action and len(action[name]) != len(action["token_ids"]):
                raise ValueError(f"an action has {len(action['token_ids'])} tokens and {len(action[name])} {name}")
    return record


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):  # JSON may write 1e999, which a browser's parser would not read again
        raise ValueError(f"{digits[:20]} is too large a number")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
