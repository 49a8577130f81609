"""Puts the op table's attention into transformers models.

transformers selects attention by name. Our name contains "flash": vision towers then pass the boundaries of their
windows in one call, where other names make them loop over windows in Python.

Our name has no entry in transformers' registry of masks, so the models build no mask of their own: a call with neither
boundaries nor a mask [batch, 1, queries, keys] reaches us unchanged, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from npu_vlrl.kernels.kv_cache import KVCache
from npu_vlrl.kernels.table import op
from npu_vlrl.kernels.tensor_cache import OncePerTensor
from npu_vlrl.kernels.tree import Tree

ATTENTION_NAME = "npu_vlrl_flash"

_to_host = OncePerTensor(Tensor.tolist)


def attach(model: Any) -> None:
    """Makes a built transformers model, and all models inside it, use the op table's attention.

    `from_pretrained(attn_implementation=...)` does not work: for a name with "flash" in it, transformers looks for a
    kernel package to download. Raises ValueError for a model without a transformers configuration.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention_forward)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = ATTENTION_NAME
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != ATTENTION_NAME:
        raise ValueError(f"{type(model).__name__} has no transformers configuration, so its attention cannot be set")


def attention_forward(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | Sequence[int] | None = None,
    cu_seq_lens_k: Tensor | Sequence[int] | None = None,
    tree: Tree | None = None,
    kept: KVCache | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Returns ([B, T, H, D], None).

    With `tree` (B = 1): packed sequences with shared prefixes. With `kept` (B = 1): packed tokens that continue rows of
    the KV cache and are written to it. With `cu_seq_lens_q` and `cu_seq_lens_k` (B = 1): packed sequences. With a
    boolean mask [B, 1, T, S] (True = visible): that mask. With `is_causal=False` and nothing else: every token sees its
    whole row, as in a tower that takes tiles of one size. Raises ValueError for anything else, since a guess would let
    sequences see each other.
    """
    if dropout or sliding_window is not None:
        raise ValueError("npu_vlrl attention has no dropout and no sliding window; set both off in the model's config")
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    if tree is not None:
        return op("tree_attention")(query_BHTD[0], key_BKSD[0], value_BKSD[0], tree, scale)[None], None
    if kept is not None:
        keys, values = kept.write(module.layer_idx, key_BKSD[0], value_BKSD[0])  # type: ignore[arg-type]
        return op("decode_attention")(query_BHTD[0], keys, values, kept.rows, scale)[None], None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if query_BHTD.shape[0] != 1:
            raise ValueError(f"packed sequences come as a batch of 1, got a batch of {query_BHTD.shape[0]}")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        cu_q, cu_k = _on_host(cu_seq_lens_q), _on_host(cu_seq_lens_k)
        out_THD: Tensor = op("varlen_attention")(query_BHTD[0], key_BKSD[0], value_BKSD[0], cu_q, cu_k, causal, scale)
        return out_THD[None], None
    if attention_mask is None and is_causal is False:
        return _whole_rows(query_BHTD, key_BKSD, value_BKSD, scale), None
    if attention_mask is None or attention_mask.dtype != torch.bool or attention_mask.ndim != 4:
        raise ValueError(
            "npu_vlrl attention needs cu_seq_lens_q and cu_seq_lens_k (packed sequences) or a boolean attention_mask "
            f"[batch, 1, queries, keys]; {type(module).__name__} passed neither"
        )
    return op("masked_attention")(query_BHTD, key_BKSD, value_BKSD, attention_mask, scale), None


def _whole_rows(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float) -> Tensor:
    """Attention of each token over its whole row, [B, T, H, D]; the rows are packed head to tail."""
    rows, _, length, _ = q_BHTD.shape
    packed = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1) for x in (q_BHTD, k_BKSD, v_BKSD))
    ends_q, ends_k = (range(0, rows * n + 1, n) for n in (length, k_BKSD.shape[2]))
    out_THD: Tensor = op("varlen_attention")(*packed, list(ends_q), list(ends_k), False, scale)
    return torch.unflatten(out_THD, 0, (rows, length))


def _on_host(cumulative: Tensor | Sequence[int]) -> Sequence[int]:
    """The lengths as host ints. A tensor is copied once, however many layers pass it: the copy waits for the device."""
    return _to_host(cumulative) if isinstance(cumulative, Tensor) else cumulative
