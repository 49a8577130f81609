"""Adapters on the real vLLM: beside the weights of the model, not merged into them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npu_vlrl.config import LoraConfig
from npu_vlrl.engines.vllm.adapter import AdapterFolder
from tests.support.learning import SMALL_LORA
from tests.support.models import KINDS, load, tiny_folder
from tests.support.scoring import TOLERANCE
from tests.support.vllm_stage import HIDDEN, VllmStage, change, episodes, gap, tell
from tests.vllm.test_vllm_engine import VISIBLE
from tests.vllm.test_vllm_training import train, versions


@pytest.fixture(params=KINDS)
def stage(request: pytest.FixtureRequest) -> Iterator[VllmStage]:
    made = VllmStage(request.param, load(tiny_folder(request.param, HIDDEN), lora=LoraConfig(rank=9, alpha=27.0)))
    yield made
    made.vllm.close()


def test_each_new_adapter_is_sampled_with(stage: VllmStage) -> None:
    """From none to three of them; the third update changes one layer's alone."""
    trained = stage.policy.trainable()
    assert gap(stage, episodes(stage)) < TOLERANCE
    folder = Path(stage.vllm._adapter._folder.name)  # type: ignore[union-attr]
    last = [name for name in trained if ".layers.1." in name]
    for version, names in enumerate((trained, trained, last), 1):
        change((trained[name] for name in names), seed=version)
        assert gap(stage, episodes(stage, seed=version)) > VISIBLE
        tell(stage, version)
        samples = episodes(stage, seed=version)
        assert gap(stage, samples) < TOLERANCE
        assert {number for sample in samples for number in sample.weight_versions} == {version}
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    stage.vllm.close()
    assert not folder.exists()


def test_an_adapter_that_comes_in_parts() -> None:
    """An update brings what changed; the rest is as it was before."""
    policy = load(tiny_folder("qwen3"), lora=SMALL_LORA).policy
    adapter = AdapterFolder(policy)
    trained = policy.trainable()
    first = adapter.renewed(trained.items())
    before = {name: tensor.clone() for name, tensor in adapter._held.items()}
    name, changed = next((name, tensor) for name, tensor in trained.items() if ".lora_B." in name)
    with torch.no_grad():
        changed += 1
    second = adapter.renewed([(name, changed)])
    assert (first.lora_int_id, second.lora_int_id) == (1, 2) and first != second
    for key, tensor in adapter._held.items():
        assert torch.equal(tensor, before[key] + (key == name.replace(".default.", ".")))
    adapter.close()


RUNS = {
    "an engine process over two workers": ("rollout.tensor_parallel=2",),
    "beside two learners": ("train.learners=all", "train.shard=true"),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_training_of_an_adapter(tmp_path: Path, case: str) -> None:
    adapter = ("model.lora.rank=4", "warm_start.steps=0", "optim.lr=0.02", "algorithm.entropy_coef=0.01")
    lines = train(tmp_path / "run", "vllm", *adapter, *RUNS[case], processes=2)
    steps = [line for line in lines if "gap_max" in line]
    assert len(steps) == 3
    assert all(0 < line["gap_max"] < 1e-4 and line["grad_norm"] > 0 for line in steps)
    assert versions(tmp_path / "run") == {0: {0}, 1: {1}, 2: {2}}
