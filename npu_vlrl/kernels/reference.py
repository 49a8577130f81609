"""The definition of every op, in plain PyTorch. Runs on any device and in float64, where tests compare against it.

Suffix letters: B batch, T queries or rows, S keys, L slots of a row in the KV cache, H query heads, K key heads,
D head width (in attention, `rotary`); T rows, H hidden width, V vocabulary, C rows of a chunk (in `logprob_entropy`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.kernels.table import op, register
from npu_vlrl.kernels.tree import Tree

Linear = tuple[Tensor, Tensor | None]

# --- attention -------------------------------------------------------------------------------------------------------


@register("varlen_attention")
def varlen_attention(
    q_HTD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention over packed sequences: tokens of one sequence never see another. Returns [T, H, D].

    `cu_q` and `cu_k` are cumulative lengths that start with 0. Query head h uses key head h // (H // K). A causal mask
    is aligned at the end: the last query of a sequence sees all its keys. Raises ValueError when the lengths do not
    cover the tensors, or when a query would have no key to look at.
    """
    q_lengths, k_lengths = checked_lengths(cu_q, cu_k, q_HTD.shape[1], k_KSD.shape[1], causal)
    if len(set(q_lengths)) == len(set(k_lengths)) == 1:
        q, k, v = (x.reshape(x.shape[0], len(q_lengths), -1, x.shape[2]).transpose(0, 1) for x in (q_HTD, k_KSD, v_KSD))
        return _attend(q, k, v, causal, scale).flatten(0, 1)

    # Sequences of equal lengths form a batch; nothing is padded. On one CPU thread, forward + backward, 4 heads of 16:
    # 64 texts of 40..90 tokens 12 ms (one by one 13, padded 15), 200 even windows of 16 patches 4 ms (15, 5), uneven
    # ones 5 ms (17, 5). Padding costs 20 times as much where one text is long.
    qs, ks, vs = torch.split(q_HTD, q_lengths, 1), torch.split(k_KSD, k_lengths, 1), torch.split(v_KSD, k_lengths, 1)
    batches: dict[tuple[int, int], list[int]] = {}
    for index, pair in enumerate(zip(q_lengths, k_lengths, strict=True)):
        batches.setdefault(pair, []).append(index)
    outputs = list(qs)
    for members in batches.values():
        q, k, v = (torch.stack([parts[i] for i in members]) for parts in (qs, ks, vs))
        for index, output in zip(members, _attend(q, k, v, causal, scale).unbind(0), strict=True):
            outputs[index] = output
    return torch.cat(outputs) if outputs else q_HTD.transpose(0, 1)


def checked_lengths(
    cu_q: Sequence[int], cu_k: Sequence[int], n_queries: int, n_keys: int, causal: bool
) -> tuple[list[int], list[int]]:
    """The lengths of sequences, in queries and in keys. Raises the errors of `varlen_attention`."""
    q_lengths, k_lengths = _lengths("cu_q", cu_q, n_queries), _lengths("cu_k", cu_k, n_keys)
    if len(q_lengths) != len(k_lengths):
        raise ValueError(f"varlen_attention: cu_q has {len(q_lengths)} sequences, cu_k has {len(k_lengths)}")
    for index, (queries, keys) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        if queries and keys < (queries if causal else 1):
            raise ValueError(
                f"varlen_attention: sequence {index} has {queries} queries and {keys} keys; "
                "some query would have no key"
            )
    return q_lengths, k_lengths


def _lengths(name: str, cumulative: Sequence[int], n_tokens: int) -> list[int]:
    lengths = [end - start for start, end in zip(cumulative, cumulative[1:], strict=False)]
    if not cumulative or cumulative[0] != 0 or cumulative[-1] != n_tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"varlen_attention: {name} must rise from 0 to {n_tokens}, the number of tokens; "
            f"it has {len(cumulative)} entries, first {list(cumulative[:1])}, last {list(cumulative[-1:])}"
        )
    return lengths


def _attend(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, causal: bool, scale: float) -> Tensor:
    """Returns [B, T, H, D]."""
    n_queries, n_keys = q_BHTD.shape[2], k_BKSD.shape[2]
    mask = None
    if causal and n_queries != n_keys:  # torch aligns is_causal at the start
        mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q_BHTD.device).tril(n_keys - n_queries)
    output = F.scaled_dot_product_attention(
        q_BHTD,
        k_BKSD,
        v_BKSD,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
    )
    return output.transpose(1, 2)


