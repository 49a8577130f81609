"""`python -m tests.launch.same_metrics RUN_A RUN_B TOLERANCE`: do two run folders tell of the same training?

Every step of one must be in the other, and what depends on weights and samples alone must be as near as the tolerance,
which is relative for numbers above 1. Exit code 0 or 1; a difference is named.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

COMPARED = ("reward", "solved", "turns", "tokens", "pg_loss", "kl", "entropy", "ratio", "grad_norm", "eval/all/reward")
"""Not seconds or memory, nor what is zero but for rounding."""

Steps = list[dict[str, float]]


def read(folder: str) -> Steps:
    """The lines of its metrics.jsonl; each is a step or an evaluation."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def differences(one: Steps, other: Steps, tolerance: float) -> list[str]:
    """One sentence for each difference; none when both tell of the same training."""
    if len(one) != len(other):
        return [f"{len(one)} lines and {len(other)} lines"]
    found = []
    for a, b in zip(one, other, strict=True):
        for name in ("step", *COMPARED):
            x, y = a.get(name), b.get(name)
            if (x is None) != (y is None):
                found.append(f"step {a['step']}: {name} is in one only")
            elif x is not None and y is not None and not abs(x - y) <= tolerance * max(1.0, abs(x)):
                found.append(f"step {a['step']}: {name} is {x} and {y}")
    return found


def moved(steps: Steps) -> bool:
    """The policy's loss was not zero at every step: there was something to compare."""
    return any(abs(step.get("pg_loss", 0.0)) > 0 and math.isfinite(step["grad_norm"]) for step in steps)


def main(arguments: list[str]) -> int:
    one, other, tolerance = read(arguments[0]), read(arguments[1]), float(arguments[2])
    found = differences(one, other, tolerance)
    if not moved(one):
        found.append("the policy's loss is zero at every step, which compares nothing: train longer")
    print("\n".join(found) or f"{len(one)} lines of metrics are the same within {tolerance:g}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
