"""One view of every supported transformers model: encode images, embed tokens, run the layers, score tokens.

The engine and the learner both go through this class, so they cannot disagree about positions, masks or features.
Positions and masks are always explicit; nothing of the model's own decoding state (`rope_deltas`) is used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from npu_vlrl.kernels.kv_cache import KVCache
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.model.families import FAMILIES, Family
from npu_vlrl.model.positions import rotary_positions
from npu_vlrl.model.routing import Routing, expert_layers
from npu_vlrl.model.tower import Tower
from npu_vlrl.model.versions import image_features
from npu_vlrl.types import ImageInput, SpecialTokens


class Policy:
    """Wraps a transformers model of a known family, plain or with peft adapters.

    `features` of an image are [n_tokens, hidden * (1 + deep)]: the embeddings of its placeholders, followed by those
    that some families add to the hidden states after their first layers.
    """

    def __init__(self, model: Any, special: SpecialTokens, n_tokens: int, merge_size: int) -> None:
        """`n_tokens` is the size of the tokenizer: rows of the head beyond it are padding and never sampled."""
        self.model = model
        self.special = special
        self.n_tokens = n_tokens
        self.merge_size = merge_size
        # the types of transformers and peft lack most attributes, hence Any
        self.base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.core: Any = self.base.model
        self.family: Family = FAMILIES[self.base.config.model_type]
        self.text: Any = self.base.get_submodule(self.family.text)
        facts = self.family.vision
        self.vision = None if facts is None else Tower(self.base, self.family, facts)
        """The vision tower; None for a text-only model."""
        self.mixtures = expert_layers(self.base, self.family)
        """Mixtures of experts, in the order of their layers; none in a dense model."""
        head = self.head_weight
        self.forbidden = sorted(special.placeholders.union(range(n_tokens, head.shape[0])))
        """Ids that are never sampled."""
        forbidden = torch.zeros(head.shape[0], dtype=torch.bool)
        forbidden[self.forbidden] = True
        self.forbidden_V = forbidden.to(head.device)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, [V, hidden]."""
        weight: Tensor = self.base.lm_head.weight
        return weight

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.forbidden_V.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the layers compute."""
        return self.head_weight.dtype

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers, key heads and their width."""
        config = self.text.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers, config.num_key_value_heads, width

    @property
    def routes_shape(self) -> tuple[int, int] | None:
        """L and k of a token's routes, see `Routing`; None for a dense model."""
        mixture = self.family.mixture
        if mixture is None or not self.mixtures:
            return None
        return len(self.mixtures), getattr(self.text.config, mixture.chosen_key)

    def shares_met(self) -> Iterator[tuple[nn.Parameter, float]]:
        """Each parameter of the layers, with the share of it that a token meets: k of E experts, else 1."""
        mixture = self.family.mixture
        for name, parameter in self.text.layers.named_parameters():
            if mixture is not None and f".{mixture.experts}." in name:
                yield parameter, getattr(self.text.config, mixture.chosen_key) / parameter.shape[0]
            else:
                yield parameter, 1.0

    @property
    def vision_is_frozen(self) -> bool:
        return self.vision is None or self.vision.is_frozen

    def positions(self, token_ids: Sequence[int] | np.ndarray, images: Sequence[ImageInput]) -> np.ndarray:
        """Rotary positions int64 [3, T] of one sequence, see `rotary_positions`."""
        on_grid = self.family.vision is not None and self.family.vision.positions == "grid"
        return rotary_positions(token_ids, images, self.special.image, self.merge_size, on_grid)

    def encode(self, patches_PD: Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Features of each image. `patches_PD` holds the patches of all images, one after the other."""
        assert self.vision is not None, "a text-only model cannot encode images"
        return image_features(self.core, self.family, patches_PD.to(self.device), grids)

    def hidden_packed(
        self,
        token_ids_T: Tensor,
        positions_3T: Tensor,
        tree: Tree,
        features: Sequence[Tensor],
        routing: Routing | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] of packed sequences; attention stays inside each of them."""
        return self._forward(token_ids_T, positions_3T, features, tree=tree, routing=routing)

    def hidden_continued(
        self,
        token_ids_T: Tensor,
        positions_3T: Tensor,
        kept: KVCache,
        features: Sequence[Tensor],
        routing: Routing | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] of packed tokens that continue rows of the KV cache, to which they are added."""
        return self._forward(token_ids_T, positions_3T, features, kept=kept, routing=routing)

    def _forward(
        self,
        token_ids_T: Tensor,
        positions_3T: Tensor,
        features: Sequence[Tensor],
        **options: Tree | KVCache | Routing | None,
    ) -> Tensor:
        embeds_TH = self.base.get_input_embeddings()(token_ids_T)
        extra: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if features:
            hidden = embeds_TH.shape[-1]
            seen_T = torch.eq(token_ids_T, self.special.image or -1)
            slots = seen_T.nonzero()[:, 0]
            rows = torch.cat(list(features)).to(embeds_TH.dtype)
            if len(rows) != len(slots):
                raise ValueError(f"{len(slots)} image placeholder tokens, but features of {len(rows)}")
            # index_copy, not a boolean mask: boolean index_put is unsafe on some accelerators
            embeds_TH = embeds_TH.index_copy(0, slots, rows[:, :hidden])
            if rows.shape[1] > hidden:
                extra |= self.family.deep_inputs(seen_T, list(torch.split(rows[:, hidden:], hidden, dim=1)))
        facts = self.family.vision
        positions = positions_3T[:, None] if facts is not None and facts.positions == "grid" else positions_3T[:1]
        output = self.text(inputs_embeds=embeds_TH[None], position_ids=positions, use_cache=False, **extra)
        hidden_1TH: Tensor = output.last_hidden_state
        return hidden_1TH[0]

    tower_is_divided = False
    """Whether the ranks that compute an update must all run the tower as soon as one does."""

    def gathered(self, work: Callable[[], Tensor]) -> Tensor:
        """Runs work that goes through the model. Its head may be read until `divide`, and gradients flow through it."""
        return work()

    def divide(self) -> None:
        """Reshards the weights that `gathered` gathered; does nothing for a full policy."""

    def copy(self) -> Policy:
        """Copies the policy with its weights; both share a frozen tower."""
        shared = {id(root): root for root in self.vision.roots} if self.vision and self.vision.is_frozen else {}
        return Policy(copy.deepcopy(self.model, shared), self.special, self.n_tokens, self.merge_size)

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
