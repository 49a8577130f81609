"""Differences between the releases of transformers in `hardware.software.TRANSFORMERS`.

Those of the functions that apply rotary positions are in `kernels/modules.py`; all others are here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from npu_vlrl.model.families import Family
from npu_vlrl.model.families.base import Grid

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def normalised(settings: Any) -> Any:
    """Removes a `quantization_config` that is null from a model's configuration: 5.10 reads it as that of a quantised
    model.
    """
    for part in (settings, settings.get_text_config()):
        if getattr(part, "quantization_config", part) is None:
            del part.quantization_config
    return settings


def untied(settings: Any, names: Collection[str]) -> Any:
    """The configuration for a comparison of tensors without values, given their names. Where both a head and an
    embedding exist, nothing is tied: 5.10 would compare their numbers, which do not exist.
    """
    if not all(any(name.endswith(end) for name in names) for end in (HEAD, EMBEDDING)):
        return settings
    changed = copy.deepcopy(settings)
    for part in (changed, changed.get_text_config()):
        part.tie_word_embeddings = False
    return changed


def image_features(core: Any, family: Family, patches_PD: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """Features [n_tokens, hidden * (1 + deep)] of each image, by the vision-language model without its head. Releases
    differ in whether the model returns one tensor for all images or tiles, or a tensor for each image.
    """
    grids_N3 = torch.tensor(grids, device=patches_PD.device)
    output = core.get_image_features(**family.tower_inputs(patches_PD, grids_N3), return_dict=True)
    deep = getattr(output, family.deep_features) if family.deep_features else ()
    parts = [output.pooler_output, *deep]
    rows = [part.flatten(0, -2) if isinstance(part, Tensor) else torch.cat(list(part)) for part in parts]
    merged = len(patches_PD) // len(rows[0])
    return list(torch.split(torch.cat(rows, dim=-1), [math.prod(grid) // merged for grid in grids]))
