"""Log-probability and entropy by Triton kernels; `reference.logprob_entropy` defines them.

The forward pass never has logits in memory. The backward pass writes the gradient of the logits, a part of the
vocabulary at a time and in the dtype of the inputs, and leaves the two products with it to the matrix library. It is
split by vocabulary and not by rows: a part of the weight's gradient is then complete at once, and needs no wide copy of
[V, H].

The letters are those of `triton_kernels`. Importing this module does not import Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PROGRAMS = 256  # the forward pass splits the vocabulary until there are about as many: two for each core of an H100
GRADIENT_ELEMENTS = 2**26  # of the logits' gradient that exist at a time: 128 MiB in bfloat16


@dataclass(frozen=True)
class Tiles:
    """Numbers of rows, ids and hidden columns that a program takes at a time, and further options of the launch.

    Example: Tiles(64, 128, 64, {"num_warps": 4})
    """

    rows: int
    ids: int
    width: int
    launch: dict[str, int] = field(default_factory=dict)


def available(backend: str) -> bool:
    """Whether Triton is installed with this backend ("nvidia", or "ascend" of triton-ascend). Does not import it."""
    found = find_spec("triton")
    folders = [] if found is None else found.submodule_search_locations or []
    return any((Path(folder) / "backends" / backend).is_dir() for folder in folders)


def suitable(hidden_TH: Tensor) -> bool:
    """Whether the kernels take `hidden_TH`. The reference computes float64, and inputs without rows."""
    return len(hidden_TH) > 0 and hidden_TH.dtype in DTYPES


def tiles_for(device: str, dtype: torch.dtype) -> Tiles:
    """The sizes in use on a device type. On a CPU the kernels run in Triton's interpreter, for tests."""
    if device == "npu":  # the largest whose tile of float32 logits, and what is made of it, fits the unified buffer
        return Tiles(128, 128, 128)
    if device == "cuda" and dtype == torch.float32:
        return Tiles(64, 128, 32, {"num_warps": 8, "num_stages": 2})
    if device == "cuda":
        return Tiles(128, 256, 64, {"num_warps": 8, "num_stages": 3})
    return Tiles(16, 16, 16)


