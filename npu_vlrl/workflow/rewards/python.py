"""A reward function from the user's own file; runs in a worker process and sees plain data only."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from PIL import Image as Pillow

from npu_vlrl.types import JudgeError, Verdict

_KEYS = ("reward", "solved", "feedback", "terms")


_VERL = frozenset({"data_source", "solution_str", "ground_truth"})
"""By these parameters a function is known that was written for verl."""


def callable_with(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """What `score` can call: the function itself, or one of verl's, which gets the same by its own names.

    Raises ValueError for a function that takes anything else.
    """
    signature = inspect.signature(function)
    if set(signature.parameters) >= _VERL:
        return lambda task, text, history, images: _as_verl(function, task, text)
    try:
        signature.bind("task", "text", "history", "images")
    except TypeError as error:
        raise ValueError(
            f"{name} takes {signature}, and is called with (task, text, history, images), or, if it has verl's "
            "parameters, with data_source, solution_str, ground_truth and extra_info; correct its parameters"
        ) from error
    return function


def _as_verl(function: Callable[..., Any], task: Mapping[str, Any], text: str) -> Any:
    """Of a result with "score" the other numbers become terms; verl only logs the rest."""
    result = function(
        data_source=task["data_source"], solution_str=text, ground_truth=task["answer"], extra_info=dict(task["extra"])
    )
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    terms = {key: value for key, value in result.items() if key != "score" and isinstance(_plain(value), Real)}
    return {"reward": result["score"], "terms": terms}


def score(
    function: Callable[..., Any],
    name: str,
    task: Mapping[str, Any],
    text: str,
    history: Sequence[str],
    images: Sequence[Pillow.Image],
) -> Verdict:
    """Calls `function(task, text, history, images)` and makes its result a Verdict.

    `task` has "id", "answer", "data_source" and "extra"; `history` the texts of the earlier turns; `images` the RGB
    pictures of the episode in the order the model saw them. The function returns a bool (1 or 0), a number (solved
    when at least 1) or a dict with "reward" and optionally "solved", "feedback" and "terms".
    Raises JudgeError, naming the function and the value, when it raises or returns anything else or a number that is
    not finite.
    """
    try:
        result = function(task, text, history, images)
    except (Exception, SystemExit) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{line.filename}, line {line.lineno}"
        raise JudgeError(f"{name} raised {type(error).__name__}: {error} ({where})") from error
    if not isinstance(result, Mapping):
        result = {"reward": result}
    return _verdict(name, result)


def _verdict(name: str, result: Mapping[str, Any]) -> Verdict:
    if unknown := [key for key in result if key not in _KEYS]:
        raise JudgeError(f"{name} returned the unknown key {unknown[0]!r}; allowed are {', '.join(_KEYS)}")
    reward = _number(name, "reward", result.get("reward"))
    solved = _plain(result.get("solved", reward >= 1.0))
    feedback, terms = result.get("feedback"), result.get("terms", {})
    if not isinstance(solved, bool):
        raise JudgeError(f"{name} returned solved={solved!r}; it must be True or False")
    if not isinstance(feedback, str | None):
        raise JudgeError(f"{name} returned feedback={feedback!r}; it must be a string or None")
    if not isinstance(terms, Mapping):
        raise JudgeError(f"{name} returned terms={terms!r}; it must be a dict of numbers")
    numbers = {str(key): _number(name, f"terms[{key!r}]", value) for key, value in terms.items()}
    return Verdict(reward, solved, feedback, numbers)


def _number(name: str, what: str, value: Any) -> float:
    value = _plain(value)
    if not isinstance(value, Real) or not math.isfinite(value):
        raise JudgeError(f"{name} returned {what}={value!r}; it must be a finite number or a bool")
    return float(value)


def _plain(value: Any) -> Any:
    """A Python scalar for a NumPy or torch scalar; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
