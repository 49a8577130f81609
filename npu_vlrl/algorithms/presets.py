"""Presets: the settings of published algorithms. A key that a preset leaves out is filled by the chosen components."""

from __future__ import annotations

from typing import Any

# VAGEN, arXiv 2510.16907 and its notes: KL 0.001 in the reward, λ and γ_token 1, γ_turn 0.95.
_VAGEN = {"kl_coef": 0.001, "kl_kind": "k1", "kl_in": "reward"}

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, equation 3: the mean over a sample's tokens, then over samples; β = 0.04.
    "grpo": {"advantage": "grpo", "aggregation": "seq-mean-token-mean", "kl_coef": 0.04},
    # Yu et al. 2025, arXiv 2503.14476: clip-higher, token-level loss, no KL, groups without spread are sampled again.
    "dapo": {"advantage": "grpo", "clip_high": 0.28, "dynamic_sampling": True},
    # arXiv 2503.20783: neither the group's std nor the sample's length divides.
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant"},
    # arXiv 2402.14740: a sample is one action, so its tokens are summed; KL in the reward.
    "rloo": {
        "advantage": "rloo",
        "aggregation": "seq-mean-token-sum",
        "kl_coef": 0.05,
        "kl_kind": "k1",
        "kl_in": "reward",
    },
    # Feng et al. 2025, arXiv 2505.10978: episode and step advantages with equal weight, KL 0.01.
    "gigpo": {"advantage": "gigpo", "kl_coef": 0.01},
    # The whole interaction as one sequence, outcome only, nothing masked.
    "rico_gae": _VAGEN | {"advantage": "gae", "loss_mask": False, "advantage_mask": False, "turn_rewards": False},
    "rico_grpo": {"advantage": "grpo", "loss_mask": False, "kl_coef": 0.001},
    # Only what the policy sampled, in the loss and in the estimate.
    "aico": _VAGEN | {"advantage": "masked_gae", "turn_rewards": False},
    # And turns: a reward for each, and GAE on two levels.
    "trico": _VAGEN | {"advantage": "bi_level_gae"},
    # A turn is the action of PPO.
    "turn_ppo": _VAGEN | {"advantage": "turn_wise_gae"},
}

REMOVED = {
    "aico_without_loss_mask": "algorithm.preset=aico algorithm.loss_mask=false",
    "aico_without_advantage_mask": "algorithm.preset=aico algorithm.advantage_mask=false",
    "trico_without_loss_mask": "algorithm.preset=trico algorithm.loss_mask=false",
    "trico_without_advantage_mask": "algorithm.preset=trico algorithm.advantage_mask=false",
    "trico_without_turn_rewards": "algorithm.preset=trico algorithm.turn_rewards=false",
    "trico_without_bi_level": "algorithm.preset=trico algorithm.advantage=masked_gae",
}
"""Presets of earlier releases, and the overrides that replace each."""
