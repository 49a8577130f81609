"""Puts the op table into transformers models: attention, and the parts of layers that the platform implements.

Where the active platform has no implementation of its own, the models stay as in transformers. Modules keep their
class, parameters and names; only a method of the instance is replaced, so that checkpoints, adapters and copies are
unaffected.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from npu_vlrl.kernels import attention, reference
from npu_vlrl.kernels.table import REFERENCE, active, op

GROUPED = ("cpu", "cuda", "meta")
"""Devices on which transformers multiplies the experts of a mixture as one product over groups of rows. On others each
expert is a product of its own, and the host waits to know which experts have rows.
"""

_patched_files: set[str] = set()


def attach(model: Any, unlike: Collection[str] = ()) -> None:
    """Makes a built transformers model use the op table. Raises the errors of `attention.attach`.

    `unlike` names transformers' classes and functions that are not replaced, since they only resemble replaced ones.
    Call it after `kernels.use`, and before adapters are added.
    """
    attention.attach(model)
    if model.device.type not in GROUPED:
        model.set_experts_implementation("eager")
    fused = {name for name, platform in active().items() if platform != REFERENCE}
    for module in model.modules():
        for name, suits, method, ours in _METHODS:
            if name in fused and type(module).__name__ not in unlike and suits(module):
                setattr(module, method, MethodType(ours, module))
    if "rotary" in fused:
        for file in {type(module).__module__ for module in model.modules()}:
            _patch_rotary(file, unlike)


# --- modules ---------------------------------------------------------------------------------------------------------


def _is_rms_norm(module: Any) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    normed: Tensor = op("rms_norm")(x, module.weight, module.variance_epsilon)
    return normed


def _is_swiglu(module: Any) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(hasattr(module, part) for part in parts) and isinstance(module.act_fn, (nn.SiLU, type(ACT2FN["silu"])))


def _swiglu(module: Any, x: Tensor) -> Tensor:
    out: Tensor = module.down_proj(op("swiglu")(module.gate_proj(x), module.up_proj(x)))
    return out


def _has_odd_width(module: Any) -> bool:
    """Whether a gated MLP has an odd inner width and no adapters; the products of other widths are fast already."""
    parts = ("gate_proj", "up_proj", "down_proj")
    return (
        _is_swiglu(module)
        and all(type(getattr(module, part)) is nn.Linear for part in parts)
        and module.gate_proj.out_features % 8 > 0
    )


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    gate, up, down = ((part.weight, part.bias) for part in (module.gate_proj, module.up_proj, module.down_proj))
    out: Tensor = op("gated_mlp")(x, gate, up, down)
    return out


def _is_patch_embed(module: Any) -> bool:
    proj = getattr(module, "proj", None)
    return isinstance(proj, nn.Conv3d) and proj.kernel_size == proj.stride


def _patch_embed(module: Any, patches: Tensor) -> Tensor:
    proj = module.proj
    flat = patches.reshape(-1, proj.weight[0].numel()).to(proj.weight.dtype)
    embedded: Tensor = op("patch_embed")(flat, proj.weight, proj.bias)
    return embedded


def _adds_deep_features(module: Any) -> bool:
    return hasattr(module, "_deepstack_process")


def _add_deep_features(module: Any, x_BTH: Tensor, mask_BT: Tensor, rows_NH: Tensor) -> Tensor:
    added: Tensor = op("add_at")(x_BTH, mask_BT, rows_NH.to(x_BTH.dtype))
    return added


_METHODS: tuple[tuple[str, Callable[[Any], bool], str, Callable[..., Tensor]], ...] = (
    ("rms_norm", _is_rms_norm, "forward", _rms_norm),
    ("swiglu", _is_swiglu, "forward", _swiglu),
    ("gated_mlp", _has_odd_width, "forward", _gated_mlp),
    ("patch_embed", _is_patch_embed, "forward", _patch_embed),
    ("add_at", _adds_deep_features, "_deepstack_process", _add_deep_features),
)
"""Replacements: (op, test whether a module computes it, name of the method, new method)."""

# --- rotary embedding ------------------------------------------------------------------------------------------------


def _patch_rotary(file: str, unlike: Collection[str]) -> None:
    """Replaces the functions of one of transformers' files that apply the embedding.

    Long attention forwards, which differ from release to release, call them by name, so the name is the stable place to
    replace. Other models of the file call them as well: tensors on a CPU, and calls for which only the reference is
    active, are passed to transformers' own function.
    """
    if file in _patched_files:
        return
    module = sys.modules[file]
    for name, rotate in _ROTATIONS.items():
        if hasattr(module, name) and name not in unlike:
            setattr(module, name, _dispatching(getattr(module, name), rotate))
    _patched_files.add(file)


def _dispatching(original: Callable[..., Any], rotate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *sections: Sequence[int], **more: Any) -> Any:
        if more or q.device.type == "cpu" or op("rotary") is reference.rotary:
            return original(q, k, cos, sin, *sections, **more)
        return rotate(q, cos, sin, *sections), rotate(k, cos, sin, *sections)

    return apply


def _rotate_text(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotates heads of the text without copies: heads still follow tokens in memory, as packed attention needs them."""
    rotated_BTHD: Tensor = op("rotary")(x_BHTD.transpose(1, 2), cos_BTD, sin_BTD)
    return rotated_BTHD.transpose(1, 2)


def _rotate_by_sections(x_BHTD: Tensor, cos_3BTD: Tensor, sin_3BTD: Tensor, sections: Sequence[int]) -> Tensor:
    """Rotates each section of the width by time, height or width; transformers 5.24 selects them before its layers."""
    return _rotate_text(x_BHTD, _by_sections(cos_3BTD, sections), _by_sections(sin_3BTD, sections))


def _by_sections(turn_3BTD: Tensor, sections: Sequence[int]) -> Tensor:
    parts = torch.split(turn_3BTD, [*sections, *sections], dim=-1)
    return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)


def _rotate_vision(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotates heads of a tower in float32, as transformers does."""
    rotated_1THD: Tensor = op("rotary")(x_THD[None], cos_TD[None].float(), sin_TD[None].float())
    return rotated_1THD[0]


_ROTATIONS: dict[str, Callable[..., Tensor]] = {
    "apply_rotary_pos_emb": _rotate_text,
    "apply_multimodal_rotary_pos_emb": _rotate_by_sections,  # the text of Qwen2.5-VL in transformers 5.10
    "apply_rotary_pos_emb_vision": _rotate_vision,
}
"""Functions of transformers' files, and the equivalent for one tensor."""
