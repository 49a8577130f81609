"""The sections about learning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from npu_vlrl.config.base import BelowOne, Count, CountOrOff, NonNegative, Positive, Section, Share


class AlgorithmConfig(Section):
    """`preset` fills what is left at null; docs/algorithms.md has a table of what each fills in."""

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
    """A published algorithm, which chooses what is null below."""
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
    """The estimator of advantages, see docs/algorithms.md."""
    advantage_std: Literal["group", "batch"] | None = None
    """Spread that a group's advantages are divided by: the group's own, or the batch's."""
    advantage_mask: bool | None = None
    """Estimates over the sampled tokens alone (VAGEN's M^adv), not over the observations between them."""
    turn_rewards: bool | None = None
    """Gives each turn its own reward; otherwise the episode's outcome is earned by its last token."""
    token_discount: Share | None = None
    """γ from token to token."""
    turn_discount: Share | None = None
    """γ from turn to turn in the estimate; `workflow.turn_discount` is that of the episode's reward."""
    gae_lambda: Share | None = None
    """λ of generalised advantage estimation."""
    state_weight: NonNegative | None = None
    """Weight of GiGPO's comparison of turns that began in the same state."""
    loss_mask: bool | None = None
    """Trains on the sampled tokens alone (VAGEN's M^loss), not on the observations between them."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] | None = None
    """How the losses of tokens become one number, see docs/losses.md."""
    loss: Literal["ppo", "decoupled_ppo", "gspo", "cispo", "reinforce"] | None = None
    """What a token contributes, see docs/losses.md."""
    clip_low: Positive | None = None
    """The ratio of a token is clipped below 1 - `clip_low`."""
    clip_high: Positive | None = None
    """The ratio of a token is clipped above 1 + `clip_high`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A token with advantage A < 0 loses at most -A times this."""
    correction: Literal["off", "tis", "icepop"] = "off"
    """Weighs tokens by learner over engine probability: capped (`tis`), or left out beyond the bounds (`icepop`)."""
    correction_low: Positive = 0.5
    """Lower bound of that weight, for `icepop`."""
    correction_high: Positive = 2.0
    """Upper bound of that weight; `decoupled_ppo` leaves tokens above it out."""
    kl_coef: NonNegative | None = None
    """Weight of the KL divergence to the model before training; 0 needs no reference."""
    kl_kind: Literal["k1", "k2", "k3"] | None = None
    """Its estimate from one token, see docs/losses.md."""
    kl_in: Literal["loss", "reward"] | None = None
    """Adds the KL to the loss, or takes it from the reward of each token."""
    entropy_coef: float = 0.0
    """Weight of the entropy in the loss: positive values reward it. 0 disables."""
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
    """Largest move of a value in one step that the loss rewards; null disables."""


class OptimConfig(Section):
    lr: Positive = 1e-6
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: CountOrOff = 0
    """Steps of training in which the learning rate rises to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: stays, or falls to 0 at `train.steps`."""
    weight_decay: NonNegative = 0.0
    """Of AdamW; 0 disables."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Of AdamW."""
    max_grad_norm: Positive = 1.0
    """Gradients with a larger norm are scaled down to it."""
    micro_batch_tokens: Count = 4096
    """Tokens packed into one forward pass; a longer sample gets a pass of its own."""
    logprob_chunk: Count = 1024
    """Trained positions whose logits exist at the same time."""


class WarmStartConfig(Section):
    """Supervised steps on scripted demonstrations of a generator's tasks, to teach the format."""

    steps: CountOrOff = 0
    """Supervised steps; 0 disables."""
    batch: Count = 32
    """Demonstrated episodes a step."""
    lr: Positive = 1e-3
    """Learning rate of these steps."""
    right_share: Share = 0.25
    """Share of the demonstrated answers or actions that are right; the others are drawn from the wrong ones."""


class TrainConfig(Section):
    steps: CountOrOff = 100
    """Updates by RL: each plays `rollout.groups` groups and learns from them. 0 only warms up and evaluates."""
    seed: CountOrOff = 0
    """Of all that is random: weights of `tiny:` models, order of tasks, sampling."""
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
