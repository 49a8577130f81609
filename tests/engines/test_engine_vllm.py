"""What the vLLM engine does without vLLM: prompts with one placeholder an image, and refusals."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from npu_vlrl.cli import main
from npu_vlrl.config import LoraConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.engines.base import Request
from npu_vlrl.engines.vllm.adapter import AdapterFolder
from npu_vlrl.engines.vllm.prompt import collapsed, resized_image, size_limits
from npu_vlrl.hardware.cpu import CpuPlatform
from npu_vlrl.types import Image, ImageInput, SamplingParams
from tests.support.episodes import an_image
from tests.support.models import load, tiny_folder

IMAGE = 7
ROOT = Path(__file__).parents[2]


def shown(n_tokens: int) -> ImageInput:
    return ImageInput(an_image(2, 2, n_tokens), (1, 2, 2 * n_tokens), n_tokens)


def request(ids: list[int], sizes: list[int]) -> Request:
    return Request(0, tuple(ids), tuple(map(shown, sizes)), SamplingParams(1))


@given(st.lists(st.integers(0, 6) | st.integers(11, 15), max_size=12))
def test_every_image_keeps_one_placeholder(parts: list[int]) -> None:
    """A part below 7 is an id, one above 10 an image of so many tokens less 10; images may touch."""
    sizes = [part - 10 for part in parts if part > 10]
    whole = [token for part in parts for token in ([IMAGE] * (part - 10) if part > 10 else [part])]
    assert collapsed(request(whole, sizes), IMAGE) == [IMAGE if part > 10 else part for part in parts]


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        ([1, IMAGE, IMAGE, 2], [3], "at token 1 of the context"),
        ([IMAGE, IMAGE, 1, IMAGE], [2], "at token 3 of the context"),
        ([1, IMAGE, 2, IMAGE], [2], "at token 1 of the context"),
        ([IMAGE, 2], [1, 1], "more images than runs of placeholders"),
    ],
)
def test_placeholders_of_other_images_are_refused(ids: list[int], sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collapsed(request(ids, sizes), IMAGE)


def test_ids_that_stand_for_no_image_stay() -> None:
    assert collapsed(request([IMAGE, 1, IMAGE], []), None) == [IMAGE, 1, IMAGE]


SMALL = ImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 12)
MODELS = [SMALL, ImageProcessor(), ImageProcessor(patch_size=16, min_pixels=32 * 32 * 2, max_pixels=32 * 32 * 16)]


@pytest.mark.parametrize("processor", MODELS)
@given(width=st.integers(1, 300), height=st.integers(1, 300), times=st.sampled_from([1, 20]))
@settings(max_examples=40)
@example(width=1, height=201, times=1)  # padded, and longer than max_pixels of the first model allows
@example(width=1, height=300, times=20)
@example(width=281, height=1, times=20)  # padded to 200 to 1, and then rounded to 201 blocks
def test_images_are_sent_at_a_size_that_stays(processor: ImageProcessor, width: int, height: int, times: int) -> None:
    """By transformers' own rule, which vLLM follows; and with the pixels that the learner cuts into patches."""
    described = processor.describe(an_image(width * times, height, 0))
    if max(described.grid[1:]) > 200 * min(described.grid[1:]):
        with pytest.raises(ValueError, match="crop it"):
            resized_image(processor, described.image)
        return
    sent = resized_image(processor, described.image)
    limits = size_limits(processor)
    block = processor.patch_size * processor.merge_size
    stays = smart_resize(sent.height, sent.width, block, limits["shortest_edge"], limits["longest_edge"])
    grid = (1, sent.height // processor.patch_size, sent.width // processor.patch_size)
    assert (stays, grid) == ((sent.height, sent.width), described.grid)
    same = dataclasses.replace(processor, max_pixels=limits["longest_edge"])
    again = same.describe(Image(np.asarray(sent)))
    assert torch.equal(same.patches(again), processor.patches(described))


def test_a_image_that_is_too_narrow_is_refused() -> None:
    """41 pixels are rounded down to one block, and the other side is not."""
    with pytest.raises(ValueError, match="whose sides are as 292 to 1; crop it"):
        resized_image(ImageProcessor(), an_image(41, 8190, 0))


def refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    config = str(ROOT / "configs" / "photo_tiny.yaml")
    assert main(["train", "--config", config, "--run-dir", str(tmp_path / "run"), "rollout.engine=vllm", *words]) == 2
    return capsys.readouterr().err


def test_an_environment_without_vllm_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    said = refused([], tmp_path, capsys)
    assert said.startswith("npu-vlrl: rollout.engine=vllm needs vLLM (")
    assert said.endswith("or set rollout.engine=inprocess\n")


def test_a_rank_that_vllm_has_no_room_for() -> None:
    policy = load(tiny_folder("qwen3"), lora=LoraConfig(rank=513)).policy
    with pytest.raises(ValueError, match="lower model.lora.rank=513"):
        AdapterFolder(policy)


def test_what_several_processes_have_no_device_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_vlrl.training.processes.started_processes", lambda: 2)
    said = refused(["train.learners=all", "rollout.tensor_parallel=2"], tmp_path, capsys)
    assert said.startswith("npu-vlrl: rollout.tensor_parallel=2 takes devices that only sample, and with train.")
    assert "set train.learners=all, or leave it out" in refused(["rollout.sleep=true"], tmp_path, capsys)


def test_what_a_cpu_cannot_do_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["rollout.sleep=true"], tmp_path, capsys)
    assert said == "npu-vlrl: rollout.sleep: vLLM cannot give memory back on the platform cpu; leave it out\n"


def test_adapters_in_32_bits_are_for_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Accelerator(CpuPlatform):
        def device(self, index: int = 0) -> torch.device:
            return torch.device("meta", index)

    monkeypatch.setitem(sys.modules, "vllm", None)  # what is not refused goes on to it
    monkeypatch.setattr(os, "environ", os.environ.copy())
    words = ["model.lora={}", "warm_start.steps=0", "model.dtype=float32"]
    assert "needs vLLM" in refused(words, tmp_path, capsys)
    monkeypatch.setattr("npu_vlrl.training.processes.select", Accelerator)
    assert refused(words, tmp_path, capsys) == (
        "npu-vlrl: model.lora with rollout.engine=vllm: on the platform cpu vLLM computes adapters in 16 bits only; "
        "set model.dtype=bfloat16, or rollout.engine=inprocess\n"
    )
    assert "needs vLLM" in refused([*words[:2], "model.dtype=bfloat16"], tmp_path, capsys)


@pytest.mark.parametrize("word", ["rollout.sleep=true", "rollout.tensor_parallel=2"])
def test_keys_of_vllm_are_refused_without_it(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "set rollout.engine=vllm or leave them out" in refused(["rollout.engine=inprocess", word], tmp_path, capsys)
