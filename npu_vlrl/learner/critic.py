"""The value function of the GAE estimators: a head on the policy's backbone, or on a copy of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from npu_vlrl.algorithms.value import value_loss
from npu_vlrl.config import CriticConfig, OptimConfig
from npu_vlrl.learner.optimizer import new_optimizer, step_or_skip
from npu_vlrl.learner.pack import MicroBatch
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.vision import VisionFeatures

Hidden = Callable[[MicroBatch, Policy, VisionFeatures], Tensor]
"""Function that computes the hidden states [N, hidden] before the scored tokens of a micro-batch."""


class Critic:
    """Values of the states before tokens; 0 everywhere at the start.

    A separate backbone begins as a copy of the policy, with the same frozen weights, and shares the features of a
    frozen tower.
    """

    def __init__(
        self,
        policy: Policy,
        vision: VisionFeatures,
        config: CriticConfig,
        optim: OptimConfig,
        hidden: Hidden,
        own: Callable[[], Policy],
    ) -> None:
        """`own` makes the policy of a separate backbone."""
        self.config = config
        self.optim = optim
        self.shared = config.backbone == "shared"
        self._hidden = hidden
        self.policy, self.vision = policy, vision
        self.head = nn.Linear(policy.head_weight.shape[1], 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.parameters = {f"critic.head.{name}": p for name, p in self.head.named_parameters()}
        if not self.shared:
            self.policy = own()
            if not policy.vision_is_frozen:
                self.vision = VisionFeatures(self.policy, vision.processor, vision.cache_bytes)
            self.parameters |= {f"critic.{name}": p for name, p in self.policy.trainable().items()}
        self.optimizer = new_optimizer(self.parameters, optim)

    def values(self, batch: MicroBatch) -> Tensor:
        """Values of the states before the scored tokens, float32 [N]."""
        return self._values(self._hidden(batch, self.policy, self.vision))

    def loss(self, batch: MicroBatch, policy_hidden_NH: Tensor, states: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The value loss of a micro-batch, and its metrics. `states` counts the trained states of the whole update.

        A shared critic reads `policy_hidden_NH`, and passes the share `backbone_grad` of its gradient on.
        """
        if self.shared:
            share = self.config.backbone_grad
            hidden_NH = share * policy_hidden_NH + (1 - share) * policy_hidden_NH.detach()
        else:
            hidden_NH = self._hidden(batch, self.policy, self.vision)
        at = batch.critic_N
        assert batch.values_N is not None, "the samples were not scored by the critic"
        values = self._values(hidden_NH[at])
        weights = torch.full_like(values, 1 / max(1, states))
        return value_loss(values, batch.values_N[at], batch.returns_N[at], weights, self.config)

    def apply(self, skip: bool, add: Callable[[Tensor], Tensor]) -> float | None:
        """Steps the critic's optimiser, see `step_or_skip`."""
        return step_or_skip(self.optimizer, self.optim.max_grad_norm, self.config.lr, skip, add)

    def _values(self, hidden_NH: Tensor) -> Tensor:
        values_N1: Tensor = self.head(hidden_NH.float())
        return values_N1[:, 0]


def backbone(policy: Policy) -> Policy:
    """Copies the policy for a critic with a backbone of its own."""
    made = policy.copy()
    if made.head_weight is not made.base.get_input_embeddings().weight:
        made.head_weight.requires_grad_(False)  # it scores tokens, which a critic does not
    made.model.train()
    return made
