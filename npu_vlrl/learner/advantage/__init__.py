"""Advantage estimators by name, and the settings that make up a published algorithm.

An estimator maps `(rewards [S], groups: S names)` to advantages, float64 [S]. `grpo` takes `std` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from npu_vlrl.learner.advantage.dr_grpo import dr_grpo
from npu_vlrl.learner.advantage.grpo import grpo
from npu_vlrl.learner.advantage.rloo import rloo

ADVANTAGES: dict[str, Callable[..., np.ndarray]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def estimate_advantages(name: str, rewards: np.ndarray, groups: Sequence[str], std: str | None = None) -> np.ndarray:
    """Advantages [S] by the estimator's name; `std` ("group" or "batch") belongs to `grpo` and is None for the others.

    Raises ValueError for an unknown name, for a `std` that the estimator does not have, and for unusable rewards.
    """
    if name not in ADVANTAGES:
        raise ValueError(f"algorithm.advantage: unknown estimator {name!r}; choose one of {', '.join(ADVANTAGES)}")
    allowed = ("group", "batch") if name == "grpo" else (None,)
    if std not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise ValueError(
            f"algorithm.advantage_std: {name} takes {choices}, not {std!r}; "
            f"`algorithm.preset={name}` has a fitting value"
        )
    options = {} if std is None else {"std": std}
    return ADVANTAGES[name](rewards, groups, **options)


# Dual clip is in none of the four papers; it only acts on a negative advantage whose ratio has passed 3 (Ye et al.
# 2020, arXiv 1912.09729) and is the usual guard against such tokens.
_PPO = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "dynamic_sampling": False}

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, equation 3: the mean over a sample's tokens, then over samples; β = 0.04.
    "grpo": _PPO
    | {
        "advantage": "grpo",
        "advantage_std": "group",
        "aggregation": "seq-mean-token-mean",
        "kl_coef": 0.04,
    },
    # Yu et al. 2025, arXiv 2503.14476: clip-higher, token-level loss, no KL, groups without spread are sampled again.
    "dapo": _PPO
    | {
        "advantage": "grpo",
        "advantage_std": "group",
        "aggregation": "token-mean",
        "clip_high": 0.28,
        "kl_coef": 0.0,
        "dynamic_sampling": True,
    },
    # arXiv 2503.20783: neither the group's std nor the sample's length divides.
    "dr_grpo": _PPO
    | {
        "advantage": "dr_grpo",
        "advantage_std": None,
        "aggregation": "constant",
        "kl_coef": 0.0,
    },
    # arXiv 2402.14740: a sample is one action, so its tokens are summed. Its KL is in the reward; here, in the loss.
    "rloo": _PPO
    | {
        "advantage": "rloo",
        "advantage_std": None,
        "aggregation": "seq-mean-token-sum",
        "kl_coef": 0.05,
    },
}
