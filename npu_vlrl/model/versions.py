"""Where releases of transformers differ, of those in `hardware.software.TRANSFORMERS`.

Differences of the functions that apply rotary positions stand in `kernels/modules.py`; all others stand here.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def normalised(settings: Any) -> Any:
    """A model's configuration without keys that say nothing: 5.10 reads a `quantization_config` that is null as that
    of a quantised model.
    """
    for part in (settings, settings.get_text_config()):
        if getattr(part, "quantization_config", part) is None:
            del part.quantization_config
    return settings


def untied(settings: Any, names: Collection[str]) -> Any:
    """The configuration to compare tensors without values with, by their names. Where there are both a head and an
    embedding, nothing is tied: 5.10 compares the numbers of the two, and there are none.
    """
    if not all(any(name.endswith(end) for name in names) for end in (HEAD, EMBEDDING)):
        return settings
    changed = copy.deepcopy(settings)
    for part in (changed, changed.get_text_config()):
        part.tie_word_embeddings = False
    return changed


def image_features(core: Any, patches_PD: Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Features [n_tokens, hidden * (1 + deep)] of each image, by the vision-language model without its head. Deep
    features are one tensor of all images in 5.10; 5.24 cuts them into images.
    """
    output = core.get_image_features(patches_PD, torch.tensor(grids, device=patches_PD.device), return_dict=True)
    images = output.pooler_output
    lengths = [len(image) for image in images]
    deep = getattr(output, "deepstack_features", None) or ()
    deep = [part.split(lengths) if isinstance(part, Tensor) else part for part in deep]
    return [torch.cat(parts, dim=-1) for parts in zip(images, *deep, strict=True)]
