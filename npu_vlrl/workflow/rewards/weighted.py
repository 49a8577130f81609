"""Rule `weighted`: a weighted sum of rules, whose terms keep their names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from npu_vlrl.types import MAX_REWARD, DataError, Judge, JudgeError, Task, Turn, Verdict


class TermJudge(Judge, Protocol):
    """Interface of a term's judge."""

    @property
    def wrong_replies(self) -> int: ...

    def check_gold(self, answer: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Term:
    weight: float
    judge: TermJudge


class WeightedJudge:
    """Judges an answer by all terms at once: reward = sum of weight * reward of the term.

    A term of weight 0 that does not decide whether an answer is solved is a second checker: it is recorded, and has no
    influence on the episode.

    Example: `WeightedJudge({"accuracy": Term(0.9, pool), "style": Term(0.1, other)}, solved_by="accuracy")`
    """

    def __init__(self, terms: Mapping[str, Term], solved_by: str) -> None:
        self._terms = dict(terms)
        self._solved_by = solved_by
        self._unpaid = {name for name, term in terms.items() if not term.weight}

    @property
    def wrong_replies(self) -> int:
        return sum(term.judge.wrong_replies for term in self._terms.values())

    async def judge(self, task: Task, text: str, history: Sequence[Turn]) -> Verdict:
        """`terms` of the verdict holds the weighted reward of each term; for a term of weight 0 it holds the unweighted
        reward, and `checks` holds whether it found the answer solved. `solved_by` decides whether the answer is solved.

        The feedback joins the terms' feedback, without that of second checkers. Raises what a term raises that is no
        second checker, once all have ended: an answer costs at most one deadline.
        """
        judgements = (term.judge.judge(task, text, history) for term in self._terms.values())
        results = dict(zip(self._terms, await asyncio.gather(*judgements, return_exceptions=True), strict=True))
        verdicts: dict[str, Verdict] = {}
        checks: dict[str, bool | str] = {}
        for name, result in results.items():
            if isinstance(result, JudgeError) and name in self._checkers:
                checks[name] = str(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                verdicts[name] = result
                if name in self._unpaid:
                    checks[name] = result.solved
        terms = {name: self._terms[name].weight * verdict.reward for name, verdict in verdicts.items()}
        reward = sum(terms.values())
        if not abs(reward) <= MAX_REWARD:
            raise JudgeError(
                f"task {task.id}: the weighted sum is {reward:g}, beyond ±{MAX_REWARD:g}; lower the weights of "
                "reward.options.terms"
            )
        terms |= {name: verdict.reward for name, verdict in verdicts.items() if name in self._unpaid}
        told = [verdict.feedback for name, verdict in verdicts.items() if name not in self._checkers]
        feedback = " ".join(dict.fromkeys(text for text in told if text is not None)) or None
        return Verdict(reward, verdicts[self._solved_by].solved, feedback, terms, checks)

    @property
    def _checkers(self) -> set[str]:
        """Names of the terms that neither pay nor decide."""
        return self._unpaid - {self._solved_by}

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
    """Makes the judge of `options`: terms, a mapping from name to `{rule, weight, options}`; solved_by, by default the
    first.

    `make` makes a judge of rule and options. Raises ValueError, naming the term, for other options.
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
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= MAX_REWARD:
        raise ValueError(f"{where}: weight is {weight!r}; it must be a finite number of at most ±{MAX_REWARD:g}")
    if not isinstance(rule, str) or not isinstance(options, Mapping):
        raise ValueError(f"{where}: rule must be a name and options a mapping, got {rule!r} and {options!r}")
    try:
        return Term(float(weight), make(rule, options))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
