"""Converts checkpoints of other programs to Hugging Face folders: by names of transformers, or of Megatron-core."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from npu_vlrl.config import ConfigError, ModelConfig
from npu_vlrl.export.card import Source, converted_card
from npu_vlrl.export.megatron import EMBEDDING, Layout, converted, is_megatron, read_ranks
from npu_vlrl.export.run import MARK, check_out, marked
from npu_vlrl.export.tensors import read_tensors
from npu_vlrl.learner.checkpoint import STATE, CheckpointError
from npu_vlrl.model.families import Family
from npu_vlrl.model.folder import export_model
from npu_vlrl.model.load import DTYPES, load_model
from npu_vlrl.model.policy import Policy


def convert(checkpoint: Path, base: Path, out: Path) -> str:
    """Writes the weights of a checkpoint with the other files of the model folder `base`, and returns a description.

    Weights are written in the dtype of `base`. Memory: the model on the host, and one tensor.

    Raises ConfigError for `base` and `out`; CheckpointError for a checkpoint that cannot be read, is incomplete, or is
    of another model.
    """
    if not checkpoint.exists():
        raise ConfigError(f"{checkpoint} does not exist; give the folder or the file of a checkpoint")
    if (checkpoint / STATE).is_file():
        raise ConfigError(f"{checkpoint} is a checkpoint of npu_vlrl; write `npu-vlrl export RUN --checkpoint …`")
    check_out(out)
    settings = ModelConfig(path=str(base), dtype=_dtype(base))  # type: ignore[arg-type]
    loaded = load_model(settings, base, 0, torch.device("cpu"))
    policy = loaded.policy
    if is_megatron(checkpoint):
        kind, weights = "Megatron-core", converted(read_ranks(checkpoint), layout_of(policy))
    else:
        tensors = read_tensors(checkpoint)
        if any(name.endswith(EMBEDDING) for name in tensors):
            kind, weights = "Megatron-core", converted([[tensors]], layout_of(policy))
        else:
            kind, weights = "transformers", renamed(tensors, policy)
    kept = fill(policy, weights)
    facts = {"checkpoint": f"{checkpoint.absolute().name}, by the names of {kind}", "base model": base.absolute().name}
    if kept:
        facts["vision tower"] = "that of the base model; the checkpoint has none"
    source = Source(loaded.processor is not None, False, settings.dtype, facts)
    card = converted_card(out.absolute().name, source)
    mark = marked(checkpoint=checkpoint.absolute().name, weights=settings.dtype)
    export_model(loaded, out, {"README.md": card, MARK: mark})
    tower = "; the vision tower is that of --base" if kept else ""
    return f"{checkpoint}, by the names of {kind}{tower}"


def layout_of(policy: Policy) -> Layout:
    """Layout of Megatron's tensors. Raises CheckpointError for a family whose layout is unknown."""
    family = policy.family
    if not family.megatron:
        raise CheckpointError(f"the names of {family.title} in Megatron-core are not known here; convert it there")
    config = policy.text.config
    _, groups, width = policy.kv_shape
    heads = config.num_attention_heads // groups
    return Layout(f"{family.text}.", groups, heads, width, len(policy.head_weight), _tower_names(family))


def _tower_names(family: Family) -> tuple[str, str] | None:
    """Prefixes of the tower's names in Megatron-Bridge and in transformers' modules."""
    if family.vision is None:
        return None
    (root,) = family.vision.roots
    return f"{root.rpartition('.')[2]}.", f"{root}."


def renamed(tensors: Mapping[str, Tensor], policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Renames weights as in the modules. The checkpoint may have the names of published files, and a common prefix."""
    embedding = f"{policy.family.text}.embed_tokens.weight"
    published = "model.embed_tokens.weight"
    found = [name for name in tensors if name.endswith(published) or name.endswith(embedding)]
    if len(found) != 1:
        raise CheckpointError(
            f"{len(found)} tensors are named …{embedding}, where a checkpoint of this model has one; the first names "
            f"are {list(tensors)[:3]}"
        )
    old = not found[0].endswith(embedding)
    prefix = found[0].removesuffix(published if old else embedding)
    for name in tensors:
        if name.startswith(prefix):
            yield _module(name.removeprefix(prefix), policy.family.published if old else ()), tensors[name]


def _module(name: str, published: Sequence[tuple[str, str]]) -> str:
    """Name of a weight in the modules, by the prefixes of published files and of modules."""
    for there, here in published:
        if name.startswith(there):
            return name.replace(there, here, 1)
    return name


@torch.no_grad()
def fill(policy: Policy, weights: Iterable[tuple[str, Tensor]]) -> bool:
    """Copies weights into a policy; returns whether its vision tower was left because none of its weights are there.

    Raises CheckpointError for a weight that is missing, left over, or misshapen, and for a head that differs from the
    embedding where they are tied.
    """
    here = policy.base.state_dict()
    own = dict(policy.base.named_parameters())
    given: set[str] = set()
    shared: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name not in here or here[name].shape != tensor.shape:
            shape = list(here[name].shape) if name in here else "no such weight"
            raise CheckpointError(f"the checkpoint is of another model: {name} is {list(tensor.shape)}, here {shape}")
        if name in own:
            here[name].copy_(tensor)
        else:
            shared[name] = tensor
        given.add(name)
    for name, tensor in shared.items():
        if not torch.equal(here[name], tensor.to(here[name].dtype)):
            raise CheckpointError(f"{name} is another matrix than the embedding, and --base has the two as one")
    missing = own.keys() - given
    of_tower = set(map(id, policy.vision.parameters())) if policy.vision is not None else set()
    tower = {name for name, parameter in own.items() if id(parameter) in of_tower}
    if missing and missing != tower:
        raise CheckpointError(f"the checkpoint lacks weights: {sorted(missing)[:3]} … ({len(missing)} names)")
    return bool(missing)


def _dtype(base: Path) -> str:
    if not (base / "config.json").is_file():
        raise ConfigError(f"--base: {base} is no Hugging Face model folder (it has no config.json)")
    try:
        settings = dict(json.loads((base / "config.json").read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--base: {base / 'config.json'} is not JSON: {error}") from error
    name = settings.get("dtype", settings.get("torch_dtype", "float32"))
    if name not in DTYPES:
        raise ConfigError(f"--base: {base / 'config.json'} asks for {name}; known are {', '.join(DTYPES)}")
    return str(name)
