"""The sections about learning."""

from __future__ import annotations

from typing import Literal

from npu_vlrl.algorithms.value import ValueOptions
from npu_vlrl.common.fields import BelowOne, Count, CountOrOff, NonNegative, Positive, Section, Share


class CriticConfig(ValueOptions):
    """The value function; used where `algorithm.advantage` is a GAE."""

    backbone: Literal["separate", "shared"] = "separate"
    """A copy of the policy that is trained by itself, or the policy's own hidden states."""
    backbone_grad: Share = 0.5
    """Share of the value loss's gradient that reaches a shared backbone."""
    lr: Positive = 1e-5
    """Of the head, and of a separate backbone."""
    warmup_steps: CountOrOff = 0
    """First steps, in which only the critic learns."""


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
