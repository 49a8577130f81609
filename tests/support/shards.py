"""A learner in one process or in several, of which each may hold a part; `python -m tests.support.shards FOLDER CASE…`
is one of several, on a device of its own, and leaves in FOLDER what came of it.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from npu_vlrl import kernels
from npu_vlrl.config import AlgorithmConfig, CriticConfig, ModelConfig, OptimConfig
from npu_vlrl.hardware import select
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.learner.shard import ShardedPolicy
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.load import load_model
from npu_vlrl.model.vision import VisionFeatures
from tests.learner.test_learner_ranks import ALGORITHMS, BUDGET, groups
from tests.support.learning import CPU, SMALL_LORA, assign_advantages, load, tiny_folder

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "whole": ("qwen2_5_vl", "grpo", {}),  # with a KL reference
    "deep": ("qwen3_vl", "decoupled", {"gradient_checkpointing": True}),
    "experts": ("qwen3_vl_moe", "grpo", {}),
    "frozen": ("qwen2_5_vl", "ppo", {"freeze_vision": True}),
    "offload": ("qwen2_5_vl", "ppo", {"gradient_checkpointing": True}),  # with a critic's own backbone
    "shared": ("qwen2_5_vl", "ppo-shared", {}),
    "lora": ("qwen2_5_vl", "grpo", {"lora": SMALL_LORA}),
    "bfloat16": ("qwen2_5_vl", "grpo", {"dtype": "bfloat16"}),
    "narrow lora": ("qwen3_vl", "gspo-tis", {"dtype": "bfloat16", "lora": SMALL_LORA}),
}
"""Name: model, algorithm, settings of the model."""

Result = tuple[list[dict[str, float]], dict[str, Tensor]]


def new_learner(case: str, ranks: Ranks | None, device: torch.device = CPU) -> Learner:
    """Its policy is divided over the ranks, where there are some."""
    kind, name, model = CASES[case]
    torch.manual_seed(7)  # adapters begin at random
    loaded = load_model(ModelConfig(path=str(tiny_folder(kind)), **model), Path("unused"), 0, device)
    settings = AlgorithmConfig(**({"max_logprob_gap": 1e6} | ALGORITHMS[name]))
    vision = VisionFeatures(loaded.policy, loaded.processor, 1 << 24)
    optim = OptimConfig(lr=1e-3, micro_batch_tokens=BUDGET, weight_decay=0.1)
    critic = CriticConfig(lr=1e-2, backbone="shared" if name.endswith("shared") else "separate")
    divide = partial(ShardedPolicy, ranks=ranks, offload=case == "offload") if ranks else None
    return Learner(loaded.policy, vision, settings, optim, 1.0, 10, critic, ranks, None, divide)


def step(learner: Learner, case: str, with_images: bool = True) -> dict[str, float]:
    """Of one group without images, and two with some, which another rank has."""
    kind, _, model = CASES[case]
    scored = learner.score(groups(load(kind, **model), with_images))
    metrics = learner.step(assign_advantages(scored, learner.algorithm))
    return {name: value for name, value in metrics.items() if not name.startswith("update/")}


def train(case: str, ranks: Ranks | None, device: torch.device = CPU) -> Result:
    """Metrics of three steps, the second without images, and the whole weights after them."""
    learner = new_learner(case, ranks, device)
    metrics = [step(learner, case, with_images) for with_images in (True, False, True)]
    return metrics, {name: p.detach().cpu().clone() for name, p in learner.whole.trainable().items()}


def keep(folder: Path, case: str, rank: int, result: Result) -> None:
    save_file(result[1], folder / f"{case}{rank}.safetensors")
    (folder / f"{case}{rank}.json").write_text(json.dumps(result[0]))


def kept(folder: Path, case: str, rank: int) -> Result:
    return json.loads((folder / f"{case}{rank}.json").read_text()), load_file(folder / f"{case}{rank}.safetensors")


def differences(
    one: Result, other: Result, relative: float, steps: float, rounding: float = 0.0, outliers: float = 0.0
) -> list[str]:
    """Where metrics are further apart than `relative`, or weights than so many `steps` of 1e-3 and their `rounding`.

    Of a tensor a share of `outliers` may be: Adam moves a weight whose gradient is all rounding as far as any other.
    """
    far = [
        f"step {number}: {name} is {a[name]} and {b[name]}"
        for number, (a, b) in enumerate(zip(one[0], other[0], strict=True))
        for name in a
        if abs(a[name] - b[name]) > max(relative * abs(a[name]), relative / 10)
    ]
    assert one[1].keys() == other[1].keys() and len(one[0]) == 3
    return far + [
        f"{name} is up to {(a.float() - other[1][name].float()).abs().max()} apart"
        for name, a in one[1].items()
        if a.dtype != other[1][name].dtype or _far(a.float(), other[1][name].float(), steps * 1e-3, rounding) > outliers
    ]


def _far(one: Tensor, other: Tensor, room: float, rounding: float) -> float:
    """The share of numbers that are."""
    return float(((one - other).abs() > room + rounding * one.abs()).float().mean())


def main(folder: Path, cases: list[str]) -> None:
    platform, rank = select(), int(os.environ["RANK"])
    platform.set_device(rank)
    kernels.use(platform.kernels)
    torch.set_num_threads(1)
    for case in cases:
        tiny_folder(CASES[case][0])  # before ranks exist: only one of them would write the model
    dist.init_process_group(platform.process_group_backend)
    for case in cases:
        keep(folder, case, rank, train(case, Ranks(dist.group.WORLD), platform.device(rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
