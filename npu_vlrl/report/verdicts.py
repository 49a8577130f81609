"""Verdicts in records and for people, with the results of second checkers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_vlrl.types import Verdict


def verdict_record(verdict: Verdict) -> dict[str, Any]:
    """Verdict as JSON values, without its feedback; `checks` where there are any."""
    record = {"reward": verdict.reward, "solved": verdict.solved, "terms": dict(verdict.terms)}
    return {**record, "checks": dict(verdict.checks)} if verdict.checks else record


def verdict_of(record: Mapping[str, Any]) -> Verdict:
    """The inverse of `verdict_record`; records of earlier versions have no `checks`."""
    return Verdict(record["reward"], record["solved"], terms=record["terms"], checks=record.get("checks", {}))


def disagrees(verdict: Verdict) -> bool | None:
    """Whether a second checker found otherwise than the term that decides; None without a second checker's result."""
    found = [check for check in verdict.checks.values() if isinstance(check, bool)]
    return any(check is not verdict.solved for check in found) if found else None


def labelled_terms(verdict: Verdict) -> dict[str, float]:
    """Terms for people, with a mark at those that are no part of the reward."""
    return {f"{name} (weight 0)" if name in verdict.checks else name: value for name, value in verdict.terms.items()}
