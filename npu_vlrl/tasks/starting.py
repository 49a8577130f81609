"""Settings shared by the starting configurations of several tasks."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]
"""Settings by dotted key, in the order in which they are written."""

TRAINING: Values = {
    "run.checkpoint_every": 20,
    "train.steps": 200,
    "rollout.groups": 32,
    "rollout.group_size": 8,
    "evaluation.every": 20,
}
GRPO: Values = {"algorithm.preset": "grpo", "algorithm.kl_coef": 0.0, "algorithm.aggregation": "token-mean"}
BOXED: Values = {
    "workflow.max_turns": 3,
    "workflow.turn_tokens": 1024,
    "workflow.context_tokens": 4096,
    "reward.rule": "math_verify",
    "reward.workers": 4,
    "evaluation.tasks": 0,
    "model.max_pixels": 401408,
}
"""Settings for answers in a box."""
