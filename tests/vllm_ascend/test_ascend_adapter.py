"""Adapters and sleep, on one engine. An adapter lies beside the weights of the model, and vllm-ascend computes it by
operators of its own; while vLLM sleeps, its weights are on the host and its cache is nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from npu_vlrl.config import LoraConfig
from tests import host_cann
from tests.support.vllm_stage import CACHE_BYTES, VllmStage, change, episodes, gap, tell
from tests.vllm_ascend.stages import FITS, VISIBLE, made_stage


@pytest.fixture(scope="module")
def stage() -> Iterator[VllmStage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NPU_ALLOC_CONF", "")  # vllm-ascend lets segments grow where nothing sleeps, and tells all
        made = made_stage("qwen2_5_vl", sleeps=True, lora=LoraConfig(rank=9, alpha=27.0))
        yield made
        made.vllm.close()


def test_each_new_adapter_is_sampled_with(stage: VllmStage) -> None:
    """From none to two of them; the second update changes one layer's alone."""
    trained = stage.policy.trainable()
    assert gap(stage, episodes(stage, members=1)) < FITS
    last = [name for name in trained if ".layers.1." in name]
    for version, names in enumerate((trained, last), 1):
        change((trained[name] for name in names), seed=version)
        assert gap(stage, episodes(stage, seed=version, members=1)) > VISIBLE
        tell(stage, version)
        with host_cann.counted() as ran:
            samples = episodes(stage, seed=version, members=1)
        assert gap(stage, samples) < FITS
        assert {number for sample in samples for number in sample.weight_versions} == {version}
        assert ran["AdapterShrink"] > 0 and ran["AdapterExpand"] > 0


def test_what_sleeps_gives_its_memory_back(stage: VllmStage) -> None:
    """And samples afterwards as before, though others wrote where its memory was."""
    before = episodes(stage, seed=7, members=1)
    awake = torch.npu.mem_get_info()[0]  # type: ignore[attr-defined]
    stage.vllm.sleep()
    asleep = torch.npu.mem_get_info()[0]  # type: ignore[attr-defined]
    assert asleep - awake > CACHE_BYTES
    tell(stage, 3)
    assert asleep - torch.npu.mem_get_info()[0] >= CACHE_BYTES  # type: ignore[attr-defined]
    after = episodes(stage, seed=7, members=1)
    assert [s.token_ids for s in before] == [s.token_ids for s in after]
    assert gap(stage, after) < FITS