@register("tree_attention")
def tree_attention(q_HTD: Tensor, k_KSD: Tensor, v_KSD: Tensor, tree: Tree, scale: float) -> Tensor:
    """Causal attention over packed sequences whose shared prefixes occur once. Returns [T, H, D].

    A token sees itself and, of the tokens before it, those of its node and of the nodes above: a node is a sequence of
    queries whose keys, gathered, are its whole path.
    """
    if tree.shares:
        path = tree.path_on(k_KSD.device)
        k_KSD, v_KSD = k_KSD[:, path], v_KSD[:, path]
    return varlen_attention(q_HTD, k_KSD, v_KSD, tree.bounds, tree.path_bounds, True, scale)


@register("masked_attention")
def masked_attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_B1TS: Tensor, scale: float) -> Tensor:
    """Attention where each query sees the keys at which the bool mask is True. Returns [B, T, H, D].

    The result of a query that sees no key is finite, and otherwise unspecified.
    """
    output = F.scaled_dot_product_attention(
        q_BHTD,
        k_BKSD,
        v_BKSD,
        attn_mask=mask_B1TS,
        scale=scale,
        enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
    )
    return output.transpose(1, 2)


@register("decode_attention")
def decode_attention(
    q_HTD: Tensor,
    keys_BLKD: Tensor,
    values_BLKD: Tensor,
    rows: CacheRows,
    scale: float,
    masked: Callable[..., Tensor] = masked_attention,
) -> Tensor:
    """Causal attention of packed queries, which are the last tokens of their rows, over all tokens of these rows.

    Returns [T, H, D]. Values beyond a row's length must be finite, and do not matter. `masked` computes the attention.
    """
    news = [b - a for a, b in zip(rows.cu_q, rows.cu_q[1:], strict=False)]
    most, n_rows = max(news), len(news)
    device = q_HTD.device
    even = most * n_rows == q_HTD.shape[1]
    if even:
        q_BHMD = torch.unflatten(q_HTD, 1, (n_rows, most)).transpose(0, 1)
    else:  # padded on the left
        at_BM = rows.starts_q[1:, None] - most + torch.arange(most, device=device)
        q_BHMD = q_HTD[:, at_BM.clamp(min=0)].transpose(0, 1)
    places_BM = rows.lengths_B[:, None] - most + torch.arange(most, device=device)
    mask_BMS = torch.arange(rows.longest, device=device) <= places_BM[..., None]
    keys, values = (kept[:, : rows.longest].transpose(1, 2) for kept in (keys_BLKD, values_BLKD))
    out_THD = masked(q_BHMD, keys, values, mask_BMS[:, None], scale).flatten(0, 1)
    if even:
        return out_THD
    kept_M = torch.arange(most, device=device) >= most - rows.starts_q.diff()[:, None]
    return out_THD[kept_M.flatten().nonzero()[:, 0]]


# --- parts of layers -------------------------------------------------------------------------------------------------


