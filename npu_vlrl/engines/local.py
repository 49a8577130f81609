"""Base of engines that sample in their own process, with the methods that a learner in another process needs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from npu_vlrl.engines.base import EngineCounts, Outcome, Request, RoundEngine
from npu_vlrl.sync.buckets import WeightTarget

OWN = "the engine of this process"
"""Name of the engine in messages."""


class LocalEngine(RoundEngine):
    """See `types.Engine`."""

    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        return self.sample(requests)

    @abstractmethod
    def sample(self, requests: Sequence[Request]) -> list[Outcome]:
        """Samples the turns of a round, see `play`."""

    @abstractmethod
    def holder(self) -> WeightTarget:
        """Target of weights from another process; `weights_changed` is called after each update."""

    def probe(self, requests: Sequence[Request]) -> dict[str, list[Outcome]]:
        return {OWN: self.sample_probe(requests)}

    def sample_probe(self, requests: Sequence[Request]) -> list[Outcome]:
        """Samples a round that does not count as work, and ends its sessions."""
        kept = replace(self.counts)
        try:
            return self.sample(requests)
        finally:
            self.counts = kept
            for request in requests:
                self.forget_session(request.session)

    def counted(self) -> EngineCounts:
        """The counts, including images where the engine has vision features of its own."""
        return self.counts
