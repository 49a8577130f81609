"""Converts Megatron-core's names and layouts of Qwen2, Qwen3 and their vision-language models to those of transformers.

    decoder.layers.N.self_attention.linear_qkv   q, k, v of the first group of heads, then those of the second, …
    decoder.layers.N.mlp.linear_fc1              gate over up; on each tensor-parallel rank, its rows of both
    linear_qkv, linear_fc1, word_embeddings, output_layer   rows are divided over tensor-parallel ranks
    linear_proj, linear_fc2                                 columns are

Both layer specs are supported (norms inside the linear layers, or beside them), layers by number or stacked, and the
tower of Megatron-Bridge, which has transformers' layout. Sources: `attention.py`, `mlp.py` and `gpt_layer_specs.py` of
megatron-core 0.16, whose own model a test compares with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from npu_vlrl.export.tensors import read_tensors
from npu_vlrl.learner.checkpoint import CheckpointError

Rank = Mapping[str, Tensor]
Named = tuple[str, Tensor]

EMBEDDING = "embedding.word_embeddings.weight"

BY_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
ON_EACH = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the model in transformers."""

    text: str
    """Prefix of the names of the language model."""
    groups: int
    """Number of key-value heads."""
    per_group: int
    """Number of query heads for each key-value head."""
    width: int
    """Width of a head."""
    vocabulary: int
    """Number of rows of the embedding; Megatron pads them."""
    tower: tuple[str, str] | None = None
    """Prefixes of the vision tower's names, there behind the common prefix, and here."""


def is_megatron(path: Path) -> bool:
    """Whether a path is a Megatron checkpoint, by the folders of ranks."""
    return path.is_dir() and ((path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*")))


def read_ranks(path: Path) -> list[list[Rank]]:
    """Reads the weights of all ranks, by pipeline stage, then by tensor-parallel rank.

    `path` holds `mp_rank_TP` or `mp_rank_TP_PP`, or an iteration's folder that does. Raises CheckpointError.
    """
    latest = path / "latest_checkpointed_iteration.txt"
    if latest.is_file():
        named = latest.read_text().strip()
        path = path / (f"iter_{int(named):07d}" if named.isdecimal() else "release")
    folders = {}
    for folder in path.glob("mp_rank_*"):
        match = re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", folder.name)
        if match is None:
            raise CheckpointError(f"{folder}: experts divided over ranks are not known here, only mp_rank_TP[_PP]")
        folders[int(match[2] or 0), int(match[1])] = folder
    stages, ranks = ({place[axis] for place in folders} for axis in (0, 1))
    if not folders:
        return [[read_tensors(path)]]  # one that was gathered, or a DCP
    if sorted(folders) != [(stage, rank) for stage in range(len(stages)) for rank in range(len(ranks))]:
        raise CheckpointError(f"{path}: some mp_rank folders are not there; copy all of them")
    return [[read_tensors(folders[stage, rank]) for rank in range(len(ranks))] for stage in range(len(stages))]


def converted(stages: Sequence[Sequence[Rank]], layout: Layout) -> Iterator[Named]:
    """Weights by the names of transformers. Raises CheckpointError for an unknown name or shape."""
    inner = _prefix(stages[0][0])
    outer = inner.removesuffix("language_model.")
    layers_before = 0
    for ranks in stages:
        names = [n for n in ranks[0] if n.startswith(outer) and not n.endswith("_extra_state")]
        if any(rank.keys() != ranks[0].keys() for rank in ranks):
            raise CheckpointError("the tensor-parallel ranks have tensors of different names; are they of one model?")
        numbers = {0}
        for name in names:
            tensors = [rank[name] for rank in ranks]
            if layout.tower and name.startswith(f"{outer}{layout.tower[0]}"):
                yield layout.tower[1] + name.removeprefix(f"{outer}{layout.tower[0]}"), _equal(name, tensors)
            elif layer := re.fullmatch(re.escape(inner) + r"decoder\.layers\.(\d+)\.(.*)", name):
                numbers.add(int(layer[1]) + 1)
                prefix = f"{layout.text}layers.{layers_before + int(layer[1])}."
                yield from ((prefix + n, t) for n, t in _layer(name, layer[2], tensors, layout))
            elif layer := re.fullmatch(re.escape(inner) + r"decoder\.layers\.(\D.*)", name):
                for number, one in enumerate(zip(*tensors, strict=True)):
                    prefix = f"{layout.text}layers.{number}."
                    yield from ((prefix + n, t) for n, t in _layer(name, layer[1], one, layout))
            else:
                yield _outside(name, name.removeprefix(inner), tensors, layout)
        layers_before += max(numbers)


def _prefix(rank: Rank) -> str:
    found = [name.removesuffix(EMBEDDING) for name in rank if name.endswith(EMBEDDING)]
    if len(found) != 1:
        raise CheckpointError(f"{len(found)} tensors are named …{EMBEDDING}, where one model has one")
    return found[0]


def _outside(name: str, rest: str, tensors: Sequence[Tensor], layout: Layout) -> Named:
    match rest:
        case "embedding.word_embeddings.weight":
            return f"{layout.text}embed_tokens.weight", torch.cat(list(tensors))[: layout.vocabulary]
        case "output_layer.weight":
            return "lm_head.weight", torch.cat(list(tensors))[: layout.vocabulary]
        case "decoder.final_layernorm.weight":
            return f"{layout.text}norm.weight", _equal(name, tensors)
    raise CheckpointError(
        f"{name} is no tensor of Qwen2, Qwen3 or their vision-language models in Megatron-core; towers are known as "
        "`visual.…`, virtual pipeline stages and experts are not"
    )


def _layer(name: str, rest: str, tensors: Sequence[Tensor], layout: Layout) -> Iterator[Named]:
    module, _, kind = rest.rpartition(".")
    if module == "self_attention.linear_qkv" and kind in ("weight", "bias"):
        for part, tensor in zip("qkv", _heads(name, torch.cat(list(tensors)), layout), strict=True):
            yield f"self_attn.{part}_proj.{kind}", tensor
    elif rest == "mlp.linear_fc1.weight":
        halves = [tensor.chunk(2) for tensor in tensors]
        yield "mlp.gate_proj.weight", torch.cat([gate for gate, _ in halves])
        yield "mlp.up_proj.weight", torch.cat([up for _, up in halves])
    elif rest in BY_COLUMNS:
        yield BY_COLUMNS[rest], torch.cat(list(tensors), dim=1)
    elif rest in ON_EACH:
        yield ON_EACH[rest], _equal(name, tensors)
    else:
        raise CheckpointError(f"{name} is no tensor of a layer of Qwen2 or Qwen3 in Megatron-core")


def _heads(name: str, fused: Tensor, layout: Layout) -> Iterator[Tensor]:
    """Splits [groups * (per_group + 2) * width, …] into queries, keys and values."""
    rows = layout.groups * (layout.per_group + 2) * layout.width
    if len(fused) != rows:
        raise CheckpointError(f"{name} has {len(fused)} rows, and the heads of the base model make {rows}")
    inner = fused.shape[1:]
    groups = fused.view(layout.groups, layout.per_group + 2, layout.width, *inner)
    for part in (groups[:, :-2], groups[:, -2], groups[:, -1]):
        yield part.reshape(-1, *inner)


def _equal(name: str, tensors: Sequence[Tensor]) -> Tensor:
    if any(not torch.equal(tensor, tensors[0]) for tensor in tensors):
        raise CheckpointError(f"{name} is not the same on all tensor-parallel ranks; are they of one step?")
    return tensors[0]