def logprob_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    forbidden_V: Tensor | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Implementation of `reference.logprob_entropy`, with its errors, for `suitable` inputs; `chunk` is ignored.

    Products are summed and stay in float32, where the reference rounds each logit to the dtype of the inputs. A
    target outside the vocabulary has log-probability NaN; with `forbidden_V` the look-up there fails first.
    """
    if temperature <= 0:
        raise ValueError(f"logprob_entropy: temperature is {temperature}, it must be positive")
    assert targets_T.shape == hidden_TH.shape[:1] and hidden_TH.shape[1] == weight_VH.shape[1]
    assert suitable(hidden_TH) and hidden_TH.dtype == weight_VH.dtype
    logprobs_T, entropy_T = _LogprobEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_TH.contiguous(), weight_VH.contiguous(), targets_T, temperature, forbidden_V
    )
    return logprobs_T, entropy_T


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        temperature: float,
        forbidden_V: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        maximum_ST, total_ST, moment_ST, chosen_ST = _row_statistics(
            hidden_TH, weight_VH, targets_T, temperature, forbidden_V
        )
        maximum_T = maximum_ST.amax(0)
        shift_ST = maximum_ST - maximum_T
        moment_T = (shift_ST.exp() * (moment_ST + total_ST * shift_ST)).sum(0)
        total_T = (shift_ST.exp() * total_ST).sum(0)
        logprobs_T = chosen_ST.sum(0) - maximum_T - total_T.log()
        entropy_T = total_T.log() - moment_T / total_T
        logprobs_T.masked_fill_((targets_T < 0) | (targets_T >= len(weight_VH)), torch.nan)
        if forbidden_V is not None:
            logprobs_T.masked_fill_(forbidden_V[targets_T], -torch.inf)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, forbidden_V, maximum_T + total_T.log(), entropy_T)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, forbidden_V, normaliser_T, entropy_T = ctx.saved_tensors
        grads = [
            torch.zeros_like(entropy_T) if grad is None else grad.float().contiguous()
            for grad in (grad_logprobs_T, grad_entropy_T)
        ]
        if forbidden_V is not None:
            grads[0] = grads[0].masked_fill(forbidden_V[targets_T], 0)
        rows = (normaliser_T, entropy_T, *grads)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        # Summed over parts in float32: in bfloat16, later parts would be lost to rounding.
        grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=torch.float32) if need_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if need_weight else None
        for first, gradient_TC in _logit_gradients(hidden_TH, weight_VH, targets_T, ctx.temperature, forbidden_V, rows):
            part = slice(first, first + gradient_TC.shape[1])
            if grad_hidden_TH is not None:
                grad_hidden_TH += gradient_TC @ weight_VH[part]
            if grad_weight_VH is not None:
                torch.mm(gradient_TC.T, hidden_TH, out=grad_weight_VH[part])
        if grad_hidden_TH is not None:
            grad_hidden_TH = grad_hidden_TH.to(hidden_TH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None, None


def _row_statistics(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, temperature: float, forbidden_V: Tensor | None
) -> Tensor:
    """[4, S, T]: maximum, Σ exp, moment and target's logit of each row over each part of the vocabulary."""
    from npu_vlrl.kernels import triton_kernels

    tiles = tiles_for(hidden_TH.device.type, hidden_TH.dtype)
    row_blocks, id_tiles = _blocks(len(hidden_TH), tiles.rows), _blocks(len(weight_VH), tiles.ids)
    tiles_a_part = _blocks(id_tiles, max(1, PROGRAMS // row_blocks))
    parts = _blocks(id_tiles, tiles_a_part)
    statistics = hidden_TH.new_empty(4, parts, len(hidden_TH), dtype=torch.float32)
    triton_kernels.row_statistics[(row_blocks, parts)](
        *_inputs(hidden_TH, weight_VH, targets_T, forbidden_V),
        *statistics,
        len(hidden_TH),
        tiles_a_part,
        1.0 / temperature,
        **_constants(tiles, hidden_TH, weight_VH, forbidden_V),
    )
    return statistics


def _logit_gradients(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float,
    forbidden_V: Tensor | None,
    rows: tuple[Tensor, ...],
) -> Iterator[tuple[int, Tensor]]:
    """The first id of each part of the vocabulary and the logits' gradient [T, C] there, in a buffer used again.

    `rows`: normaliser, entropy, and the gradients of log-probability and entropy, each float32 [T].
    """
    from npu_vlrl.kernels import triton_kernels

    tiles = tiles_for(hidden_TH.device.type, hidden_TH.dtype)
    row_blocks, id_tiles = _blocks(len(hidden_TH), tiles.rows), _blocks(len(weight_VH), tiles.ids)
    tiles_a_part = min(id_tiles, max(1, GRADIENT_ELEMENTS // (len(hidden_TH) * tiles.ids)))
    buffer = hidden_TH.new_empty(len(hidden_TH), tiles_a_part * tiles.ids)
    for first in range(0, len(weight_VH), buffer.shape[1]):
        triton_kernels.logit_gradients[(row_blocks, tiles_a_part)](
            *_inputs(hidden_TH, weight_VH, targets_T, forbidden_V),
            *rows,
            buffer,
            len(hidden_TH),
            first,
            buffer.shape[1],
            1.0 / temperature,
            **_constants(tiles, hidden_TH, weight_VH, forbidden_V),
        )
        yield first, buffer[:, : len(weight_VH) - first]


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


def _inputs(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, forbidden_V: Tensor | None) -> tuple[Tensor, ...]:
    """The kernels' first arguments. Without forbidden ids they still need some pointer, which they do not read."""
    targets_T = targets_T.to(torch.int32)
    forbidden = targets_T if forbidden_V is None else forbidden_V.contiguous().view(torch.int8)
    return hidden_TH, weight_VH, targets_T, forbidden


def _constants(tiles: Tiles, hidden_TH: Tensor, weight_VH: Tensor, forbidden_V: Tensor | None) -> dict[str, Any]:
    import triton.language as tl

    # The interpreter holds bfloat16 as integers and would multiply those.
    interpreted = hidden_TH.device.type == "cpu"
    return {
        "n_ids": len(weight_VH),
        "width": hidden_TH.shape[1],
        "HAS_FORBIDDEN": forbidden_V is not None,
        "ROWS": tiles.rows,
        "IDS": tiles.ids,
        "WIDTH": tiles.width,
        "PRODUCT": tl.float32 if interpreted else getattr(tl, str(hidden_TH.dtype).removeprefix("torch.")),
        **tiles.launch,
    }
