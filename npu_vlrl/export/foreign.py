"""Checkpoints of other programs as Hugging Face folders: by names of transformers, or by those of Megatron-core."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from npu_vlrl.config import ConfigError, ModelConfig
from npu_vlrl.export.card import Source, converted_card
from npu_vlrl.export.megatron import EMBEDDING, Layout, converted, is_megatron, read_ranks
from npu_vlrl.export.run import MARK, check_out, marked
from npu_vlrl.export.tensors import read_tensors
from npu_vlrl.learner.checkpoint import STATE, CheckpointError
from npu_vlrl.model.folder import export_model
from npu_vlrl.model.load import DTYPES, load_model
from npu_vlrl.model.policy import Policy


def convert(checkpoint: Path, base: Path, out: Path) -> str:
    """Writes the weights of a checkpoint with all else from the model folder `base`, and says what it was.

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
    """What Megatron's tensors are divided into."""
    config = policy.text.config
    _, groups, width = policy.kv_shape
    text = next(name for name, module in policy.base.named_modules() if module is policy.text)
    return Layout(f"{text}.", groups, config.num_attention_heads // groups, width, len(policy.head_weight))


def renamed(tensors: Mapping[str, Tensor], policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """By the names of the modules. The checkpoint may have those of published files, and words before all of them."""
    embedding = f"{layout_of(policy).text}embed_tokens.weight"
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
            yield _module(name.removeprefix(prefix), old), tensors[name]


def _module(name: str, old: bool) -> str:
    """Published files of Qwen2.5-VL have `model.…` and `visual.…`, the modules of today hold both in `model`."""
    if old and name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1) if old and name.startswith("model.") else name


@torch.no_grad()
def fill(policy: Policy, weights: Iterable[tuple[str, Tensor]]) -> bool:
    """Copies weights into a policy; whether its vision tower was left because none of its weights are there.

    Raises CheckpointError for a weight that is missing, left over, or misshapen, and for a head that is not the
    embedding where the two are one.
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
    tower = {name for name in own if name.startswith("model.visual.")}
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
