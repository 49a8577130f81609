"""What an engine must do that samples in the process it is in, so that a learner in another process can use it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from npu_vlrl.engines.base import EngineCounts, Outcome, Request, RoundEngine
from npu_vlrl.sync.buckets import WeightTarget

OWN = "the engine of this process"
"""Its name in messages."""


class LocalEngine(RoundEngine):
    """See `types.Engine`."""

    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        return self.sample(requests)

    @abstractmethod
    def sample(self, requests: Sequence[Request]) -> list[Outcome]:
        """See `play`."""

    @abstractmethod
    def holder(self) -> WeightTarget:
        """How weights of another process come into this engine; `weights_changed` is told afterwards."""

    def probe(self, requests: Sequence[Request]) -> dict[str, list[Outcome]]:
        return {OWN: self.sample_probe(requests)}

    def sample_probe(self, requests: Sequence[Request]) -> list[Outcome]:
        """Samples a round that does not count, of sessions that end with it."""
        kept = replace(self.counts)
        try:
            return self.sample(requests)
        finally:
            self.counts = kept
            for request in requests:
                self.forget_session(request.session)

    def counted(self) -> EngineCounts:
        """`counts`, with the pictures of an engine that is not the learner's own."""
        return self.counts
