"""Whether a step of decoding can be recorded: not every device that records something records its attention.

Operators exist that take lengths on the host, or that a record does not hold; a replay then says what was true when it
was made, or nothing at all. So the attention over kept tokens is tried, with other lengths at the replay.
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
"""Between a replay and the same call at once, in half precision; a wrong length is some tenths off."""


@lru_cache
def can_capture(platform: Platform, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the platform records, and the selected attention is replayed rightly. Says so once where it is not."""
    return _captures(platform, "the attention of decoding", partial(_gap, device=device, dtype=dtype))


def can_capture_experts(platform: Platform, experts: nn.Module, x_BTH: Tensor) -> bool:
    """Whether the platform captures a layer's mixture of experts, and replays it rightly for other tokens [B, T,
    hidden] than those of the capture. Says so where it is not: products over groups of rows may wait for the device.
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
            f"npu-vlrl: {platform.name} does not record {what} ({problem}); every step is launched anew, which is "
            "slower and as right. rollout.graphs=false does not try",
            file=sys.stderr,
        )
    return problem is None


@torch.no_grad()
def _gap(capture: GraphCapture, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference; not a number where there is one."""
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
