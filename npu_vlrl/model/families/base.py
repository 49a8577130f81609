"""The facts that a family of models states; nothing else in the project depends on the family.

Loading, policy, sharding, FLOPs, estimates, rendering, tools and exports ask a `Family`. Facts are names and numbers,
so this room needs neither torch nor transformers. The defaults are those of a text-only model that speaks ChatML, and
of the tower that Qwen2-VL introduced (arXiv 2409.12191).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Grid = tuple[int, int, int]
"""Patches of an image: time, or the number of tiles; rows; columns."""


@dataclass(frozen=True)
class ChatFormat:
    """The control tokens of a conversation, by their text.

    Example: a turn of GLM-4.1V ends by the token that begins the next one, so `closing` is empty, and `<|user|>` is in
    `end_of_turn`.
    """

    title: str = "Qwen"
    """Name of the models with these tokens, for messages."""
    end_of_turn: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    """Tokens that end a turn when sampled. The tokenizer must have the first one, and scripted turns end with it."""
    closing: str = "<|im_end|>"
    """The text that the chat template writes behind each turn."""
    spoken_ends: frozenset[str] = frozenset()
    """The ends of a turn that belong to the answer, such as `</answer>`."""
    image: str = "<|image_pad|>"
    """Placeholder of an image token; the template writes one for each image."""
    video: str = "<|video_pad|>"
    image_start: str = "<|vision_start|>"
    image_end: str = "<|vision_end|>"
    frames_images: bool = False
    """Whether `image_start` and `image_end` are written with the placeholders, instead of by the template."""
    tool_calls: str = "hermes"
    """The form of a tool call: a key of `workflow.tools.forms.FORMS`."""


CHATML = ChatFormat()


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a vision tower that count its operations and its memory."""

    hidden: int
    heads: int
    inner: int
    """Width inside the MLP of a block."""
    full: int
    """Number of blocks in which a patch sees the whole image; in the others it sees a window."""
    merge: int
    """Patches of a token along each side."""
    window: int = 0
    """Patches along a side of a window."""
    class_tokens: int = 0
    """Tokens beside the patches of each tile, which take part in all blocks."""
    deep: int = 0
    """Features of a token beside the one that replaces its placeholder."""
    smallest: Grid = (1, 1, 1)
    """The smallest image that the tower takes."""


@dataclass(frozen=True)
class VisionFacts:
    """Facts about the vision of a family. Names of modules are relative to the model with its head."""

    roots: tuple[str, ...] = ("model.visual",)
    """Modules that `model.freeze_vision` freezes: the tower, and its projector where that is outside of it."""
    blocks: str = "model.visual.blocks"
    patches: str = "model.visual.patch_embed.proj"
    """The convolution whose kernel is a patch."""
    mergers: tuple[str, ...] = ("model.visual.merger",)
    """Modules between blocks and language model; their matrices meet each token once."""
    gated: bool = True
    """Whether MLPs of blocks are gated and norms are RMSNorms; otherwise MLPs have two products, and norms are
    LayerNorms."""
    token_side: int = 28
    """Pixels along the side of a token, in published models."""
    position_scale: int | None = None
    """Coordinate of the right and the lower border of any image; None: coordinates are pixels of the resized image."""
    positions: str = "grid"
    """Rotary positions of image tokens. `grid`: by time, row and column (M-RoPE, arXiv 2409.12191, section 2.1);
    `line`: counted like text."""
    image_processors: tuple[str, ...] = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
    """Classes of transformers, without the name of a backend, that a folder of the family may name."""
    fast_images: bool = False
    """Whether `data.processor` computes the same bits as these classes, and replaces them. Otherwise they are called,
    with Pillow's backend.
    """
    image_options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the call of the image processor."""
    tower_keys: Mapping[str, str] = field(
        default_factory=lambda: {
            "patch_size": "patch_size",
            "merge_size": "spatial_merge_size",
            "temporal_patch_size": "temporal_patch_size",
        }
    )
    """Settings of the image processor, with the keys of `vision_config` that must have the same value."""
    width_key: str | None = "out_hidden_size"
    """Key of `vision_config` whose value must be the hidden width of the language model."""
    token_ids: Mapping[str, str] = field(
        default_factory=lambda: {
            "image_token_id": "image",
            "video_token_id": "video",
            "vision_start_token_id": "image_start",
            "vision_end_token_id": "image_end",
        }
    )
    """Keys of config.json, with the fields of `ChatFormat` whose ids they are."""


@dataclass(frozen=True)
class MixtureFacts:
    """Facts about a mixture of experts. Names of modules are relative to a layer of the language model; a layer without
    them is dense.
    """

    router: str = "mlp.gate"
    """Returns the scores of the experts [T, E], and the weights and the numbers of the chosen ones, [T, k] each."""
    experts: str = "mlp.experts"
    """The first dimension of its parameters counts experts."""
    chosen_key: str = "num_experts_per_tok"
    """The key of the language model's configuration that holds k."""
    transposed: bool = True
    """Whether published files hold the matrices of experts as [E, in, out], and transformers as [E, out, in]."""
    width_key: str = "moe_intermediate_size"
    """The key that holds the width inside an expert."""


