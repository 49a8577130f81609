"""Recorded decoding is for devices that replay its attention rightly, with lengths that have changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from npu_vlrl.config import load_config
from npu_vlrl.engines.inprocess.kind import InProcess
from npu_vlrl.engines.kind import Placement
from npu_vlrl.hardware.base import Recorder
from npu_vlrl.hardware.cpu import CpuPlatform
from npu_vlrl.kernels.graph_capture import records
from npu_vlrl.model.vision import VisionFeatures
from tests.support.models import load, tiny_folder
from tests.support.records import failing, frozen, right

CPU = torch.device("cpu")


class Machine(CpuPlatform):
    def __init__(self, recorder: Recorder | None) -> None:
        self.made = recorder

    def recorder(self) -> Recorder | None:
        return self.made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_record_is_used(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    assert records(Machine(right), CPU, dtype)
    assert not records(Machine(None), CPU, dtype)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("recorder", "reason"), [(frozen, "a replay of it is "), (failing, "this operator is not for graphs);")]
)
def test_a_wrong_record_is_told_once(recorder: Recorder, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(recorder)
    assert not records(machine, CPU, torch.float32) and not records(machine, CPU, torch.float32)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("npu-vlrl: cpu does not record the attention of decoding (") and reason in line


@pytest.mark.parametrize(("recorder", "used"), [(right, True), (frozen, False)])
def test_the_engine_asks(recorder: Recorder, used: bool) -> None:
    loaded, machine = load(tiny_folder("qwen3")), Machine(recorder)
    vision = VisionFeatures(loaded.policy, loaded.processor, 2**20)
    config = load_config("configs/photo_tiny.yaml", [])
    engine: Any = InProcess().new(config, machine, 0, loaded, vision, Placement.ONLY, ExitStack())
    made: Callable[[], Recorder | None] = engine.new_recorder
    assert (made() is recorder) is used and (made() is None) is not used
