"""From a model of transformers to the shards of Megatron-core, by the layout that its sources describe.

The other direction of `npu_vlrl/export/megatron.py`, written without it: with loops over ranks, groups and heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Shard = dict[str, Tensor]


def rows(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """Of a layer whose output is divided."""
    assert len(tensor) % ranks == 0
    size = len(tensor) // ranks
    return tensor[rank * size : (rank + 1) * size]


def columns(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """Of a layer whose input is divided."""
    return rows(tensor.T, rank, ranks).T


def shard(model: Any, rank: int, ranks: int, padded: int, fused_norms: bool, layers: range, last: bool) -> Shard:
    """What a rank of a stage with these layers holds. The embedding has `padded` rows; the last of them are noise."""
    text = getattr(model.model, "language_model", model.model)
    config = text.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    found: Shard = {}

    def pad(tensor: Tensor) -> Tensor:
        noise = torch.full((padded - len(tensor), tensor.shape[1]), 7.0, dtype=tensor.dtype)
        return torch.cat([tensor, noise])

    if layers.start == 0:
        found["embedding.word_embeddings.weight"] = rows(pad(text.embed_tokens.weight), rank, ranks)
    for number in layers:
        layer, name = text.layers[number], f"decoder.layers.{number - layers.start}"
        attention, mlp = layer.self_attn, layer.mlp
        for kind in ("weight", "bias"):
            if getattr(attention.q_proj, kind) is None:
                continue
            q, k, v = (getattr(getattr(attention, f"{part}_proj"), kind) for part in "qkv")
            pieces = []
            for group in range(groups):
                for head in range(heads):
                    if head * groups // heads == group:
                        pieces.append(q[head * width : (head + 1) * width])
                pieces.append(k[group * width : (group + 1) * width])
                pieces.append(v[group * width : (group + 1) * width])
            found[f"{name}.self_attention.linear_qkv.{kind}"] = rows(torch.cat(pieces), rank, ranks)
        found[f"{name}.self_attention.linear_proj.weight"] = columns(attention.o_proj.weight, rank, ranks)
        for part in "qk":
            if hasattr(attention, f"{part}_norm"):
                norm = getattr(attention, f"{part}_norm")
                found[f"{name}.self_attention.{part}_layernorm.weight"] = norm.weight
        both = [rows(projection.weight, rank, ranks) for projection in (mlp.gate_proj, mlp.up_proj)]
        found[f"{name}.mlp.linear_fc1.weight"] = torch.cat(both)
        found[f"{name}.mlp.linear_fc2.weight"] = columns(mlp.down_proj.weight, rank, ranks)
        norms = {
            ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"): layer.input_layernorm,
            ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"): layer.post_attention_layernorm,
        }
        for (fused, beside), norm in norms.items():
            found[f"{name}.{fused if fused_norms else beside}"] = norm.weight
        found[f"{name}.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    if last:
        found["decoder.final_layernorm.weight"] = text.norm.weight
        if model.lm_head.weight is not text.embed_tokens.weight:
            found["output_layer.weight"] = rows(pad(model.lm_head.weight), rank, ranks)
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def write(
    model: Any,
    folder: Path,
    ranks: int,
    stages: int = 1,
    padded: int | None = None,
    fused_norms: bool = True,
    prefix: str = "",
    as_torch: bool = False,
    tower: bool = False,
) -> Path:
    """`mp_rank_TP` folders, or `mp_rank_TP_PP` where there are several stages."""
    text = getattr(model.model, "language_model", model.model)
    layers, size = len(text.layers), len(text.embed_tokens.weight) if padded is None else padded
    for stage in range(stages):
        own = range(stage * layers // stages, (stage + 1) * layers // stages)
        for rank in range(ranks):
            held = shard(model, rank, ranks, size, fused_norms, own, stage == stages - 1)
            held = {f"{prefix}{name}": tensor for name, tensor in held.items()}
            if tower and stage == 0:
                outer = prefix.removesuffix("language_model.")
                own_names = model.model.visual.state_dict().items()
                held |= {f"{outer}visual.{name}": tensor.clone() for name, tensor in own_names}
            target = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            target.mkdir(parents=True)
            if as_torch:
                torch.save({"model": held, "iteration": 7, "optimizer": {"count": 3}}, target / "model_optim_rng.pt")
            else:
                save_file(held, target / "model.safetensors")
    return folder
