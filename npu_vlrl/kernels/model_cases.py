"""Cases of `parity` at the shapes of a model: the calls of each op in a training step and in a decode step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.kernels.parity import Case
from npu_vlrl.kernels.table import Implementation
from npu_vlrl.kernels.tree import Tree

SMALLER = 1 / 32
"""Factor of weights: products over 1,280 to 3,584 inputs then have a size of 1 to 2. A power of two rounds nothing."""


@dataclass(frozen=True)
class Tower:
    """Shapes of a vision tower with gated layers."""

    hidden: int
    heads: int
    inner: int
    patch: tuple[int, int, int, int]
    """Channels, frames, height and width of a patch."""


@dataclass(frozen=True)
class Shapes:
    """Widths of a model.

    Example: `Shapes(2048, 16, 2, 128, 11008, 151936, Tower(1280, 16, 3420, (3, 2, 14, 14)))` is Qwen2.5-VL-3B.
    """

    hidden: int
    heads: int
    key_heads: int
    width: int
    """Width of a head."""
    inner: int
    vocabulary: int
    tower: Tower


@dataclass(frozen=True)
class Amounts:
    """Sizes of the cases."""

    tokens: int
    patches: int
    rows: int
    """Turns that are decoded together."""
    room: int
    """Slots of the KV cache for each row."""
    scored: int
    """Tokens that the head scores."""


def cases(shapes: Shapes, amounts: Amounts) -> tuple[Case, ...]:
    """Cases of the model, at least one for each op; ops that are added to the table later need one here."""
    return (*_attention(shapes, amounts), *_decoding(shapes, amounts), *_layers(shapes, amounts))


def _attention(shapes: Shapes, amounts: Amounts) -> tuple[Case, ...]:
    tokens, patches, tower = amounts.tokens, amounts.patches, shapes.tower
    text = ((shapes.heads, tokens, shapes.width), *[(shapes.key_heads, tokens, shapes.width)] * 2)
    seen = ((tower.heads, patches, tower.hidden // tower.heads),) * 3
    tree = Tree((0, tokens // 2, tokens * 3 // 4), (tokens, tokens * 3 // 4, tokens))
    keys = tokens // 2
    padded = ((2, shapes.heads, keys // 4, shapes.width), *[(2, shapes.key_heads, keys, shapes.width)] * 2)
    return (
        *(_packed(text, [0, tokens // 3, tokens // 2, tokens], True), _packed(text, [0, tokens // 2, tokens], True)),
        *(_packed(seen, [0, patches // 4, patches], False), _packed(seen, [0, patches // 2, patches], False)),
        Case("tree_attention", text, lambda run, q, k, v: run(q, k, v, tree, q.shape[2] ** -0.5)),
        Case("masked_attention", padded, _masked),
    )


def _packed(shapes: tuple[tuple[int, ...], ...], ends: list[int], causal: bool) -> Case:
    return Case("varlen_attention", shapes, lambda run, q, k, v: run(q, k, v, ends, ends, causal, q.shape[2] ** -0.5))


def _masked(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two rows, the first of which is padded on the left; the queries are the last tokens."""
    queries, keys = q.shape[2], k.shape[2]
    places = torch.arange(keys)
    own = torch.stack([places >= keys // 3, places >= 0])[:, None, None]
    mask = own & (places <= torch.arange(keys - queries, keys)[:, None])
    return run(q, k, v, mask.to(q.device), q.shape[3] ** -0.5)


def _decoding(shapes: Shapes, amounts: Amounts) -> tuple[Case, ...]:
    """A decode step, and a prefill that continues cached rows."""
    cache = ((amounts.rows, amounts.room, shapes.key_heads, shapes.width),) * 2
    step, more = [1] * amounts.rows, [1 + 4 * (row % 3) for row in range(amounts.rows)]
    return tuple(
        Case(
            "decode_attention",
            ((shapes.heads, sum(news), shapes.width), *cache),
            lambda run, q, keys, values, news=news: _kept(run, q.detach(), keys.detach(), values.detach(), news),
        )
        for news in (step, more)
    )


def _kept(run: Callable[..., Tensor], q: Tensor, keys: Tensor, values: Tensor, news: list[int]) -> Tensor:
    """Decode attention over rows of very different lengths; the shortest row has only its new tokens."""
    rows, room = keys.shape[:2]
    lengths = torch.linspace(max(news), room, rows).int()
    of = CacheRows.of(lengths.to(q.device), news, room, room, lengths.tolist())
    return run(q, keys, values, of, q.shape[2] ** -0.5)


def _layers(shapes: Shapes, amounts: Amounts) -> tuple[Case, ...]:
    tokens, patches, hidden, tower = amounts.tokens, amounts.patches, shapes.hidden, shapes.tower
    wide, weight = (tokens, shapes.inner), (tower.hidden, *tower.patch)
    pixels = weight[1] * weight[2] * weight[3] * weight[4]
    gate, down = (tower.inner, tower.hidden), (tower.hidden, tower.inner)
    head = (shapes.vocabulary, hidden)
    return (
        Case("rms_norm", ((tokens, hidden), (hidden,)), lambda run, x, w: run(x, w, 1e-6)),
        Case("rotary", ((1, tokens, shapes.heads, shapes.width),), lambda run, x: _rotary(run, x, x.dtype)),
        Case("rotary", ((1, patches, tower.heads, tower.hidden // tower.heads),), _rotary),
        Case("swiglu", (wide, wide), lambda run, gate, up: run(gate, up)),
        Case("gated_mlp", ((patches, tower.hidden), gate, gate, down, gate[:1]), _gated_mlp),
        Case("patch_embed", ((patches, pixels), weight, weight[:1]), lambda run, x, w, b: run(x, w * SMALLER, b)),
        Case("add_at", ((1, tokens, hidden), (tokens // 2, hidden)), _add_at),
        Case("logprob_entropy", ((amounts.scored, hidden), head), _logprob_entropy),
        Case("add_product", (head, (amounts.scored, shapes.vocabulary), (amounts.scored, hidden)), _add_product),
    )


def _rotary(run: Callable[..., Tensor], x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    half = x.shape[3] // 2
    angles = torch.arange(x.shape[1])[:, None] / 1e6 ** (torch.arange(half) / half)
    angles = torch.cat([angles, angles], -1)[None]
    return run(x, angles.cos().to(x.device, dtype), angles.sin().to(x.device, dtype))


def _gated_mlp(run: Callable[..., Tensor], x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return run(x, (gate * SMALLER, bias), (up * SMALLER, None), (down * SMALLER, None))


def _add_at(run: Callable[..., Tensor], x: Tensor, rows: Tensor) -> Tensor:
    mask = torch.arange(x.shape[1], device=x.device)[None] % 2 == 1
    return run(x, mask, rows)


def _logprob_entropy(
    run: Callable[..., tuple[Tensor, Tensor]], hidden: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    targets = torch.arange(len(hidden), device=hidden.device) * 3 % len(weight)
    forbidden = torch.arange(len(weight), device=weight.device) == len(weight) - 1
    return run(hidden, weight * SMALLER, targets, 0.7, forbidden, 1024)


def _add_product(run: Implementation, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    total = total.detach().float().clone()
    run(total, left.detach(), right.detach())
    return total
