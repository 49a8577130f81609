"""Kind of the engine that `rollout.engine=vllm` chooses."""

from __future__ import annotations

import os
from collections.abc import Iterator

from npu_vlrl.config import Config
from npu_vlrl.engines.kind import EngineKind, EngineProcess, Placement
from npu_vlrl.engines.vllm.engine import VllmEngine, import_vllm
from npu_vlrl.hardware import Platform
from npu_vlrl.model.families import family_of_path


class Vllm(EngineKind):
    has_own_weights = True

    def problems(self, config: Config, platform: Platform, several: bool) -> Iterator[str]:
        rollout, all_learn = config.rollout, config.train.learners == "all"
        family = family_of_path(config.model.path)
        if family is not None and not family.vllm:
            yield (
                f"rollout.engine=vllm: nobody has compared vLLM with the learner for {family.title}; set "
                "rollout.engine=inprocess"
            )
        if several and all_learn and rollout.tensor_parallel > 1:
            yield (
                f"rollout.tensor_parallel={rollout.tensor_parallel} takes devices that only sample, and with "
                "train.learners=all each process has one device for both; leave one of the two out"
            )
        if several and not all_learn and rollout.sleep:
            yield "rollout.sleep is for vLLM beside a learner; set train.learners=all, or leave it out"
        yield from platform.vllm_problems(config.model.dtype, rollout.sleep)
        if config.model.lora is not None and config.model.dtype == "float32" and platform.device().type != "cpu":
            yield (
                f"model.lora with rollout.engine=vllm: on the platform {platform.name} vLLM computes adapters in 16 "
                "bits only; set model.dtype=bfloat16, or rollout.engine=inprocess"
            )

    def prepare(self) -> None:
        import_vllm()

    def new(self, process: EngineProcess) -> VllmEngine:
        config, platform, device, loaded = process.config, process.platform, process.device, process.loaded
        memory = platform.memory(device)
        workers = _workers(process.placement, config.rollout.tensor_parallel)
        if workers and platform.visible_devices_variable is not None:
            own = [platform.physical_id(device + number) for number in range(workers)]
            os.environ[platform.visible_devices_variable] = ",".join(own)  # workers see this process's devices only
        engine = VllmEngine(
            loaded.policy,
            loaded.processor,
            loaded.folder,
            device=platform.device(device),
            context_tokens=config.workflow.context_tokens,
            cache_bytes=config.rollout.cache_mib * 2**20,
            capture=config.rollout.graphs and platform.graph_capture() is not None,
            seed=config.train.seed,
            workers=workers,
            sleeps=config.rollout.sleep,
            device_bytes=None if memory is None else memory.total,
        )
        process.cleanup.callback(engine.close)
        return engine


def _workers(placement: Placement, tensor_parallel: int) -> int:
    """Number of workers, see `VllmEngine`. Beside a learner with process groups, the worker must be another process."""
    match placement:
        case Placement.ONLY:
            return tensor_parallel if tensor_parallel > 1 else 0
        case Placement.LEARNER:
            return 1
        case Placement.ENGINE:
            return tensor_parallel


KIND = Vllm()
