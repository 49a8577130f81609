"""One process of a test of vLLM in engine processes: `python -m tests.vllm.actor FOLDER WORKERS`.

Rank 0 has the learner's weights and plays episodes on rank 1, which has vLLM and none of them. It writes what it saw.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from npu_vlrl.config import ModelConfig
from npu_vlrl.engines import remote
from npu_vlrl.engines.serve import HandlerFactory, serve, weights_by_transfer
from npu_vlrl.engines.vllm.engine import VllmEngine, import_vllm
from npu_vlrl.hardware import select
from npu_vlrl.model.load import load_model
from npu_vlrl.network.world import World, join
from npu_vlrl.types import Sample
from npu_vlrl.workflow.export import export
from tests.support.episodes import RecordingEngine, Stage, long_episode
from tests.support.models import load
from tests.support.scoring import engine_logprobs, largest_gap, learner_logprobs

TIMEOUT_S = 120.0
BUCKET_BYTES = 2**16


class Player:
    """Plays on the engine of another process, and compares with the weights of this one."""

    def __init__(self, world: World, folder: Path) -> None:
        self.stage = Stage(load(folder))
        remote.begin(world, folder)
        self.engine = remote.RemoteEngine(world, self.stage.policy.trainable(), BUCKET_BYTES)
        self.stage.engine, self.stage.recorder = self.engine, RecordingEngine(self.engine)  # type: ignore[assignment,arg-type]

    def episodes(self) -> list[Sample]:
        """The same images each time."""
        self.stage.recorder.asked.clear()
        trajectories = self.stage.play(long_episode("qwen2_5_vl"), members=2)
        assert [t.error for t in trajectories] == [None] * len(trajectories)
        return export(trajectories, "concat", "best", 1.0, "test")

    def gap(self) -> tuple[float, list[int]]:
        """The largest between engine and learner, and the versions of the tokens."""
        samples = self.episodes()
        learner = learner_logprobs(self.stage.policy, self.stage.vision, samples)
        versions = {version for sample in samples for version in sample.weight_versions}
        return largest_gap(engine_logprobs(samples), learner), sorted(versions)

    @torch.no_grad()
    def change(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for parameter in self.stage.policy.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        self.stage.vision.weights_changed()


def learner(world: World, folder: Path) -> dict[str, object]:
    player = Player(world, folder)
    try:
        seen: dict[str, object] = {"first": player.gap()}
        player.change()
        seen["not told"] = player.gap()
        seen["sync"] = player.engine.weights_changed(1)
        seen["told"] = player.gap()
        player.change()
        player.engine.weights_changed(2)
        seen["again"] = player.gap()
        seen["bytes"] = sum(p.numel() * p.element_size() for p in player.stage.policy.trainable().values())
        return seen
    finally:
        remote.stop(world)


def without_mode(llm: Any) -> Any:
    """Like vllm-ascend, whose sampler does not hear which log-probabilities are asked for."""

    def made(*arguments: Any, logprobs_mode: str, **others: Any) -> Any:
        return llm(*arguments, **others)

    return made


def engine(world: World, workers: int) -> None:
    vllm = import_vllm()
    with ExitStack() as cleanup, patch.object(vllm, "LLM", without_mode(vllm.LLM)):

        def start(folder: Path) -> tuple[VllmEngine, HandlerFactory]:
            outline = load_model(ModelConfig(path=str(folder)), folder, 0, torch.device("meta"))
            assert all(p.device.type == "meta" for p in outline.policy.model.parameters())
            made = VllmEngine(
                outline.policy,
                outline.processor,
                outline.folder,
                device=torch.device("cpu"),
                context_tokens=1024,
                cache_bytes=2**28,
                capture=False,
                seed=0,
                workers=workers,
            )
            cleanup.callback(made.close)
            return made, weights_by_transfer

        serve(world, start)


def main(folder: Path, workers: int) -> None:
    torch.set_num_threads(1)
    if workers:
        import_vllm()
    world = join(select(), TIMEOUT_S)
    if world.rank:
        engine(world, workers)
    else:
        (folder.parent / "seen.json").write_text(json.dumps(learner(world, folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
