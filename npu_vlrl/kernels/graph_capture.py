"""Check of graph capture for decode steps: a device may capture graphs, but not the attention of decoding.

Some operators take lengths on the host, and some are not captured at all; a replay then computes with the lengths of
the capture, or computes nothing. So the attention over the KV cache is tried, with other lengths at the replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from npu_vlrl.hardware import Platform
from npu_vlrl.hardware.base import GraphCapture
from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.kernels.table import op

ROWS, ROOM, HEADS, KEPT_HEADS, WIDTH = 2, 128, 4, 2, 64

TOLERANCE = 0.02
"""Largest difference between a replay and a direct call, in half precision; a wrong length is off by some tenths."""


@lru_cache
def can_capture(platform: Platform, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the platform captures graphs, and replays the selected attention correctly. Prints the reason, once, for
    which it does not.
    """
    return _captures(platform, "the attention of decoding", partial(_gap, device=device, dtype=dtype))


def can_capture_experts(platform: Platform, experts: nn.Module, x_BTH: Tensor) -> bool:
    """Whether the platform captures a layer's mixture of experts, and replays it correctly for other tokens [B, T,
    hidden] than those of the capture. Prints the reason for which it does not: grouped products may wait for the
    device.
    """
    return _captures(platform, "a mixture of experts", partial(_gap_of_experts, experts=experts, x_BTH=x_BTH))


def _captures(platform: Platform, what: str, gap_of: Callable[[GraphCapture], float]) -> bool:
    capture = platform.graph_capture()
    if capture is None:
        return False
    try:
        gap = gap_of(capture)
        problem = None if gap <= TOLERANCE else f"a replay of it is {gap:.1e} off"
    except RuntimeError as error:
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    if problem:
        print(
            f"npu-vlrl: {platform.name} does not capture {what} ({problem}); every decode step is launched without a "
            "graph, which is slower but correct. rollout.graphs=false skips this check",
            file=sys.stderr,
        )
    return problem is None


@torch.no_grad()
def _gap(capture: GraphCapture, device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference between a replay and a direct call; NaN where a value is NaN."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, keys, values = (
        random(HEADS, ROWS, WIDTH),
        random(ROWS, ROOM, KEPT_HEADS, WIDTH),
        random(ROWS, ROOM, KEPT_HEADS, WIDTH),
    )
    lengths = torch.tensor([2, 3], dtype=torch.int32, device=device)
    rows = CacheRows.of(lengths, [1] * ROWS, ROOM, ROOM)
    attention: Callable[..., torch.Tensor] = op("decode_attention")
    found = torch.zeros(ROWS, HEADS, WIDTH, device=device, dtype=dtype)

    def step() -> None:
        found.copy_(attention(q, keys, values, rows, WIDTH**-0.5))

    replay = capture(step)
    lengths.copy_(torch.tensor([3, 100], dtype=torch.int32))
    replay()
    return (found - attention(q, keys, values, rows, WIDTH**-0.5)).abs().max().item()


@torch.no_grad()
def _gap_of_experts(capture: GraphCapture, experts: nn.Module, x_BTH: Tensor) -> float:
    """The largest difference, relative to the largest entry; not a number where there is one."""
    now = torch.zeros_like(x_BTH)
    found = torch.zeros_like(x_BTH)

    def step() -> None:
        found.copy_(experts(now))

    replay = capture(step)
    now.copy_(x_BTH)
    replay()
    expected = experts(x_BTH)
    return float((found - expected).abs().max() / expected.abs().max())
