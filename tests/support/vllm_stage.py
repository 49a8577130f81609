"""A model with the engine of vLLM beside the in-process one, for the tests on a CPU and on the stand-in for CANN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from npu_vlrl.engines.vllm.engine import VllmEngine
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.types import Generation, Sample, Segment
from npu_vlrl.workflow.export import export
from tests.support.episodes import Stage, long_episode
from tests.support.models import is_vision
from tests.support.rounds import LOOKS, continued
from tests.support.scoring import engine_logprobs, largest_gap, learner_logprobs

HIDDEN = 128
"""Heads of 32: vLLM's attention on a CPU knows none of 16."""
CONTEXT = 1024
CACHE_BYTES = 2**28


class VllmStage(Stage):
    """`engine` is that of vLLM, on the device that has the learner's weights."""

    def __init__(self, kind: str, loaded: LoadedModel, device_bytes: int | None = None, sleeps: bool = False) -> None:
        super().__init__(loaded)
        self.kind = kind
        self.inprocess = self.engine
        self.vllm = VllmEngine(
            loaded.policy,
            loaded.processor,
            loaded.folder,
            device=loaded.policy.device,
            context_tokens=CONTEXT,
            cache_bytes=CACHE_BYTES,
            capture=False,
            seed=0,
            device_bytes=device_bytes,
            sleeps=sleeps,
        )
        self.engine = self.recorder.engine = self.vllm  # type: ignore[assignment]


def tell(stage: VllmStage, version: int) -> None:
    stage.engine.weights_changed(version)
    stage.inprocess.weights_changed(version)


@torch.no_grad()
def change(parameters: Iterable[Tensor], seed: int, size: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.add_((torch.randn(parameter.shape, generator=generator) * size).to(parameter))


@contextmanager
def weights_put_back(stage: VllmStage) -> Iterator[None]:
    """Puts the weights back afterwards, and the version."""
    before = {name: p.detach().clone() for name, p in stage.policy.trainable().items()}
    yield
    with torch.no_grad():
        for name, parameter in stage.policy.trainable().items():
            parameter.copy_(before[name])
    tell(stage, 0)
    stage.vision.weights_changed()


def looks(stage: VllmStage) -> list[Any]:
    return LOOKS if is_vision(stage.kind) else []


def episodes(stage: VllmStage, temperature: float = 1.0, seed: int = 0, members: int = 3) -> list[Sample]:
    """Several turns with images in prompts and in the results of tools, and some without."""
    stage.recorder.asked.clear()
    trajectories = stage.play(long_episode(stage.kind), members=members, temperature=temperature, seed=seed)
    assert [t.error for t in trajectories] == [None] * len(trajectories)
    return export(trajectories, "concat", "best", 1.0, "test")


def gap(stage: VllmStage, samples: Sequence[Sample], temperature: float = 1.0) -> float:
    """The largest between engine and learner, in nats."""
    learner = learner_logprobs(stage.policy, stage.vision, samples, temperature)
    return largest_gap(engine_logprobs(samples), learner)


def answered(stage: VllmStage, context: Sequence[Segment], answer: Any) -> Sample:
    whole = continued(stage, context, answer, "")[:-1]
    return Sample("s", "g", tuple(whole), (len(whole) - 1,), 0.0, 0.0, "e")


def joined(parts: Sequence[Generation]) -> Generation:
    """The parts of an interrupted turn as one."""
    return Generation(
        tuple(token for part in parts for token in part.token_ids),
        tuple(value for part in parts for value in part.logprobs),
        tuple(version for part in parts for version in part.weight_versions),
        parts[-1].stop_reason,
    )
