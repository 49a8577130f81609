"""Writes a policy as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from npu_vlrl.common.atomic_files import set_permissions, writing
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.model.saving import save_model, save_tokenizer, split_processor, write_pixel_limits

COPIED = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files that are copied from the model's original folder; a training changes only the limits of images in them."""


def export_model(
    loaded: LoadedModel,
    target: Path,
    files: Mapping[str, str] | None = None,
    adapter: bool = False,
    used_up: bool = False,
) -> None:
    """Writes a folder that plain transformers loads: weights in the policy's dtype, tokenizer, processor, `files`.

    Adapters are merged, in float32, and rounded once; with `adapter` they are written alone, as a folder of peft. The
    limits of images are those of the policy. With `used_up` merged weights replace the policy's own, which saves the
    memory of a second copy on the host. The folder is written atomically, and replaces an existing one. Raises OSError
    with its name when the disk is full.
    """
    target = target.resolve()  # where a link points to
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with writing(target):
        _write(loaded, partial, files or {}, adapter, used_up)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _write(loaded: LoadedModel, partial: Path, files: Mapping[str, str], adapter: bool, used_up: bool) -> None:
    policy = loaded.policy
    if adapter:
        policy.model.save_pretrained(partial, save_embedding_layers=False)
    else:
        whole = _merged(policy.base, used_up) if policy.has_adapter else None
        save_model(policy.base, partial, whole)
        save_tokenizer(loaded.tokenizer, partial)
        for name in COPIED:
            if (loaded.folder / name).is_file():
                shutil.copy(loaded.folder / name, partial / name)
        split_processor(partial)
        if loaded.processor is not None:
            write_pixel_limits(partial, loaded.processor)
    for name, text in files.items():
        (partial / name).write_text(text, encoding="utf-8")
    for file in partial.glob("*.safetensors"):
        set_permissions(file)


@torch.no_grad()
def _merged(base: nn.Module, used_up: bool) -> dict[str, Tensor]:
    """The weights by the names of a model without adapters; W + s B A where there is an adapter."""
    whole = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in base.state_dict().items()
        if ".lora_A." not in name and ".lora_B." not in name
    }
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            (adapter,) = layer.lora_A
            weight = whole[f"{name}.weight"]
            # peft's get_delta_weight would round the product of adapters of 16 bits before it is added
            low, high = layer.lora_A[adapter].weight.float(), layer.lora_B[adapter].weight.float()
            sum_ = (weight.float() + layer.scaling[adapter] * (high @ low)).to(weight.dtype)
            whole[f"{name}.weight"] = weight.copy_(sum_) if used_up else sum_.cpu()
    return whole
