"""What an engine must do that samples in the process it is in, so that a learner in another process can use it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from npu_vlrl.rollout.rounds import EngineCounts, Outcome, Request, RoundEngine
from npu_vlrl.sync.buckets import Holder


class LocalEngine(RoundEngine):
    """See `types.Engine`."""

    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        return self.sample(requests)

    @abstractmethod
    def sample(self, requests: Sequence[Request]) -> list[Outcome]:
        """See `play`."""

    @abstractmethod
    def holder(self) -> Holder:
        """How weights of another process come into this engine; `weights_changed` is told afterwards."""

    def counted(self) -> EngineCounts:
        """`counts`, with the pictures of an engine that is not the learner's own."""
        return self.counts
