"""Recorded decoding is for devices that replay its attention rightly, with lengths that have changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from npu_vlrl.config import load_config
from npu_vlrl.engines.inprocess.kind import InProcess
from npu_vlrl.engines.kind import EngineProcess, Placement
from npu_vlrl.hardware.base import GraphCapture
from npu_vlrl.hardware.cpu import CpuPlatform
from npu_vlrl.kernels.graph_capture import can_capture
from npu_vlrl.model.vision import VisionFeatures
from tests.support.captures import failing, frozen, right
from tests.support.models import load, tiny_folder

CPU = torch.device("cpu")


class Machine(CpuPlatform):
    def __init__(self, capture: GraphCapture | None) -> None:
        self.made = capture

    def graph_capture(self) -> GraphCapture | None:
        return self.made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_record_is_used(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    assert can_capture(Machine(right), CPU, dtype)
    assert not can_capture(Machine(None), CPU, dtype)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("capture", "reason"), [(frozen, "a replay of it is "), (failing, "this operator is not for graphs);")]
)
def test_a_wrong_record_is_told_once(capture: GraphCapture, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(capture)
    assert not can_capture(machine, CPU, torch.float32) and not can_capture(machine, CPU, torch.float32)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("npu-vlrl: cpu does not capture the attention of decoding (") and reason in line


class WithoutExperts:
    """Captures attention, and no product over groups of rows: the first capture is right, later ones fail."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        return (right if self.captured == 1 else failing)(work)


@pytest.mark.parametrize(
    ("kind", "capture", "used"),
    [
        ("qwen3", right, True),
        ("qwen3", frozen, False),
        ("qwen3", WithoutExperts(), True),
        ("qwen3_vl_moe", right, True),
        ("qwen3_vl_moe", WithoutExperts(), False),
    ],
)
def test_the_engine_asks(kind: str, capture: GraphCapture, used: bool) -> None:
    loaded, machine = load(tiny_folder(kind)), Machine(capture)
    vision = VisionFeatures(loaded.policy, loaded.processor, 2**20)
    config = load_config("configs/photo_tiny.yaml", [])
    process = EngineProcess(config, machine, 0, loaded, vision, Placement.ONLY, ExitStack())
    engine: Any = InProcess().new(process)
    made: Callable[[], GraphCapture | None] = engine.new_capture
    assert (made() is capture) is used and (made() is None) is not used
