"""What vllm-ascend takes from Triton on every machine, for one without triton-ascend.

These two have no function in CANN that could be stood in for. vllm-ascend replaces the first one's callers without
asking whether Triton is there, and calls the second one by vLLM's name.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.host_cann.attention import require
from tests.host_cann.counting import count
from tests.host_cann.inference_ops import axis_of_element, turned
from tests.host_cann.memory import copy_to, view

NAME = "triton_split_qkv_rmsnorm_mrope"
SCHEMA = (
    "(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos_sin, int num_q_heads, int num_kv_heads, int head_size, "
    "float eps, int[] mrope_section, bool is_interleaved, int? rope_dim=None, Tensor? q_bias=None, "
    "Tensor? k_bias=None, bool has_gate=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
_libraries: list[torch.library.Library] = []


def install(block_table: ModuleType) -> None:
    """Puts both in place; `block_table` is vllm-ascend's module, which imports the kernel of slots."""
    block_table._compute_slot_mapping_kernel = SlotMapping()  # type: ignore[attr-defined]
    if not _libraries and not hasattr(torch.ops.vllm, NAME):
        library = torch.library.Library("vllm", "FRAGMENT")
        library.define(NAME + SCHEMA)
        library.impl(NAME, split_qkv_rmsnorm_mrope, "PrivateUse1")
        _libraries.append(library)


def split_qkv_rmsnorm_mrope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    eps: float,
    mrope_section: list[int],
    is_interleaved: bool,
    rope_dim: int | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    has_gate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys of Qwen3-VL: each head normed, and turned by its place in time, height and width.

    qkv [T, (N + 2K) D]; weights [D]; cos_sin [3, T, D], the cosines and then the sines of a token's three places.
    Returns q [T, N D], k [T, K D], v [T, K D] and an empty gate.
    """
    count(NAME)
    require(q_bias is None and k_bias is None and not has_gate, f"{NAME}: biases and gates have no reference")
    require(rope_dim in (None, head_size), f"{NAME}: rope_dim {rope_dim} of {head_size} has no reference")
    require(
        tuple(cos_sin.shape) == (3, len(qkv), head_size),
        f"{NAME}: cos_sin {list(cos_sin.shape)} is not [3, {len(qkv)}, {head_size}]",
    )
    require(qkv.shape[-1] == (num_q_heads + 2 * num_kv_heads) * head_size, f"{NAME}: qkv {list(qkv.shape)}")
    require(2 * sum(mrope_section) == head_size, f"{NAME}: mrope_section {mrope_section} of heads of {head_size}")
    sizes = [num_q_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
    q, k, v = view(qkv).split(sizes, -1)
    axis, element = axis_of_element(mrope_section, is_interleaved), torch.arange(head_size // 2)
    cos, sin = (part[axis, :, element].T[:, None] for part in view(cos_sin).float().chunk(2, -1))

    def normed_and_turned(x: Tensor, weight: Tensor) -> Tensor:
        heads = x.float().unflatten(-1, (-1, head_size))
        heads = heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * view(weight).float()
        return copy_to(turned(heads, cos, sin, halves=True).flatten(1).to(x.dtype), qkv.device)

    gate = torch.empty(len(qkv), 0, dtype=qkv.dtype, device=qkv.device)
    return normed_and_turned(q, q_weight), normed_and_turned(k, k_weight), copy_to(v.contiguous(), qkv.device), gate


class SlotMapping:
    """`_compute_slot_mapping_kernel`: the row of the cache that each token of a batch is written to.

    A program for each request, and one more that fills the rest of `slot_mapping` with PAD_ID.
    """

    def __init__(self, requests: int = 0) -> None:
        self.requests = requests

    def __getitem__(self, grid: tuple[int]) -> SlotMapping:
        return SlotMapping(grid[0] - 1)

    def __call__(
        self,
        num_tokens: int,
        max_num_tokens: int,
        query_start_loc: Tensor,
        positions: Tensor,
        block_table: Tensor,
        stride: int,
        block_size: int,
        slot_mapping: Tensor,
        *,
        TOTAL_CP_WORLD_SIZE: int,
        PAD_ID: int,
        **others: Any,
    ) -> None:
        """positions [T] int64; block_table [requests, blocks] int32; slot_mapping [max_num_tokens], written."""
        count("_compute_slot_mapping_kernel")
        require(TOTAL_CP_WORLD_SIZE == 1, "slots of a context that is split over devices have no reference")
        starts, slots = view(query_start_loc).tolist(), view(slot_mapping)
        places, table = view(positions), view(block_table)
        require(stride == table.stride(0), f"block_table has the stride {table.stride(0)}, not {stride}")
        slots[num_tokens:max_num_tokens] = PAD_ID
        for request in range(self.requests):
            at = places[starts[request] : starts[request + 1]].long()
            slots[starts[request] : starts[request + 1]] = (
                table[request, at // block_size] * block_size + at % block_size
            )
