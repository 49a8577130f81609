"""Checks graph capture of the attention of decoding, and times a decode step."""

from __future__ import annotations

from typing import Any

import torch

from npu_vlrl import kernels
from npu_vlrl.acceptance.models import LAYERS, shallow, token_ids
from npu_vlrl.acceptance.ops import FULL, REDUCED, shapes_of
from npu_vlrl.acceptance.plan import MODELS
from npu_vlrl.acceptance.timing import milliseconds
from npu_vlrl.acceptance.worker import Failed, Machine, NotTried
from npu_vlrl.engines.base import Request
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.kernels.graph_capture import TOLERANCE, can_capture
from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Generation, SamplingParams

FEW, MANY, MANY_REDUCED = 4, 36, 8
"""Tokens of the two rounds whose difference is timed: prefill and the first token are in both."""


@torch.no_grad()
def graph_capture(machine: Machine) -> dict[str, Any]:
    """Captures the attention of decoding at the shapes of each model, and replays it with other lengths."""
    capture = machine.platform.graph_capture()
    if capture is None:
        raise NotTried("none on this platform, or its software: every step of decoding is launched anew")
    amounts, found = REDUCED if machine.reduced else FULL, {}
    attention = kernels.op("decode_attention")
    for model in MODELS:
        shapes, room, rows = shapes_of(model), amounts.room, amounts.rows
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(shapes.heads, rows, shapes.width, generator=generator).to(machine.device, torch.bfloat16)
        keys, values = (
            torch.randn(rows, room, shapes.key_heads, shapes.width, generator=generator).to(q) for _ in range(2)
        )
        lengths = torch.full((rows,), 2, dtype=torch.int32, device=machine.device)
        cache_rows = CacheRows.of(lengths, [1] * rows, room, room)
        out = torch.zeros(rows, shapes.heads, shapes.width, device=machine.device, dtype=torch.bfloat16)

        def step(q=q, keys=keys, values=values, rows=cache_rows, out=out) -> None:  # type: ignore[no-untyped-def]
            out.copy_(attention(q, keys, values, rows, q.shape[2] ** -0.5))

        replay = capture(step)
        lengths.copy_(torch.linspace(3, room, rows).int())
        replay()
        replayed = out.clone()
        step()
        gap = float((replayed - out).abs().max())
        if not gap <= TOLERANCE:
            raise Failed(f"{model}: a replay with other lengths is {gap:.1e} off")
        found[model] = {
            "gap": gap,
            "replay_ms": milliseconds(machine, replay),
            "launch_ms": milliseconds(machine, step),
        }
    return {"detail": "captured, and replayed with other lengths", "models": found}


def decode_step(machine: Machine, model: str) -> dict[str, Any]:
    """Milliseconds of a step of the engine with `LAYERS` layers, launched anew and, where it can be, replayed; both
    must sample tokens of the same log-probabilities.
    """
    policy = shallow(machine, model, torch.bfloat16)
    rows, context = (4, 64) if machine.reduced else (32, 1024)
    captures = can_capture(machine.platform, machine.device, torch.bfloat16)
    found: dict[str, Any] = {"rows": rows, "context": context, "layers": LAYERS}
    launched, found["launched_ms"] = _decode(machine, policy, rows, context, capture=False)
    detail = f"{found['launched_ms']:.2f} ms for {rows} rows and {LAYERS} layers"
    if captures:
        replayed, found["replayed_ms"] = _decode(machine, policy, rows, context, capture=True)
        detail += f", {found['replayed_ms']:.2f} ms by graph replay"
        found["gap"] = max(
            abs(a - b) for x, y in zip(launched, replayed, strict=True) for a, b in _first_logprobs(x, y)
        )
        if not found["gap"] <= 0.1:
            raise Failed(f"replayed steps differ by {found['gap']:.2g} nats", **found)
    return {"detail": detail, **found}


def _first_logprobs(x: Generation, y: Generation) -> list[tuple[float, float]]:
    """Pairs of log-probabilities, up to the first token that differs: after it the contexts differ."""
    same = next((i for i, (a, b) in enumerate(zip(x.token_ids, y.token_ids, strict=True)) if a != b), len(x.token_ids))
    return list(zip(x.logprobs[:same], y.logprobs[:same], strict=True))


def _decode(machine: Machine, policy: Policy, rows: int, context: int, capture: bool) -> tuple[list[Generation], float]:
    """Samples tokens; returns them, and the milliseconds of a step."""
    new_capture = machine.platform.graph_capture if capture else lambda: None
    engine = InProcessEngine(policy, VisionFeatures(policy, None, 0), 2**32, new_capture)

    def play(tokens: int) -> list[Generation]:
        requests = [
            Request(
                -1 - row,
                token_ids(policy, row, context),
                (),
                SamplingParams(tokens, 1.0, seed=row),
            )
            for row in range(rows)
        ]
        outcomes = engine.sample_probe(requests)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, Generation)]

    most = MANY_REDUCED if machine.reduced else MANY
    drawn = play(most)  # the longest first: the batch that it makes serves both
    many, few = (milliseconds(machine, lambda n=tokens: play(n)) for tokens in (most, FEW))  # type: ignore[misc]
    return drawn, round((many - few) / (most - FEW), 4)
