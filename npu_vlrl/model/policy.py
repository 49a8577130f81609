"""One view of every supported transformers model: encode images, embed tokens, run the layers, score tokens.

The engine and the learner both go through this class, so they cannot disagree about positions, masks or features.
Positions and masks are always explicit; nothing of the model's own decoding state (`rope_deltas`) is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from npu_vlrl.kernels.tree import Tree
from npu_vlrl.types import SpecialTokens


class Policy:
    """Wraps a transformers Qwen-VL or Qwen text model, plain or with peft adapters.

    `features` of an image are [n_tokens, hidden * (1 + deep)]: what replaces its placeholders, and behind it what
    Qwen3-VL adds to the hidden states after its first layers.
    """

    def __init__(self, model: Any, special: SpecialTokens, n_tokens: int, merge_size: int) -> None:
        """`n_tokens` is the size of the tokenizer: rows of the head beyond it are padding and never sampled."""
        self.model = model
        self.special = special
        self.n_tokens = n_tokens
        self.merge_size = merge_size
        # transformers and peft types say little about attributes, hence Any
        self.base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.core: Any = self.base.model
        self.text: Any = getattr(self.core, "language_model", self.core)
        self.vision: Any = getattr(self.core, "visual", None)
        """None for a text-only model."""
        self._cache_name = "cache" if "cache" in inspect.signature(self.text.forward).parameters else "past_key_values"
        head = self.head_weight
        forbidden = torch.zeros(head.shape[0], dtype=torch.bool)
        forbidden[sorted(special.placeholders)] = True
        forbidden[n_tokens:] = True
        self.forbidden_V = forbidden.to(head.device)

    @property
    def head_weight(self) -> Tensor:
        """[V, hidden]"""
        return self.base.lm_head.weight

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def vision_is_frozen(self) -> bool:
        return self.vision is None or not any(p.requires_grad for p in self.vision.parameters())

    def encode(self, patches_PD: Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Features of each image. `patches_PD` holds the patches of all images, one after the other."""
        assert self.vision is not None, "a text-only model cannot encode images"
        output = self.core.get_image_features(
            patches_PD.to(self.device), torch.tensor(grids, device=self.device), return_dict=True
        )
        images = output.pooler_output
        lengths = [len(image) for image in images]
        # one tensor of all images in some releases of transformers, cut into images in others
        deep = getattr(output, "deepstack_features", None) or ()
        deep = [part.split(lengths) if isinstance(part, Tensor) else part for part in deep]
        return [torch.cat(parts, dim=-1) for parts in zip(images, *deep, strict=True)]

    def hidden_packed(
        self, token_ids_T: Tensor, positions_3T: Tensor, tree: Tree, features: Sequence[Tensor]
    ) -> Tensor:
        """Hidden states [T, hidden] of packed sequences; attention stays inside each of them."""
        return self._forward(token_ids_T[None], positions_3T[:, None], features, None, None, {"tree": tree})[0]

    def hidden_cached(
        self,
        token_ids_BQ: Tensor,
        positions_3BQ: Tensor,
        features: Sequence[Tensor],
        mask_BQK: Tensor,
        cache: DynamicCache,
    ) -> Tensor:
        """Hidden states [B, Q, hidden] of tokens that continue `cache`, which grows by them.

        `mask_BQK` is True where a query may attend.
        """
        return self._forward(token_ids_BQ, positions_3BQ, features, mask_BQK[:, None], cache, {})

    def _forward(
        self,
        token_ids_BT: Tensor,
        positions_3BT: Tensor,
        features: Sequence[Tensor],
        mask: Tensor | None,
        cache: DynamicCache | None,
        packing: dict[str, Tree],
    ) -> Tensor:
        embeds = self.base.get_input_embeddings()(token_ids_BT)
        extra: dict[str, Any] = dict(packing)
        if features:
            hidden = embeds.shape[-1]
            seen = torch.eq(token_ids_BT, self.special.image or -1)
            slots = seen.flatten().nonzero()[:, 0]
            rows = torch.cat(list(features)).to(embeds.dtype)
            if len(rows) != len(slots):
                raise ValueError(f"{len(slots)} image placeholder tokens, but features of {len(rows)}")
            # index_copy, not a boolean mask: boolean index_put is unsafe on some accelerators
            embeds = embeds.flatten(0, 1).index_copy(0, slots, rows[:, :hidden]).view_as(embeds)
            if rows.shape[1] > hidden:
                extra["visual_pos_masks"] = seen
                extra["deepstack_visual_embeds"] = list(rows[:, hidden:].split(hidden, dim=1))
        positions = positions_3BT if self.vision is not None else positions_3BT[0]
        output = self.text(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=mask,
            use_cache=cache is not None,
            **{self._cache_name: cache},
            **extra,
        )
        return output.last_hidden_state

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The model as it was before LoRA: the KL reference of an adapter run costs no copy."""
        with self.model.disable_adapter():
            yield

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.model, "disable_adapter") and hasattr(self.model, "peft_config")

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}
