"""The peer: the same model as transformers has it, and its generate.

Nothing of ours is in it: attention is sdpa, and no op of the table is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.setup import Model, forget, model
from npu_vlrl import kernels
from npu_vlrl.hardware import Platform
from npu_vlrl.types import ImageInput


@contextmanager
def as_installed(size: str, on: Platform, dtype: torch.dtype, checkpointing: bool = False) -> Iterator[Model]:
    """The same model as transformers has it, with sdpa and without any op of ours, which are set aside meanwhile."""
    forget(on)  # a model that was used before refers to itself, and so still holds its memory
    kernels.use("reference")
    try:
        made = model(size, on.device(), dtype, checkpointing=checkpointing)
        for module in made.policy.base.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation"):
                module.config._attn_implementation = "sdpa"
        yield made
    finally:
        kernels.use(on.kernels)


class Work:
    """Counts what goes through the layers of a transformers model: pictures, and tokens with their padding."""

    def __init__(self, built: Any) -> None:
        self.images = 0
        self.prefilled = 0
        self.decoded = 0
        """Tokens that come alone, one of each row."""
        self.trained = 0
        """Tokens of passes with a graph."""
        built.model.visual.register_forward_pre_hook(self._see, with_kwargs=True)
        built.model.language_model.register_forward_pre_hook(self._read, with_kwargs=True)

    def _see(self, _: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        self.images += len(named["grid_thw"])

    def _read(self, _: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        rows, tokens = named["inputs_embeds"].shape[:2]
        if torch.is_grad_enabled():
            self.trained += rows * tokens
        elif tokens > 1:
            self.prefilled += rows * tokens
        else:
            self.decoded += rows


def generate(made: Model, contexts: Sequence[tuple[Sequence[int], Sequence[ImageInput]]], new: int) -> list[list[int]]:
    """`new` tokens for each context (ids, pictures), by transformers: padded on the left, every picture encoded."""
    special, device = made.policy.special, made.policy.device
    longest = max(len(ids) for ids, _ in contexts)
    ids_BT = torch.full((len(contexts), longest), special.end_of_turn[-1])
    mask_BT = torch.zeros_like(ids_BT)
    for row, (ids, _) in enumerate(contexts):
        ids_BT[row, longest - len(ids) :] = torch.tensor(ids)
        mask_BT[row, longest - len(ids) :] = 1
    images = [image for _, own in contexts for image in own]
    given: dict[str, Tensor] = {"input_ids": ids_BT, "attention_mask": mask_BT}
    if images:
        given["pixel_values"] = torch.cat([made.processor.patches(image) for image in images])
        given["image_grid_thw"] = torch.tensor([image.grid for image in images])
        given["mm_token_type_ids"] = torch.eq(ids_BT, special.image or -1).long()
    out_BT = made.policy.base.eval().generate(
        **{name: tensor.to(device) for name, tensor in given.items()},
        do_sample=True,
        top_k=0,
        max_new_tokens=new,
        min_new_tokens=new,
        suppress_tokens=sorted(special.placeholders),
        eos_token_id=list(special.end_of_turn),
        pad_token_id=special.end_of_turn[-1],
    )
    assert out_BT.shape[1] == longest + new, "nothing may end a row earlier"
    return out_BT[:, longest:].tolist()
