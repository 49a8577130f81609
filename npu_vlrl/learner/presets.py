"""Settings that make up a published algorithm. What a preset leaves out has the value in `DEFAULTS`."""

from __future__ import annotations

from typing import Any

# Dual clip is in none of the papers; it only acts on a negative advantage whose ratio has passed 3 (Ye et al. 2020,
# arXiv 1912.09729) and is the usual guard against such tokens.
DEFAULTS: dict[str, Any] = {
    "advantage_std": "group",
    "advantage_mask": True,
    "loss_mask": True,
    "turn_rewards": True,
    "token_discount": 1.0,
    "turn_discount": 0.95,
    "gae_lambda": 1.0,
    "state_weight": 1.0,
    "aggregation": "token-mean",
    "loss": "ppo",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 3.0,
    "kl_coef": 0.0,
    "kl_kind": "k3",
    "kl_in": "loss",
    "dynamic_sampling": False,
}

# VAGEN, arXiv 2510.16907 and its notes: KL 0.001 in the reward, λ and γ_token 1, γ_turn 0.95.
_VAGEN = {"kl_coef": 0.001, "kl_kind": "k1", "kl_in": "reward"}
_NO_MASKS = {"loss_mask": False, "advantage_mask": False}
_AICO = _VAGEN | {"advantage": "masked_gae", "turn_rewards": False}
_TRICO = _VAGEN | {"advantage": "bi_level_gae"}

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
    "rico_gae": _VAGEN | _NO_MASKS | {"advantage": "gae", "turn_rewards": False},
    "rico_grpo": {"advantage": "grpo", "loss_mask": False, "kl_coef": 0.001},
    # Only what the policy sampled, in the loss and in the estimate.
    "aico": _AICO,
    "aico_without_loss_mask": _AICO | {"loss_mask": False},
    "aico_without_advantage_mask": _AICO | {"advantage_mask": False},
    # And turns: a reward for each, and GAE on two levels.
    "trico": _TRICO,
    "trico_without_loss_mask": _TRICO | {"loss_mask": False},
    "trico_without_advantage_mask": _TRICO | {"advantage_mask": False},
    "trico_without_turn_rewards": _TRICO | {"turn_rewards": False},
    "trico_without_bi_level": _TRICO | {"advantage": "masked_gae"},
    # A turn is the action of PPO.
    "turn_ppo": _VAGEN | {"advantage": "turn_wise_gae"},
}
