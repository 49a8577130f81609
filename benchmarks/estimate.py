"""Compares `npu-vlrl estimate` with measured peaks of memory and seconds.

    python -m benchmarks.estimate [--size published|tiny] [--cases NAME …] [--repeats 2] [--out FILE]

Models of the published shapes have random weights in bfloat16. An update is that of `benchmarks/update_step.py`: 8
prompts with a picture of 640x480, each with 8 responses of 64 to 1024 tokens, in micro-batches of 8192 or 24576 tokens.
The estimate is given the same micro-batches, and nothing of what was measured. A rollout plays 64 episodes of 3 turns,
each turn with a picture of its own. `tiny` is for a CPU, where there is no peak to compare with.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import rollout, setup, update_step
from benchmarks.decode import new_engine
from npu_vlrl.config import AlgorithmConfig, LoraConfig, ModelConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.engines.inprocess.engine import PREFILL_TOKENS
from npu_vlrl.estimate.memory import MemoryModel, Moment, Pass, Plan, Rollout
from npu_vlrl.estimate.outline import outline_of, shapes_folder
from npu_vlrl.estimate.timing import update_seconds
from npu_vlrl.hardware import Platform
from npu_vlrl.kernels.modules import attach
from npu_vlrl.learner.flops import seen_pairs
from npu_vlrl.learner.pack import collate, plan_ranks
from npu_vlrl.model.load import DTYPES, arranged, load_model, outline
from npu_vlrl.model.policy import Policy
from npu_vlrl.types import Sample

FEATURE_BYTES = update_step.CACHE_BYTES


@dataclass(frozen=True)
class Case:
    name: str
    model: str = "Qwen2.5-VL-3B-Instruct"
    micro_batch_tokens: int = 8192
    checkpointing: bool = False
    freeze_vision: bool = False
    lora: bool = False
    reference: bool = False
    plays: bool = False
    """Samples, and does not learn."""

    def config(self, tiny: bool) -> ModelConfig:
        family = "qwen3_vl" if "Qwen3" in self.model else "qwen2_5_vl"
        return ModelConfig(
            path=f"tiny:{family}" if tiny else self.model,
            dtype="float32" if tiny else "bfloat16",
            gradient_checkpointing=self.checkpointing,
            freeze_vision=self.freeze_vision,
            lora=LoraConfig() if self.lora else None,
        )


CASES = (
    Case("checkpointing, one micro-batch", micro_batch_tokens=24576, checkpointing=True),
    Case("checkpointing", checkpointing=True),
    Case("no checkpointing"),
    Case("frozen tower, no checkpointing", freeze_vision=True),
    Case("frozen tower, checkpointing, KL reference", checkpointing=True, freeze_vision=True, reference=True),
    Case("LoRA, no checkpointing", lora=True),
    Case("LoRA, checkpointing, one micro-batch", micro_batch_tokens=24576, lora=True, checkpointing=True),
    Case("Qwen3-VL-4B, checkpointing", model="Qwen3-VL-4B-Instruct", checkpointing=True),
    Case("LoRA of Qwen3-VL-8B, no checkpointing", model="Qwen3-VL-8B-Instruct", lora=True),
    Case("rollout", plays=True),
    Case("rollout of Qwen3-VL-4B", model="Qwen3-VL-4B-Instruct", plays=True),
)


def made(config: ModelConfig, on: Platform) -> setup.Model:
    """With random weights."""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as scratch:
        if config.path.startswith("tiny:"):
            loaded = load_model(config, Path(scratch), 0, on.device())
            assert loaded.processor is not None
            return setup.Model(loaded.policy, loaded.processor)
        folder = shapes_folder(config.path, Path(scratch))
        torch.manual_seed(0)
        model = outline(folder, DTYPES[config.dtype], on.device())
        attach(model)
        processor = ImageProcessor.from_folder(folder)
    assert processor is not None
    policy = Policy(arranged(model, config), setup.QWEN_SPECIAL, setup.QWEN_IDS, processor.merge_size)
    return setup.Model(policy, processor)


def micro_batches(samples: Sequence[Sample], room: int, policy: Policy) -> list[Pass]:
    """What a learner computes, in its order."""
    (planned,) = plan_ranks(samples, room, policy.special.image, 1, lambda some, tree: float(tree.bounds[-1]))
    found = []
    for indices in planned:
        batch = collate([samples[i] for i in indices], policy)
        path = batch.tree.path_bounds[-1]
        scored = len(batch.target_ids_N)
        found.append(Pass(len(batch.token_ids_T), path, seen_pairs(batch.tree), scored, batch.images))
    return found


def update(case: Case, on: Platform, tiny: bool, repeats: int) -> dict[str, Any]:
    config = case.config(tiny)
    model = made(config, on)
    shape = update_step.SHAPES["tiny" if tiny else "3b"]
    room = shape.micro_batch_tokens * case.micro_batch_tokens // 24576
    groups, members = (2, 2) if tiny else (8, 8)
    samples = update_step.rollouts(model, shape, groups, members)
    settings = update_step.ALGORITHM.model_dump(exclude_unset=True)
    algorithm = AlgorithmConfig(**{**settings, "kl_coef": 0.01 if case.reference else 0.0})
    learner = update_step.learner(model, room, algorithm)
    if case.reference:
        samples = learner.score(samples)
    row = setup.measure(case.name, lambda: update_step.update(learner, samples), on, model.policy, repeats)
    work = micro_batches(samples, room, model.policy)
    memory = MemoryModel(outline_of(config).policy, Plan(reference=case.reference, feature_bytes=FEATURE_BYTES))
    images = {image.image.hash: image for one in work for image in one.images}
    kept = Rollout(0, 0, image_tokens=sum(image.n_tokens for image in images.values()))
    fullest = memory.update(work, memory.features(kept) if model.policy.vision_is_frozen else None)
    peak = on.peak()
    return compared(case.name, fullest, row, peak and update_seconds(memory, work, peak))


def play(case: Case, on: Platform, tiny: bool, repeats: int) -> dict[str, Any]:
    config = case.config(tiny)
    model = made(config, on)
    workload = rollout.WORKLOADS["tiny"] if tiny else rollout.Workload(64, 3, 64, (224, 640), 32)
    told = rollout.scripts(model, workload, seed=0)
    model, _ = rollout.with_patches(model, told)
    engine = new_engine(model, on)

    def work() -> None:
        engine.forget_features()
        asyncio.run(rollout.play(engine, told, workload.new))

    row = setup.measure(case.name, work, on, model.policy, repeats)
    contexts = rollout.context_lengths(told, workload.new) + workload.new
    lengths = contexts[:, -1]
    pictures = rollout.pictures_of(told)
    patches = [image.grid[1] * image.grid[2] for image in pictures]
    said = max(sum(len(script[turn]) for script in told) for turn in range(workload.turns))
    together = min(said, PREFILL_TOKENS)
    memory = MemoryModel(outline_of(config).policy, Plan(learners=0, feature_bytes=4 << 30))
    fullest = memory.rollout(
        Rollout(
            rows=workload.episodes,
            room=-(-int(lengths.max()) // 128) * 128,
            kept=int(lengths.sum()),
            kept_before=int(contexts[:, -2].sum()),
            prefill=together,
            patches=sum(patches) // workload.turns * together // said,
            image_tokens=sum(image.n_tokens for image in pictures),
        )
    )
    return compared(case.name, fullest, row, None)


def compared(name: str, fullest: Moment, row: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    measured = row["peak_gib"]
    estimated = fullest.total / 2**30
    return {
        "case": name,
        "estimate, GiB": estimated,
        "measured, GiB": measured,
        "off by": measured and f"{100 * (estimated / measured - 1):+.1f} %",
        "estimate, s": seconds,
        "measured, s": row["seconds"],
        "fullest": fullest.name,
        "parts, GiB": {name: round(size / 2**30, 2) for name, size in fullest.parts.items()},
    }


def main(arguments: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="published", choices=("published", "tiny"))
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    on = setup.platform()
    rows = []
    for case in CASES:
        if options.cases and case.name not in options.cases:
            continue
        work: Callable[..., dict[str, Any]] = play if case.plays else update
        rows.append(work(case, on, options.size == "tiny", options.repeats))
        setup.forget(on)
        print(rows[-1], file=sys.stderr, flush=True)
    print(setup.table([{k: v for k, v in row.items() if k != "parts, GiB"} for row in rows]))
    setup.write(options.out, {**setup.environment(on), "rows": rows})
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