class Family:
    """One family of models. A file of this room defines it, as `FAMILY`; see `docs/models.md`."""

    title: str
    """Name for messages, e.g. `Qwen2.5-VL`."""
    model_type: str
    """Name of the family in transformers and in config.json."""
    model_class: str
    """Name of transformers' class of the model with its head."""
    chat: ChatFormat = CHATML
    vision: VisionFacts | None = None
    """Facts about vision; None for a text-only model."""
    mixture: MixtureFacts | None = None
    """Facts about the mixture of experts; None where every layer is dense."""
    text: str = "model"
    """The language model without its head, as a module of the model with its head; it has `layers`."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Layers of the language model that get an adapter where the configuration names none."""
    unlike: frozenset[str] = frozenset()
    """Names of transformers' classes and functions that resemble those that kernels replace, but compute otherwise."""

    vllm: bool = False
    """Whether sampling with vLLM was compared with the learner."""
    published: tuple[tuple[str, str], ...] = ()
    """Prefixes of weight names in published files, and in transformers' modules."""
    megatron: bool = False
    """Whether Megatron-core's names of its weights are known."""

    def problem(self, settings: Any) -> str | None:
        """Reason for which a model with this configuration is not supported, or None."""
        return None

    def tower_shape(self, settings: Any) -> TowerShape:
        """Sizes of the tower with the `vision_config` of a model."""
        return TowerShape(
            settings.hidden_size,
            settings.num_heads,
            settings.intermediate_size,
            full=settings.depth,
            merge=settings.spatial_merge_size,
            smallest=(1, settings.spatial_merge_size, settings.spatial_merge_size),
        )

    def tower_inputs(self, patches_PD: Tensor, grids_N3: Tensor) -> dict[str, Any]:
        """Arguments of transformers' `get_image_features` for the patches of several images, one after the other."""
        return {"pixel_values": patches_PD, "image_grid_thw": grids_N3}

    def image_sizes(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `ImageProcessor`, where transformers' processor is called, from preprocessor_config.json and
        config.json.
        """
        size = {"shortest_edge": settings.get("min_pixels"), "longest_edge": settings.get("max_pixels")}
        size |= settings.get("size") or {}
        names = ("patch_size", "merge_size", "temporal_patch_size")
        return {name: settings[name] for name in names} | {
            "min_pixels": size["shortest_edge"],
            "max_pixels": size["longest_edge"],
        }

    def image_limits(self, min_pixels: int, max_pixels: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Options of transformers' processor for an image of at least and at most so many pixels. `settings`:
        preprocessor_config.json.
        """
        return {"size": {"shortest_edge": min_pixels, "longest_edge": max_pixels}}

    def read_pixels(self, output: Mapping[str, Any], patch_size: int) -> tuple[Tensor, Grid]:
        """The patches [P, D] and the grid of one image, from the output of transformers' image processor."""
        time, rows, columns = output["image_grid_thw"][0].tolist()
        return output["pixel_values"], (time, rows, columns)

    deep_features: str | None = None
    """The field of the tower's output that holds features for later layers."""

    def deep_inputs(self, seen_T: Tensor, rows: list[Tensor]) -> dict[str, Any]:
        """Arguments of the language model for features of later layers: [n, hidden] each, at the places of `seen_T`."""
        raise NotImplementedError(f"{self.title} has no features for later layers")

    def inner_width(self, settings: Any) -> int:
        """Width inside the MLP of a layer that a token meets, by the configuration of the language model: that of its
        experts together.
        """
        if self.mixture is None:
            return int(settings.intermediate_size)
        return int(getattr(settings, self.mixture.chosen_key) * getattr(settings, self.mixture.width_key))

    def expert_weights(self, scores_TE: Tensor, chosen_Tk: Tensor) -> Tensor:
        """The weights [T, k] of chosen experts, by the scores of a router. Here a softmax over all experts, of which
        the chosen ones share one (`norm_topk_prob` of Qwen3-MoE).
        """
        weights_Tk = scores_TE.float().softmax(-1).gather(1, chosen_Tk)
        return weights_Tk / weights_Tk.sum(1, keepdim=True)

    # --- a model of random weights, for tests and first runs ---

    tiny_special: tuple[str, ...]
    """Special tokens of the tiny model's tokenizer; the first one pads."""
    tiny_template: str
    """Chat template of the tiny model."""

    def tiny_config(self, ids: Mapping[str, int], rows: int, hidden: int, layers: int) -> dict[str, Any]:
        """Arguments of transformers' configuration class. `ids` are the tokenizer's, `rows` those of the embedding."""
        raise NotImplementedError

    def tiny_ids(self, ids: Mapping[str, int]) -> dict[str, int]:
        """Ids of placeholders, by their keys in config.json."""
        assert self.vision is not None
        return {key: ids[getattr(self.chat, name)] for key, name in self.vision.token_ids.items()}

    def tiny_images(self) -> dict[str, Any] | None:
        """Content of preprocessor_config.json; None for a text-only model."""
        return None
