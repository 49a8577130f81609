"""Angles in degrees: reads them from a text, and computes and scores their distance."""

from __future__ import annotations

import math
from typing import Literal

from npu_vlrl.types import DataError, Verdict
from npu_vlrl.workflow.rewards.answers import quantity
from npu_vlrl.workflow.rewards.answers.units import DEGREE
from npu_vlrl.workflow.rewards.tagged import last_tag
from npu_vlrl.workflow.thought import split_thought

Distance = Literal["circular", "linear"]

NO_ANGLE_FEEDBACK = "Your answer holds no angle. Write it in degrees as <answer>90</answer>."

_LARGEST = 10**15
"""Largest angle in degrees; beyond it a float cannot represent every degree."""


def read_angle(content: str) -> float | None:
    """Reads the number of degrees in `content`, with or without a degree sign, in any notation; else None."""
    found = quantity(content)
    if found is None or abs(found.value) > _LARGEST:
        return None
    degrees = found.unit is None or DEGREE in found.unit.meanings
    return float(found.value) if degrees else None


def apart(angle: float, gold: float, distance: Distance) -> float:
    """Degrees between two angles: `circular` takes the shorter way round, at most 180; `linear` is |angle - gold|."""
    if distance == "linear":
        return abs(angle - gold)
    return abs(math.remainder(angle - gold, 360.0))


def score_angle(answer: str, text: str, zero_at: float, distance: Distance, solved_within: float) -> Verdict:
    """Scores max(0, 1 - d / zero_at) for d degrees between `answer` and the last `<answer>…</answer>` of `text`,
    outside of its thoughts.

    Solved when d is at most `solved_within`. A text without an angle scores 0. Raises ValueError for a bad option,
    DataError for an `answer` that is no angle. Takes time linear in `text`.
    """
    if distance not in ("circular", "linear"):
        raise ValueError(f"distance is {distance!r}; it must be 'circular' or 'linear'")
    if isinstance(solved_within, bool) or not isinstance(solved_within, int | float) or not 0 <= solved_within <= 180:
        raise ValueError(f"solved_within is {solved_within!r}; it must be a number of degrees from 0 to 180")
    gold = _gold_angle(answer)
    content = last_tag(split_thought(text).answer)
    angle = None if content is None else read_angle(content)
    if angle is None:
        return Verdict(0.0, False, NO_ANGLE_FEEDBACK, {"angle": 0.0})
    degrees = apart(angle, gold, distance)
    reward = max(0.0, 1.0 - degrees / zero_at)
    return Verdict(reward, degrees <= solved_within, terms={"angle": reward})


def check_angle(answer: str) -> None:
    """Raises DataError when `answer` is no angle."""
    _gold_angle(answer)


def _gold_angle(answer: str) -> float:
    gold = read_angle(answer)
    if gold is None:
        raise DataError(f"the gold answer {answer[:80]!r} is no angle; write a number of degrees such as 37.5")
    return gold
