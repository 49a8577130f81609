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

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Parameters of a verl reward function, which that calls by name; it may take some of them."""


def adapted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` as `score` calls it. One whose required parameters are verl's is given these by their names.

    Raises ValueError, naming the function and what it should take, for any other that does not take four arguments.
    """
    signature = inspect.signature(function)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {key: p for key, p in signature.parameters.items() if p.kind not in kinds}
    required = [key for key, p in named.items() if p.default is p.empty]
    if required and set(required) <= set(VERL):
        return _from_verl(function, [key for key in named if key in VERL])
    try:
        signature.bind("task", "text", "history", "images")
    except TypeError:
        fits = False
    else:
        fits = set(required).isdisjoint(VERL)
    if not fits:
        raise ValueError(
            f"{name} takes {signature}; write it as def {function.__name__}(task, text, history, images), or with "
            f"verl's parameters: {', '.join(VERL)}"
        )
    return function


def _from_verl(function: Callable[..., Any], asked: Sequence[str]) -> Callable[..., Any]:
    def call(task: Mapping[str, Any], text: str, *_: Any) -> Any:
        values = (task["data_source"], text, task["answer"], task["extra"])
        result = function(**{key: value for key, value in zip(VERL, values, strict=True) if key in asked})
        if not isinstance(result, Mapping) or "score" not in result:
            return result
        terms = {key: value for key, value in result.items() if key != "score" and isinstance(_plain(value), Real)}
        return {"reward": result["score"], "terms": terms}

    return call


def score(
    function: Callable[..., Any],
    name: str,
    task: Mapping[str, Any],
    text: str,
    history: Sequence[str],
    images: Sequence[Pillow.Image],
) -> Verdict:
    """Calls `function(task, text, history, images)` (see `adapted`) and makes its result a Verdict.

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
