"""A weighted sum of rules, each term kept by its name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from npu_vlrl.types import DataError, Judge, Task, Turn, Verdict


class TermJudge(Judge, Protocol):
    """What a term needs of its judge."""

    def check_gold(self, answer: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Term:
    weight: float
    judge: TermJudge


class WeightedJudge:
    """Judges an answer by all terms at once: reward = sum of weight * reward of the term.

    Example: `WeightedJudge({"accuracy": Term(0.9, pool), "style": Term(0.1, other)}, solved_by="accuracy")`
    """

    def __init__(self, terms: Mapping[str, Term], solved_by: str) -> None:
        self._terms = dict(terms)
        self._solved_by = solved_by

    async def judge(self, task: Task, text: str, history: Sequence[Turn]) -> Verdict:
        """`terms` of the verdict holds the weighted reward of each term; `solved_by` decides whether it is solved.

        The feedback joins that of the terms. Raises what a term raises, once all terms have ended: an answer costs at
        most one deadline.
        """
        judgements = (term.judge.judge(task, text, history) for term in self._terms.values())
        results = await asyncio.gather(*judgements, return_exceptions=True)
        verdicts: dict[str, Verdict] = {}
        for name, result in zip(self._terms, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            verdicts[name] = result
        rewards = {name: term.weight * verdicts[name].reward for name, term in self._terms.items()}
        feedback = dict.fromkeys(verdict.feedback for verdict in verdicts.values() if verdict.feedback is not None)
        solved = verdicts[self._solved_by].solved
        return Verdict(sum(rewards.values()), solved, " ".join(feedback) or None, rewards)

    def check_gold(self, answer: str) -> None:
        """Raises DataError, naming the term, when one of them cannot judge against `answer`."""
        for name, term in self._terms.items():
            try:
                term.judge.check_gold(answer)
            except DataError as error:
                raise DataError(f"reward term {name!r}: {error}") from error

    def close(self) -> None:
        for term in self._terms.values():
            term.judge.close()


def make_weighted(options: Mapping[str, Any], make: Callable[[str, Mapping[str, Any]], TermJudge]) -> WeightedJudge:
    """`options`: terms, a mapping from name to `{rule, weight, options}`; solved_by, by default the first name.

    `make` makes a judge of rule and options. Raises ValueError, naming the term, for anything else.
    """
    settings = options.get("terms")
    if not isinstance(settings, Mapping) or not settings:
        raise ValueError(
            "the rule 'weighted' needs the option 'terms', such as {accuracy: {rule: math_verify, weight: 0.9}}"
        )
    solved_by = options.get("solved_by", next(iter(settings)))
    if solved_by not in settings:
        raise ValueError(f"solved_by is {solved_by!r}; it must be one of the terms {', '.join(map(str, settings))}")
    terms: dict[str, Term] = {}
    try:
        for name, setting in settings.items():
            terms[str(name)] = _make_term(name, setting, make)
    except ValueError:
        for term in terms.values():
            term.judge.close()
        raise
    return WeightedJudge(terms, str(solved_by))


def _make_term(name: Any, setting: Any, make: Callable[[str, Mapping[str, Any]], TermJudge]) -> Term:
    where = f"reward term {name!r}"
    if not isinstance(setting, Mapping) or not {"rule", "weight"} <= set(setting) <= {"rule", "weight", "options"}:
        raise ValueError(f"{where} is {setting!r}; it needs rule and weight, may have options, and nothing else")
    rule, weight, options = setting["rule"], setting["weight"], setting.get("options") or {}
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"{where}: weight is {weight!r}; it must be a finite number")
    if not isinstance(rule, str) or not isinstance(options, Mapping):
        raise ValueError(f"{where}: rule must be a name and options a mapping, got {rule!r} and {options!r}")
    try:
        return Term(float(weight), make(rule, options))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
