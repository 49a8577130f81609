"""Reward rules, which score an answer, by the names of `registry.RULES`.

A rule is a module with `score(answer, text, **options) -> Verdict` and `check_gold(answer, **options)`, both pure and
synchronous. The exceptions are `benchmark`, whose `score` is also given the task's `extra`, `python`, which calls a
function of the user's, and `weighted`, a sum of other rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from npu_vlrl.common.registry import RULES, load
from npu_vlrl.workflow.names import check_names
from npu_vlrl.workflow.rewards.pool import InlineJudge, JudgePool
from npu_vlrl.workflow.rewards.weighted import WeightedJudge, make_weighted
from npu_vlrl.workflow.workers import is_spec

__all__ = ["InlineJudge", "JudgePool", "WeightedJudge", "lowest_reward", "make_judge"]


def lowest_reward(rule: str, options: Mapping[str, Any]) -> float:
    """Lowest reward of a rule that `make_judge` takes; 0 for a user's function, of which nothing is known."""
    if rule != "weighted":
        return float(getattr(load(RULES, rule), "LOWEST", 0.0)) if rule in RULES else 0.0
    terms = options["terms"].values()
    lowest = ((float(term["weight"]), lowest_reward(term["rule"], term.get("options") or {})) for term in terms)
    return sum(weight * low if weight > 0 else weight for weight, low in lowest)  # the highest is 1


def make_judge(
    rule: str, options: Mapping[str, Any], workers: int, deadline_s: float, memory_mib: int = 0
) -> InlineJudge | JudgePool | WeightedJudge:
    """Makes the judge of a rule of `RULES`; `path/to/file.py:function` is short for `python` with that `function`.

    `weighted` sums other rules (see `make_weighted`), each with `workers` processes where it needs any. `memory_mib`
    limits the resident memory of a process and its children; 0 disables. `check_gold(answer)` of the judge raises
    DataError for a gold that cannot be judged against. The caller must `close()` the judge. Raises ValueError for an
    unknown rule or option, or an option's value that the rule refuses.
    """
    if is_spec(rule):
        rule, options = "python", {"function": rule, **options}
    if rule == "weighted":
        check_names(f"option of the rule {rule!r}:", options, {"terms", "solved_by"})
        return make_weighted(options, lambda name, its: make_judge(name, its, workers, deadline_s, memory_mib))
    if rule.endswith(".py"):
        raise ValueError(f"the rule {rule!r} names no function of the file; write path/to/file.py:function")
    check_names("reward rule", [rule], [*RULES, "weighted"])
    if rule == "python":
        check_names(f"option of the rule {rule!r}:", options, {"function"})
        if not isinstance(options.get("function"), str):
            raise ValueError("the rule 'python' needs the option 'function': path/to/file.py:function")
        return JudgePool(rule, options, workers, deadline_s, memory_mib)
    module = load(RULES, rule)
    known = set(inspect.signature(module.score).parameters) - {"answer", "text", "extra"}
    check_names(f"option of the rule {rule!r}:", options, known)
    if options:
        module.score("1", "", **options)  # a rule refuses a bad value before training, not at the first answer
    if getattr(module, "INLINE", False):
        return InlineJudge(partial(module.score, **options), partial(module.check_gold, **options))
    return JudgePool(rule, options, workers, deadline_s, memory_mib)
