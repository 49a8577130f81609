"""Tests every op of the table at the shapes of published models, against its reference on the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from npu_vlrl import kernels
from npu_vlrl.acceptance.plan import MODELS, TRAINED, UNUSED
from npu_vlrl.acceptance.timing import milliseconds
from npu_vlrl.acceptance.worker import Failed, Machine, NotTried
from npu_vlrl.estimate import PUBLISHED
from npu_vlrl.kernels import parity
from npu_vlrl.kernels.model_cases import Amounts, Shapes, Tower, cases

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 2e-3}
"""Largest errors by dtype, as fractions of the largest value (see `parity.TOLERANCES`). The reference computes in
float32 from the same rounded inputs."""

FULL = Amounts(tokens=2048, patches=1024, rows=32, room=2048, scored=256)
REDUCED = Amounts(tokens=96, patches=64, rows=3, room=128, scored=16)
REDUCED_TOWER = Tower(hidden=160, heads=2, inner=427, patch=(3, 2, 14, 14))
"""Reduced tower with heads of 80 and an odd inner width, as in the published models."""
NARROW_VOCABULARY = {True: 2**9, False: 2**14}
"""Vocabulary of the head where it is not tested whole, by whether sizes are reduced."""


def shapes_of(model: str) -> Shapes:
    """Shapes of a model whose config.json is in `estimate/published`."""
    settings = json.loads((PUBLISHED / model / "config.json").read_text())
    text, vision = settings.get("text_config", settings), settings["vision_config"]
    side, frames = vision.get("patch_size", 14), vision.get("temporal_patch_size", 2)
    return Shapes(
        text["hidden_size"],
        text["num_attention_heads"],
        text["num_key_value_heads"],
        text["hidden_size"] // text["num_attention_heads"],
        text["intermediate_size"],
        text["vocab_size"],
        Tower(vision["hidden_size"], vision["num_heads"], vision["intermediate_size"], (3, frames, side, side)),
    )


def compare(machine: Machine, op: str, dtype: str) -> dict[str, Any]:
    """Compares all cases of an op. Raises Failed when one is beyond the tolerance or raises."""
    precision = getattr(torch, dtype)
    tolerance = TOLERANCES[precision]
    device = machine.device
    found = [_tried(machine, name, case, device, precision) for name, case in _cases(machine, op, dtype)]
    if not found:
        raise NotTried(f"there is no case for the op {op}; add one to npu_vlrl/kernels/parity.py")
    refused = [line for line in found if "error" in line]
    if refused and dtype == UNUSED:
        raise NotTried(f"refused: {refused[0]['error']}; no training uses {UNUSED}")
    worst = max((max(line["forward"], line["backward"]) for line in found if "forward" in line), default=0.0)
    report = {"implementation": kernels.active()[op], "tolerance": tolerance, "cases": found}
    if refused:
        raise Failed(f"{refused[0]['case']}: {refused[0]['error']}", **report)
    detail = f"{worst:.1e} off the reference at most, and {tolerance:.0e} is allowed"
    if not worst <= tolerance:
        raise Failed(detail, **report)
    return {"detail": detail, **report}


def _cases(machine: Machine, op: str, dtype: str) -> list[tuple[str, parity.Case]]:
    """Cases by model. An op without a case at these shapes has those of `parity`."""
    amounts, found = REDUCED if machine.reduced else FULL, []
    for model in MODELS if dtype == TRAINED or not machine.reduced else MODELS[:1]:
        shapes = shapes_of(model)
        if machine.reduced or dtype != TRAINED:
            shapes = replace(shapes, vocabulary=NARROW_VOCABULARY[machine.reduced])
        if machine.reduced:
            shapes = replace(shapes, inner=shapes.inner // 8, tower=REDUCED_TOWER)
        found += [(model, case) for case in cases(shapes, amounts) if case.op == op]
    return found or [("small", case) for case in parity.CASES if case.op == op]


def _tried(machine: Machine, name: str, case: parity.Case, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    line: dict[str, Any] = {"case": name, "shapes": [list(shape) for shape in case.shapes]}
    try:
        drawn = parity.draw_inputs(case, dtype)
        forward, backward = parity.differences(case, drawn, device, torch.float32)
        line |= {"forward": forward, "backward": backward}
        inputs = [x.to(device) for x in drawn]
        run = kernels.op(case.op)
        with torch.no_grad():
            line["forward_ms"] = milliseconds(machine, lambda: case.call(run, *inputs))
        line["with_backward_ms"] = milliseconds(machine, _with_backward(case, inputs))
    except Exception as error:  # of one case; the others are still worth a line
        line["error"] = f"{type(error).__name__}: {str(error).strip()}"[:400]
    return line


def _with_backward(case: parity.Case, inputs: list[torch.Tensor]) -> Callable[[], None]:
    run = kernels.op(case.op)

    def work() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        found = case.call(run, *leaves)
        outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    return work
