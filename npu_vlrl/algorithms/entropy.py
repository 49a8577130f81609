"""The entropy bonus of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from npu_vlrl.algorithms.component import FIXED, Options

if TYPE_CHECKING:
    from torch import Tensor


class Entropy(Options):
    entropy_coef: Annotated[float, FIXED] = 0.0
    """Weight of the entropy in the loss: positive values reward it. 0 disables."""

    def added(self, loss_N: Tensor, entropy_N: Tensor) -> Tensor:
        """The loss of each token with the bonus, [N]; entropy in nats."""
        return loss_N - self.entropy_coef * entropy_N if self.entropy_coef else loss_N
