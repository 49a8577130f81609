"""A reward function from the user's own file; runs in a worker process and sees plain data only."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, cast

from npu_vlrl.types import MAX_REWARD, JudgeError, Verdict
from npu_vlrl.workflow.rewards.forms import Asked, FormError, scalar
from npu_vlrl.workflow.texts import described, flaw, shown, told

_KEYS = ("reward", "solved", "feedback", "terms")

MAX_TERMS = 100
"""Maximum number of terms of a verdict; the terms of every answer are recorded."""

MAX_NAME = 200
"""Maximum length of a term's name, in characters."""


def score(function: Callable[[Asked], Any], name: str, asked: Asked) -> Verdict:
    """Calls a function that `forms.adapted` made, and converts its result to a Verdict.

    The function returns a bool (1 or 0), a number (solved when at least 1) or a dict with "reward" and optionally
    "solved", "feedback" and "terms". Raises JudgeError, naming the function and the value, when it raises or returns
    anything else, a number that is not finite, a reward beyond `MAX_REWARD`, or a text that no policy can be given.
    """
    try:
        result = function(asked)
    except FormError as error:
        raise JudgeError(f"{name}: {told(str(error))}") from error
    except (Exception, SystemExit) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise JudgeError(f"{name} raised {described(error)} ({line.filename}, line {line.lineno})") from error
    if not isinstance(result, Mapping):
        result = {"reward": result}
    return _verdict(name, result)


def _verdict(name: str, result: Mapping[str, Any]) -> Verdict:
    if unknown := [key for key in result if key not in _KEYS]:
        raise JudgeError(f"{name} returned the unknown key {shown(unknown[0])}; allowed are {', '.join(_KEYS)}")
    reward = _number(name, "reward", result.get("reward"), MAX_REWARD)
    solved = scalar(result.get("solved", reward >= 1.0))
    feedback, terms = result.get("feedback"), result.get("terms", {})
    if not isinstance(solved, bool):
        raise JudgeError(f"{name} returned solved={shown(solved)}; it must be True or False")
    if not isinstance(feedback, str | None):
        raise JudgeError(f"{name} returned feedback={shown(feedback)}; it must be a string or None")
    if feedback is not None and (problem := flaw(feedback)):
        raise JudgeError(f"{name} returned a feedback that holds {problem}; no model can be given that, so replace it")
    if not isinstance(terms, Mapping) or len(terms) > MAX_TERMS:
        raise JudgeError(f"{name} returned terms={shown(terms)}; it must be a dict of at most {MAX_TERMS} numbers")
    if bad := [key for key in map(str, terms) if flaw(key, MAX_NAME)]:
        raise JudgeError(f"{name} returned a term whose name holds {flaw(bad[0], MAX_NAME)}; choose another name")
    numbers = {str(key): _number(name, f"terms[{key!r}]", value, sys.float_info.max) for key, value in terms.items()}
    return Verdict(reward, solved, feedback, numbers)


def _number(name: str, what: str, value: Any, limit: float) -> float:
    value = scalar(value)
    if not isinstance(value, Real) or not abs(cast(float, value)) <= limit:  # nor is a NaN
        raise JudgeError(
            f"{name} returned {what}={shown(value)}; it must be a finite number of at most ±{limit:g}, or a bool"
        )
    return float(value)
