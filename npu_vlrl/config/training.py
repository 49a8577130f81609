"""The sections about learning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from npu_vlrl.config.base import BelowOne, Count, CountOrOff, NonNegative, Positive, Section, Share


class AlgorithmConfig(Section):
    """`preset` fills what is left at None; docs/algorithms.md has a table of what each fills in."""

    preset: Literal[
        "grpo",
        "dapo",
        "dr_grpo",
        "rloo",
        "gigpo",
        "rico_gae",
        "rico_grpo",
        "aico",
        "aico_without_loss_mask",
        "aico_without_advantage_mask",
        "trico",
        "trico_without_loss_mask",
        "trico_without_advantage_mask",
        "trico_without_turn_rewards",
        "trico_without_bi_level",
        "turn_ppo",
    ] = "grpo"
    advantage: (
        Literal[
            "grpo",
            "dr_grpo",
            "rloo",
            "opo",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "gae",
            "masked_gae",
            "bi_level_gae",
            "turn_wise_gae",
            "gigpo",
            "turn_grpo",
        ]
        | None
    ) = None
    advantage_std: Literal["group", "batch"] | None = None
    advantage_mask: bool | None = None
    """Estimates over the sampled tokens alone (VAGEN's M^adv), not over the observations between them."""
    turn_rewards: bool | None = None
    """Gives each turn its own reward; otherwise the episode's outcome is earned by its last token."""
    token_discount: Share | None = None
    """γ from token to token."""
    turn_discount: Share | None = None
    """γ from turn to turn in the estimate; `workflow.turn_discount` is that of the episode's reward."""
    gae_lambda: Share | None = None
    state_weight: NonNegative | None = None
    """Weight of GiGPO's comparison of turns that began in the same state."""
    loss_mask: bool | None = None
    """Trains on the sampled tokens alone (VAGEN's M^loss), not on the observations between them."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] | None = None
    loss: Literal["ppo", "decoupled_ppo", "gspo", "cispo", "reinforce"] | None = None
    clip_low: Positive | None = None
    clip_high: Positive | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    correction: Literal["off", "tis", "icepop"] = "off"
    """Weighs tokens by learner over engine probability: capped (`tis`), or left out beyond the bounds (`icepop`)."""
    correction_low: Positive = 0.5
    correction_high: Positive = 2.0
    """Bounds of that weight; `decoupled_ppo` leaves tokens above the upper one out."""
    kl_coef: NonNegative | None = None
    kl_kind: Literal["k1", "k2", "k3"] | None = None
    kl_in: Literal["loss", "reward"] | None = None
    entropy_coef: float = 0.0
    dynamic_sampling: bool | None = None
    """Replaces groups whose outcomes are all equal."""
    max_extra_groups: CountOrOff = 32
    """Groups that dynamic sampling may add in a step."""
    keep_groups: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a step's groups that is trained on: those whose outcomes vary most."""
    loss_constant: Positive = 1024.0
    """Divisor of the `constant` aggregation, in tokens per sample."""
    updates: Count = 1
    """Optimiser steps on each batch of trajectories; the batch is split into as many mini-batches."""
    epochs: Count = 1
    """Passes over each batch."""
    max_logprob_gap: Positive | None = None
    """Largest |learner - engine| log-probability allowed on the first mini-batch; more ends the run. Not set: 0.05 for
    a model in float32, 1 in bfloat16, where rounding alone makes a gap of 0.15 (benchmarks/README.md)."""


class CriticConfig(Section):
    """The value function; used where `algorithm.advantage` is a GAE."""

    backbone: Literal["separate", "shared"] = "separate"
    """A copy of the policy that is trained by itself, or the policy's own hidden states."""
    backbone_grad: Share = 0.5
    """Share of the value loss's gradient that reaches a shared backbone."""
    lr: Positive = 1e-5
    """Of the head, and of a separate backbone."""
    warmup_steps: CountOrOff = 0
    """First steps, in which only the critic learns."""
    value_clip: Positive | None = 0.5
    """Largest move of a value in one step that the loss rewards; None disables."""


class OptimConfig(Section):
    lr: Positive = 1e-6
    warmup_steps: CountOrOff = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NonNegative = 0.0
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    max_grad_norm: Positive = 1.0
    micro_batch_tokens: Count = 4096
    """Tokens packed into one forward pass; a longer sample gets a pass of its own."""
    logprob_chunk: Count = 1024
    """Trained positions whose logits exist at the same time."""


class WarmStartConfig(Section):
    """Supervised steps on scripted demonstrations of a generator's tasks, to teach the format."""

    steps: CountOrOff = 0
    batch: Count = 32
    lr: Positive = 1e-3
    right_share: Share = 0.25
    """Share of the demonstrated answers or actions that are right; the others are drawn from the wrong ones."""


class TrainConfig(Section):
    steps: CountOrOff = 100
    seed: CountOrOff = 0
    threads: CountOrOff = 0
    """CPU threads of PyTorch; 0 leaves its default."""
    staleness: CountOrOff = 0
    """Largest number of updates between the weights that an episode began with and those that are trained on it; 0
    plays and learns in turn. See docs/asynchronous.md."""
    learners: Count | Literal["all"] = 1
    """Of several processes the first ones learn, as many as this, and the others sample for them; or all of them learn
    and sample."""
    shard: bool = False
    """Divides weights, gradients and moments over the learners (FSDP2), where else each of them holds everything."""
    offload: bool = False
    """Keeps what `shard` divides in the memory of the host, and steps it there: slower, for a model that does not
    fit."""
