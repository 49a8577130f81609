"""Kind of the engine that `rollout.engine=inprocess` chooses."""

from __future__ import annotations

from collections.abc import Iterator

from npu_vlrl.config import Config
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.engines.kind import EngineKind, EngineProcess
from npu_vlrl.hardware import Platform
from npu_vlrl.kernels.graph_capture import can_capture, can_capture_experts
from npu_vlrl.model.policy import Policy


class InProcess(EngineKind):
    has_own_weights = False

    def problems(self, config: Config, platform: Platform, several: bool) -> Iterator[str]:
        if config.rollout.tensor_parallel > 1 or config.rollout.sleep:
            yield (
                "rollout.tensor_parallel above 1 and rollout.sleep are for vLLM; set rollout.engine=vllm or leave them "
                "out"
            )

    def new(self, process: EngineProcess) -> InProcessEngine:
        config, platform, policy = process.config, process.platform, process.loaded.policy
        assert process.vision is not None
        new_capture = platform.graph_capture if config.rollout.graphs and _captures(platform, policy) else lambda: None
        cache_bytes = config.rollout.cache_mib * 2**20
        return InProcessEngine(policy, process.vision, cache_bytes, new_capture, config.rollout.router_replay)


def _captures(platform: Platform, policy: Policy) -> bool:
    """Whether all that a decode step consists of can be captured."""
    if not can_capture(platform, policy.device, policy.dtype):
        return False
    tokens = policy.head_weight[None, :2]  # any two; the router sends them to different experts
    return all(can_capture_experts(platform, mixture, tokens) for mixture in policy.mixtures[:1])


KIND = InProcess()
