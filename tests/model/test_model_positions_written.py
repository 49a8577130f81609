"""In which numbers a model writes positions follows from its kind, up to what it is told and what a tool cuts out."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from npu_vlrl.config import load_config
from npu_vlrl.training.build import build
from npu_vlrl.types import Image, Message, Task
from npu_vlrl.workflow.environments.visual_qa import VisualQA
from tests.support.learning import tiny_folder
from tests.support.program import config_file


@pytest.mark.parametrize(("kind", "scale"), [("qwen2_5_vl", None), ("qwen3_vl", 1000)])
def test_from_the_kind_of_model_to_the_stored_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, scale: int | None
) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    sections = {"model": {"path": str(tiny_folder(kind))}, "data": {"train": {"generator": "arrow"}}}
    tools = ["workflow.tools=[crop,rotate]", "reward.rule=tagged", "evaluation.tasks=1"]
    config = load_config(config_file(tmp_path, **sections), tools)
    pixels = np.random.default_rng(0).integers(0, 256, (100, 200, 3), dtype=np.uint8)
    task = Task("t", (Message("user", (Image(pixels), "?")),), "up", "x")

    async def crop(environment: VisualQA, box: list[int]) -> Image:
        await environment.reset(task)
        call = f'<tool_call>{{"name": "crop", "arguments": {{"bbox": {box}}}}}</tool_call>'
        return (await environment.step(call, ())).tool_results[0].images[0]

    with ExitStack() as cleanup:
        parts = build(config, tmp_path / "run", cleanup)
        processor = parts.loaded.processor
        assert processor is not None and processor.position_scale == scale
        told = json.dumps(parts.episodes.schemas)
        assert ("from 0 to 1000 over" in told) == (scale is not None)
        assert ("in pixels of the image as you see it" in told) == (scale is None)
        _, rows, columns = processor.describe(task.images[0]).grid
        right, bottom = (1000, 1000) if scale else (columns * processor.patch_size, rows * processor.patch_size)
        environment = parts.episodes.new_environment()
        assert isinstance(environment, VisualQA)
        cut = asyncio.run(crop(environment, [right // 2, 0, right, bottom // 2]))
    assert cut == Image(pixels[:50, 100:].copy())
