"""Reference kernels of the small operators that only sampling uses, computed in float32.

Those named aclnn are CANN's, formulas and limits as in its documents. Those named Atb belong to the library of
transformer operators (ATB, in NNAL); `atb.c` calls them, limits as in that library's published checks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.host_cann.attention import DTYPES, require

SECTIONS = ((16, 24, 24), (24, 20, 20), (8, 12, 12), (16, 16, 16, 16))
"""Elements of rotary halves that follow each axis: what aclnnRopeWithSinCosCacheV2 can do."""


def top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None, out: Tensor) -> None:
    """[B, V] logits; -inf for what is below the k-th largest, or outside the fewest largest that have probability p.

    Ascending order: an element goes when its cumulative probability is at most 1 - p; the largest one always stays.
    """
    require(logits.dim() == 2 and logits.dtype in DTYPES, f"logits are {logits.dtype} {list(logits.shape)}, not [B, V]")
    require(p is not None or k is not None, "neither p nor k is given")
    ordered, places = logits.float().sort(dim=-1, stable=True)
    rows, words = logits.shape
    if k is not None:
        require(
            k.dtype == torch.int32 and k.shape == (rows,), f"k must be int32 [{rows}], not {k.dtype} {list(k.shape)}"
        )
        require(bool(((k >= 1) & (k <= words)).all()), f"k must lie in 1..{words}")
        lowest = ordered.gather(-1, (words - k.long())[:, None])
        ordered = ordered.masked_fill(ordered < lowest, -torch.inf)
    if p is not None:
        require(
            p.dtype == logits.dtype and p.shape == (rows,),
            f"p must have the type of logits and shape [{rows}], not {p.dtype} {list(p.shape)}",
        )
        require(bool(((p >= 0) & (p <= 1)).all()), "p must lie in 0..1")
        gone = ordered.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        gone[:, -1] = False
        ordered = ordered.masked_fill(gone, -torch.inf)
    out.copy_(torch.empty_like(ordered).scatter_(-1, places, ordered))


def turned(heads: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
    """heads [T, N, D] with their first 2 x cos.shape[-1] elements turned; cos, sin [T, 1, half]."""
    turning, rest = heads.float().split([2 * cos.shape[-1], heads.shape[-1] - 2 * cos.shape[-1]], -1)
    one, two = turning.chunk(2, -1) if halves else (turning[..., ::2], turning[..., 1::2])
    first, second = one * cos - two * sin, two * cos + one * sin
    both = torch.cat([first, second], -1) if halves else torch.stack([first, second], -1).flatten(-2)
    return torch.cat([both, rest], -1)


def axis_of_element(section: list[int], interleaved: bool) -> Tensor:
    """The row of `positions` that each element of a rotary half follows.

    Sections stand one after another, or the axes take turns until an axis has had three times its section.
    """
    if not interleaved:
        return torch.repeat_interleave(torch.arange(len(section)), torch.tensor(section))
    element = torch.arange(sum(section))
    return torch.where(element < 3 * torch.tensor(section)[element % 3], element % 3, 0)


def rope_with_cache(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cache: Tensor,
    section: list[int],
    head_size: int,
    halves: bool,
    cache_mode: int,
    q_out: Tensor,
    k_out: Tensor,
) -> None:
    """Rotary position embedding from a table of cosines and sines, for one position or one of each axis.

    positions [T] or [axes, T]; q, k [T, heads x head_size]; cache [longest, rotary_dim], cosines and then sines.
    """
    require(q.dim() == k.dim() == cache.dim() == 2, "query, key and cos_sin_cache must have 2 dimensions")
    require(q.dtype == k.dtype == cache.dtype and q.dtype in DTYPES, "query, key and cos_sin_cache must be of one type")
    require(positions.dtype == torch.int64, f"positions must be int64, not {positions.dtype}")
    rotary, unit = cache.shape[-1], 16 if q.dtype == torch.float32 else 32
    require(
        head_size % unit == 0 == rotary % unit, f"head_size {head_size} and rotary_dim {rotary}: multiples of {unit}"
    )
    require(rotary <= head_size, f"rotary_dim {rotary} is more than head_size {head_size}")
    for name, x in (("query", q), ("key", k)):
        require(x.shape[-1] % head_size == 0, f"{name} {list(x.shape)} is not in heads of {head_size}")
        require(len(x) == positions.shape[-1], f"{name} has {len(x)} tokens, positions {positions.shape[-1]}")
    require(bool(((positions >= 0) & (positions < len(cache))).all()), f"positions must lie in 0..{len(cache) - 1}")
    cos, sin = cache.float()[positions].chunk(2, -1)
    if positions.dim() == 2:
        require(cache_mode in (0, 1), f"cache_mode {cache_mode} is not 0 or 1")
        require(tuple(section) in SECTIONS, f"mrope_section {section} is not one of {SECTIONS}")
        require(cache_mode == 0 or len(section) == 3, "cache_mode 1 takes three axes")
        require(len(positions) == len(section), f"{len(positions)} rows of positions for mrope_section {section}")
        require(2 * sum(section) == rotary, f"mrope_section {section} does not add up to half of rotary_dim {rotary}")
        axis, element = axis_of_element(section, cache_mode == 1), torch.arange(rotary // 2)
        cos, sin = cos[axis, :, element].T, sin[axis, :, element].T
    for x, out in ((q, q_out), (k, k_out)):
        out.copy_(turned(x.unflatten(-1, (-1, head_size)), cos[:, None], sin[:, None], halves).flatten(1))


def atb_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, coefficient: int, q_out: Tensor, k_out: Tensor
) -> None:
    """Rotary position embedding; q, k [T, heads x D]; cos, sin [T, D], a row for each token.

    coefficient 2 turns the two halves of a head against each other; D turns neighbours.
    """
    require(q.dim() == k.dim() == cos.dim() == sin.dim() == 2, "query, key, cos and sin must have 2 dimensions here")
    require(
        q.dtype == k.dtype and q.dtype in (torch.float16, torch.bfloat16), f"query and key: no {q.dtype}, {k.dtype}"
    )
    d = cos.shape[-1]
    require(cos.dtype == sin.dtype and cos.dtype in (q.dtype, torch.float32), f"cos is {cos.dtype}, query {q.dtype}")
    require(cos.shape == sin.shape, f"cos {list(cos.shape)} and sin {list(sin.shape)} differ in shape")
    require(16 <= d <= 4096, f"head_size {d} is not in 16..4096")
    require(coefficient in (2, d), f"rotaryCoeff {coefficient} has no reference; 2 and head_size {d} have")
    require(len(q) == len(k) == len(cos), f"query, key and cos have {len(q)}, {len(k)} and {len(cos)} tokens")
    require(lengths.dtype == torch.int32 and int(lengths.sum()) == len(q), "the lengths do not add up to the tokens")
    require(k.shape[-1] % d == 0, f"key {list(k.shape)} is not in heads of {d}")
    require(q.shape[-1] % k.shape[-1] == 0, f"query {list(q.shape)} is not a multiple of key {list(k.shape)}")
    halves = coefficient == 2
    half = slice(0, d // 2) if halves else slice(0, d, 2)  # both halves, or both neighbours, hold the same
    for x, out in ((q, q_out), (k, k_out)):
        heads = turned(x.unflatten(-1, (-1, d)), cos.float()[:, None, half], sin.float()[:, None, half], halves)
        out.copy_(heads.flatten(1))


def atb_reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_out: Tensor,
    value_out: Tensor,
) -> None:
    """Writes the keys and values [T, N, D] of tokens to rows `slots` [T] of caches [blocks, block size, N, D].

    A negative slot is padding, and its token goes nowhere.
    """
    require(slots.dtype == torch.int32, f"slot_indices must be int32, not {slots.dtype}")
    require(slots.shape == (len(key),) and len(key) == len(value), f"{list(slots.shape)} slots for {len(key)} tokens")
    require(key_cache.shape[:2] == value_cache.shape[:2], "both caches must have the same blocks")
    kept = slots >= 0
    for name, new, cache, out in (("key", key, key_cache, key_out), ("value", value, value_cache, value_out)):
        require(new.dtype == cache.dtype and new.dtype in (*DTYPES[:2], torch.int8), f"{name}: no {new.dtype} here")
        require(new.dim() == 3 and cache.dim() == 4, f"{name} must be [T, N, D] and its cache [blocks, size, N, D]")
        require(
            new.shape[1:] == cache.shape[2:], f"{name} {list(new.shape)} does not fit its cache {list(cache.shape)}"
        )
        require(out.data_ptr() == cache.data_ptr(), f"the {name} cache must be contiguous: it is written in place")
        rows = out.flatten(0, 1)
        require(bool((slots < len(rows)).all()), f"a slot lies outside the {len(rows)} rows of the {name} cache")
        require(len(slots[kept].unique()) == int(kept.sum()), "two tokens have one slot")
        rows[slots[kept].long()] = new[kept]


def atb_matmul_add(x: Tensor, weight: Tensor, total: Tensor, out: Tensor) -> None:
    """out [M, N] = total + x^T weight; x [K, M], weight [K, N], total and out in float32."""
    require(x.dtype == weight.dtype and x.dtype in DTYPES[:2], f"x and weight must be of 16 bits, not {x.dtype}")
    require(total.dtype == torch.float32, f"C must be float32, not {total.dtype}")
    require(x.dim() == weight.dim() == 2 and len(x) == len(weight), f"x {list(x.shape)}, weight {list(weight.shape)}")
    require(total.shape == (x.shape[1], weight.shape[1]), f"C is {list(total.shape)}")
    out.copy_(total + x.float().T @ weight.float())


KERNELS: dict[str, Callable[..., None]] = {
    "aclnnApplyTopKTopP": top_k_top_p,
    "aclnnRopeWithSinCosCacheV2": rope_with_cache,
    "AtbRope": atb_rope,
    "AtbReshapeAndCache": atb_reshape_and_cache,
    "AtbLinear": atb_matmul_add,
}
