"""The sections of the configuration that control learning."""

from __future__ import annotations

from typing import Literal

from npu_vlrl.algorithms.value import ValueOptions
from npu_vlrl.common.fields import BelowOne, Count, CountOrOff, NonNegative, Positive, Section, Share


class CriticConfig(ValueOptions):
    """The value function; used where `algorithm.advantage` is a GAE."""

    backbone: Literal["separate", "shared"] = "separate"
    """Network of the critic: a separately trained copy of the policy, or the policy's own hidden states."""
    backbone_grad: Share = 0.5
    """Share of the value loss's gradient that reaches a shared backbone."""
    lr: Positive = 1e-5
    """Learning rate of the value head, and of a separate backbone."""
    warmup_steps: CountOrOff = 0
    """Number of first steps in which only the critic learns."""


class OptimConfig(Section):
    lr: Positive = 1e-6
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: CountOrOff = 0
    """Steps in which the learning rate rises linearly to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at `train.steps`."""
    weight_decay: NonNegative = 0.0
    """Weight decay of AdamW; 0 disables."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Moment coefficients of AdamW."""
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
    """Number of RL updates: each plays `rollout.groups` groups and learns from them. 0 only warms up and evaluates."""
    seed: CountOrOff = 0
    """Seed of everything random: weights of `tiny:` models, order of tasks, sampling."""
    threads: CountOrOff = 0
    """CPU threads of PyTorch; 0 leaves its default."""
    staleness: CountOrOff = 0
    """Maximum number of updates between the weights that an episode began with and the weights that it trains; 0
    alternates rollout and update. See docs/asynchronous.md."""
    learners: Count | Literal["all"] = 1
    """Number of processes that learn: the first ones, while the others sample for them. `all` makes every process learn
    and sample."""
    shard: bool = False
    """Shards weights, gradients and moments over the learners (FSDP2); otherwise each learner holds everything."""
    offload: bool = False
    """Keeps the sharded state in host memory, and runs the optimiser there: slower, for a model that does not fit."""
