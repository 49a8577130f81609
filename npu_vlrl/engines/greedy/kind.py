"""`rollout.engine=greedy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from npu_vlrl.engines.base import Outcome, Request
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.engines.inprocess.kind import InProcess


class GreedyEngine(InProcessEngine):
    def sample(self, requests: Sequence[Request]) -> list[Outcome]:
        return super().sample([replace(one, sampling=replace(one.sampling, temperature=0.0)) for one in requests])


class Greedy(InProcess):
    def new(self, *arguments: Any) -> GreedyEngine:
        made = super().new(*arguments)
        return GreedyEngine(made.policy, made.vision, made.cache_bytes, made.new_capture)


KIND = Greedy()