@register("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x²) + epsilon) · weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    All before the product with `weight` is computed in float32, and then rounded to the dtype of x.
    """
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


@register("rotary")
def rotary(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """x · cos + (-second half of x, first half of x) · sin, the same for all heads; returns [B, T, H, D] like x.

    Computed in the wider dtype of x and cos. A cos with B = 1 serves all rows. Raises ValueError when cos or sin do not
    cover x: half of the width is not enough, though half of it is a repetition.
    """
    check_rotary(x_BTHD, cos_BTD, sin_BTD)
    first, second = x_BTHD.chunk(2, -1)
    return (x_BTHD * cos_BTD[:, :, None] + torch.cat([-second, first], -1) * sin_BTD[:, :, None]).to(x_BTHD.dtype)


def check_rotary(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> None:
    rows, length, _, width = x_BTHD.shape
    if cos_BTD.shape not in ((rows, length, width), (1, length, width)) or sin_BTD.shape != cos_BTD.shape or width % 2:
        raise ValueError(
            f"rotary: cos {list(cos_BTD.shape)} and sin {list(sin_BTD.shape)} must be [B or 1, T, D] for x "
            f"[B, T, H, D] = {list(x_BTHD.shape)}, with an even D"
        )


@register("swiglu")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer, arXiv 2002.05202); all three have one shape."""
    return F.silu(gate) * up


@register("gated_mlp")
def gated_mlp(x: Tensor, gate: Linear, up: Linear, down: Linear) -> Tensor:
    """down(silu(gate(x)) · up(x)), each a linear map: its weight [out, in] and its bias or None."""
    return F.linear(swiglu(F.linear(x, *gate), F.linear(x, *up)), *down)


@register("patch_embed")
def patch_embed(patches_PD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution over patches that do not overlap; D = channels · frames · height · width of a patch, flattened.

    `weight` is [H, channels, frames, height, width], `bias` [H]. Returns [P, H].
    """
    return F.conv3d(torch.unflatten(patches_PD, 1, weight.shape[1:]), weight, bias).flatten(1)


@register("add_at")
def add_at(x_BTH: Tensor, mask_BT: Tensor, rows_NH: Tensor) -> Tensor:
    """x with `rows_NH` added, in order, where the bool mask is True; it is True N times."""
    summed_BTH = x_BTH.clone()
    summed_BTH[mask_BT] += rows_NH
    return summed_BTH


# --- log-probability and entropy from hidden states ------------------------------------------------------------------


@register("logprob_entropy")
def logprob_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    forbidden_V: Tensor | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, both in nats: two tensors [T].

    The distribution is softmax(hidden @ weight.T / temperature) over the ids where `forbidden_V` (bool) is False. The
    products are taken in the dtype of the inputs, everything after them in float32 (float64 stays float64). At most
    `chunk` rows of logits exist at a time; the backward pass computes them again. Both outputs are differentiable,
    once. A forbidden target has log-probability -inf and gradient zero: to refuse it would wait for the device.
    Raises ValueError when `temperature` is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"logprob_entropy: temperature is {temperature}, it must be positive")
    assert chunk > 0 and targets_T.shape == hidden_TH.shape[:1] and hidden_TH.shape[1] == weight_VH.shape[1]
    logprobs_T, entropy_T = _LogprobEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, targets_T, temperature, forbidden_V, chunk
    )
    return logprobs_T, entropy_T


def _scaled_logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float, forbidden_V: Tensor | None) -> Tensor:
    """[C, V], float32 or float64; forbidden ids hold the lowest finite number, so that 0 · logit stays 0."""
    logits = hidden_CH @ weight_VH.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if forbidden_V is not None:
        logits.masked_fill_(forbidden_V, torch.finfo(logits.dtype).min)
    return logits


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        temperature: float,
        forbidden_V: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        logprobs_T, entropy_T, normaliser_T = (
            torch.empty(len(targets_T), dtype=dtype, device=hidden_TH.device) for _ in range(3)
        )
        for start in range(0, len(targets_T), chunk):
            rows = slice(start, start + chunk)
            logits = _scaled_logits(hidden_TH[rows], weight_VH, temperature, forbidden_V)
            normaliser = logits.logsumexp(1)
            logprobs_T[rows] = logits.gather(1, targets_T[rows, None])[:, 0] - normaliser
            probabilities = (logits - normaliser[:, None]).exp_()
            entropy_T[rows] = normaliser - probabilities.mul_(logits).sum(1)
            normaliser_T[rows] = normaliser
        if forbidden_V is not None:
            logprobs_T.masked_fill_(forbidden_V[targets_T], -torch.inf)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, forbidden_V, normaliser_T, entropy_T)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, forbidden_V, normaliser_T, entropy_T = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        if grad_logprobs_T is not None and forbidden_V is not None:
            grad_logprobs_T = grad_logprobs_T.masked_fill(forbidden_V[targets_T], 0)
        grad_hidden_TH = torch.empty_like(hidden_TH) if need_hidden else None
        # The sum over chunks is in the wide dtype: in bfloat16, later chunks would be lost to rounding.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=normaliser_T.dtype) if need_weight else None
        for start in range(0, len(targets_T), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logprobs_CV = _scaled_logits(hidden_TH[rows], weight_VH, ctx.temperature, forbidden_V)
            logprobs_CV -= normaliser_T[rows, None]
            grad_logits_CV = _logit_gradient(
                logprobs_CV,
                targets_T[rows],
                entropy_T[rows],
                None if grad_logprobs_T is None else grad_logprobs_T[rows],
                None if grad_entropy_T is None else grad_entropy_T[rows],
            )
            grad_logits_CV = (grad_logits_CV / ctx.temperature).to(hidden_TH.dtype)
            if grad_hidden_TH is not None:
                grad_hidden_TH[rows] = grad_logits_CV @ weight_VH
            if grad_weight_VH is not None:
                op("add_product")(grad_weight_VH, grad_logits_CV, hidden_TH[rows])
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None, None, None


@register("add_product")
def add_product(total_VH: Tensor, left_CV: Tensor, right_CH: Tensor) -> None:
    """total += left.T @ right, in place, where total may be wider than the others. Not differentiable."""
    total_VH += left_CV.T @ right_CH


def _logit_gradient(
    logprobs_CV: Tensor,
    targets_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """Gradient [C, V] of the scaled logits z: d logprob/dz_j = [j = target] - p_j and
    d entropy/dz_j = -p_j (log p_j + entropy)."""
    probabilities = logprobs_CV.exp()
    gradient = torch.zeros_like(probabilities)
    if grad_entropy_C is not None:
        gradient.sub_(probabilities * (logprobs_CV + entropy_C[:, None]) * grad_entropy_C[:, None])
    if grad_logprobs_C is not None:
        gradient.sub_(probabilities * grad_logprobs_C[:, None])
        gradient.scatter_add_(1, targets_C[:, None], grad_logprobs_C[:, None])
    return gradient
