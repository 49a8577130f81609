"""Estimates the device memory of an update and of a rollout, item by item.

The memory of an update is simulated: in the forward pass each part of the model (blocks of the tower, embedding,
layers, head) saves activations for its backward pass; in the backward pass, part by part from the end, they are freed
and the gradients of the part's weights are allocated. The peak is the maximum over these moments. The saved activations
are counted from a part's definition, as the fused implementations of the platforms compute it.

Letters as in the kernels: T tokens, N scored ones, P patches; H hidden width, I inner width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from npu_vlrl.model.policy import Policy
from npu_vlrl.model.tower import Tower
from npu_vlrl.types import ImageInput

Parts = Mapping[str, float]
"""Bytes by purpose."""

LIBRARIES = 1.0e9
"""Bytes that the driver's context and the libraries' workspaces take. PyTorch's allocator does not count them."""

LOGIT_COPIES = 18
"""Bytes of each logit while tokens are drawn: the product in 16 bits, and four steps of float32."""

KEPT, ENGINE_COPY = "keys and values between turns", "engine's copy"

GRADIENT_OF_LOGITS = 2**27
"""Bytes of the logits' gradient that exist at a time in the fused backward pass."""


@dataclass(frozen=True)
class Pass:
    """Work of the model in one micro-batch."""

    tokens: int
    """Distinct tokens that pass the layers."""
    path: int
    """Number of gathered keys: for each run of tokens, all keys that its last token sees."""
    pairs: int
    """Number of pairs of a token and one that it sees."""
    scored: int
    images: Sequence[ImageInput] = ()
    """Distinct images."""

    @property
    def patches(self) -> int:
        return sum(image.grid[0] * image.grid[1] * image.grid[2] for image in self.images)


@dataclass(frozen=True)
class Rollout:
    """Load of an engine at the fullest moment of a step."""

    rows: int
    """Number of turns that are decoded together."""
    room: int
    """Number of tokens for which each of them has room."""
    kept: int = 0
    """Tokens whose KV cache is kept when the last turn has ended, of all episodes together."""
    kept_before: int = 0
    """Tokens whose KV cache is kept before the last turn; it is freed when that turn has ended."""
    prefill: int = 0
    """Number of tokens that are prefilled together."""
    patches: int = 0
    """Number of patches that pass the tower together."""
    image_tokens: int = 0
    """Tokens of all distinct images of a step."""


@dataclass(frozen=True)
class Plan:
    """Distribution of the work over processes."""

    learners: int = 1
    """Number of learners; 0: the process only samples."""
    shard: bool = False
    offload: bool = False
    reference: bool = False
    """Whether KL is measured against a separate policy; that of an adapter needs no copy."""
    separate_critic: bool = False
    feature_bytes: int = 0
    cache_bytes: int = 2**34
    vllm: bool = False
    """Whether the engine is vLLM: it allocates its whole KV cache, and beside a learner has its own weights."""
    sleep: bool = False
    """Whether vLLM beside a learner frees its memory while the learner computes."""
    split: int = 1
    """Number of devices over which a process that only samples splits the model."""


@dataclass(frozen=True)
class Moment:
    """Memory at one moment of an update or a rollout."""

    name: str
    parts: Parts

    @property
    def total(self) -> float:
        """Sum of the parts in bytes, as PyTorch's allocator counts them."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Part:
    """A block of the tower, a layer, or the head, in one micro-batch; numbers are bytes."""

    kind: str
    saved: float
    """Activations that the forward pass saves for the backward pass."""
    working: float
    """Additional memory of the backward pass: recomputed activations, and gradients of activations."""
    gradient: float
    """Gradient of the trained weights."""


@dataclass
class MemoryModel:
    """Computes the bytes that a policy's weights and passes take."""

    policy: Policy
    plan: Plan = field(default_factory=Plan)

    def __post_init__(self) -> None:
        self._item = self.policy.dtype.itemsize
        self._settings: Any = self.policy.text.config
        self._ranks = self.plan.learners if self.plan.shard else 1
        self._embedding: Tensor = self.policy.base.get_input_embeddings().weight
        head = self.policy.head_weight
        self._tied = head is self._embedding

    # --- what is always there ---

    def base(self) -> dict[str, float]:
        """Bytes of the weights, and of the optimiser's state from its first step on."""
        plan, policy = self.plan, self.policy
        trained, tower = list(policy.trainable().values()), _parameters(policy.vision)
        everything = _bytes(policy.model.parameters())
        if not plan.learners:
            return {"weights": everything / plan.split}
        parts = {"weights": everything}
        if plan.shard:  # beside the whole policy, which engines read, its part of the one that learns
            frozen = [p for p in policy.model.parameters() if not p.requires_grad]
            shared = {id(p) for p in tower if not p.requires_grad}
            parts["weights of the divided policy"] = _bytes(p for p in frozen if id(p) not in shared) / self._ranks
            # what is gathered for a whole micro-batch, and two layers: one computes, the next is fetched
            root = _bytes([self._embedding] if self._tied else [self._embedding, policy.head_weight])
            parts["gathered weights"] = root + 2 * _bytes(policy.text.layers[0].parameters())
        on_device = 0.0 if plan.offload else 1 / self._ranks
        counts = _count(trained)
        narrow = _count(p for p in trained if p.dtype.itemsize < 4)
        if plan.shard:  # rows in float32 are the weights that learn
            parts["masters"] = 4.0 * counts * on_device
        else:
            parts["masters"] = 4.0 * narrow
        parts["moments"] = 8.0 * counts * on_device
        own_tower = [p for p in tower if p.requires_grad]
        copied = everything - (0.0 if own_tower else _bytes(tower))
        if plan.reference and not policy.has_adapter:
            parts["reference"] = copied / self._ranks
        if plan.separate_critic:
            parts["critic"] = copied / (self._ranks if plan.shard else 1) + 16.0 * counts * on_device
        if plan.vllm:
            parts[ENGINE_COPY] = everything
        return {name: size for name, size in parts.items() if size}

    # --- an update ---

    def update(self, passes: Sequence[Pass], resident: Parts | None = None) -> Moment:
        """The fullest moment of an update of these micro-batches, in their order. `resident`: other memory in use."""
        base = self.base() | dict(resident or {})
        if self.plan.sleep:
            base.pop(ENGINE_COPY, None)
        fullest = Moment("before the update", base)
        for number, one in enumerate(passes):
            if number > 1 and one is passes[number - 1]:
                continue
            parts = self._parts(one)
            # a critic of its own comes after the policy's backward pass
            complete = sum(part.gradient for part in parts) if number or self.plan.separate_critic else 0.0
            fresh = 0.0
            for index in reversed(range(len(parts))):
                part = parts[index]
                fresh += part.gradient
                alive = _by_kind(parts[: index + 1])
                alive[part.kind] = alive.get(part.kind, 0.0) + part.working
                waiting = self._waiting_gradient() if any(p.kind == "embedding" for p in parts[:index]) else 0.0
                alive["gradients"] = (complete or fresh) + waiting
                moment = Moment(f"update, in {part.kind}", base | alive)
                fullest = max(fullest, moment, key=lambda found: found.total)
        return fullest

    def _parts(self, one: Pass) -> list[_Part]:
        policy = self.policy
        parts = []
        if policy.vision is not None and not policy.vision_is_frozen and one.patches:
            parts += self._tower(one.patches)
        if self._embedding.requires_grad:
            whole = float(self._embedding.numel() * self._item)
            parts.append(_Part("embedding", 0.0, whole, 4.0 * self._embedding.numel() * self._kept_gradients))
        saved, working = self.saved_by_layer(one), self._layer_backward(one)
        for layer in policy.text.layers:
            parts.append(self._part("layers", layer, saved, working, one.tokens * self._hidden * self._item))
        parts.append(self._head(one))
        return parts

    def _part(self, kind: str, module: nn.Module, saved: float, working: float, entry: float) -> _Part:
        if getattr(module, "gradient_checkpointing", False):
            saved, working = entry, saved + working
        trained = [p for p in module.parameters() if p.requires_grad]
        gradient = 4.0 * _count(trained)
        if self.plan.shard:  # whole ones exist until they are added up over the ranks
            working += (4.0 + self._item) * _count(trained)
        return _Part(kind, saved, working, gradient * self._kept_gradients)

    @property
    def _kept_gradients(self) -> float:
        return 0.0 if self.plan.offload else 1 / self._ranks

    @property
    def _hidden(self) -> int:
        hidden: int = self._settings.hidden_size
        return hidden

    @property
    def _inner(self) -> int:
        return self.policy.family.inner_width(self._settings)

    @property
    def _entering(self) -> int:
        """Numbers of a token that enter the MLP of a layer: a copy of it for each of its experts."""
        return self._hidden * (self.policy.routes_shape or (0, 1))[1]

    def saved_by_layer(self, one: Pass) -> float:
        """Bytes that a decoder layer leaves behind for its backward pass.

        Both norms keep their input and give theirs to products, which keep it for the weight or the adapter that is
        trained. Attention keeps rotated queries and keys, values, its output, and a float32 a head; norms of queries
        and keys keep what they were given. SwiGLU keeps both of its inputs, and the last product the result. An adapter
        keeps its narrow middle.
        """
        hidden, inner, (_, key_heads, width) = self._hidden, self._inner, self.policy.kv_shape
        heads: int = self._settings.num_attention_heads
        layer = self.policy.text.layers[0]
        elements: int = 4 * hidden + 2 * heads * width + 3 * inner
        if hasattr(layer.self_attn, "q_norm"):
            elements += (heads + key_heads) * width
        elements += sum(next(iter(module.r.values())) for module in layer.modules() if hasattr(module, "lora_A"))
        keys = 2 * key_heads * width * self._item
        routing = 0.0 if self.policy.routes_shape is None else self._saved_by_routing(one.tokens)
        return one.tokens * (elements * self._item + 4 * heads) + one.path * keys + routing

    def _saved_by_routing(self, tokens: int) -> float:
        """Bytes that a layer of experts leaves behind beyond those of a dense layer with the same inner width.

        transformers' grouped products keep the gate's activation and the output of each expert for a token. Trained
        experts keep their copies of the tokens; frozen ones keep less than a dense layer. The router keeps the
        probabilities of all experts in float32, and the weights, order and numbers of the chosen ones.
        """
        parameter, share = min(self.policy.shares_met(), key=lambda met: met[1])
        experts, chosen = parameter.shape[0], round(parameter.shape[0] * share)
        elements = self._inner + self._entering
        elements += self._entering if parameter.requires_grad else -self._inner - self._hidden
        router = 4 * (experts + 1) + chosen * (4 + 4 * 8 + self._item)
        return tokens * (elements * self._item + router) + 4 * experts

    def _layer_backward(self, one: Pass) -> float:
        """Gradients of a layer's activations. Those of SwiGLU's inputs and output are the largest."""
        return one.tokens * (3 * self._inner + 2 * self._entering) * self._item

    def _head(self, one: Pass) -> _Part:
        """The last norm, and the scores of tokens, whose logits never exist all at once."""
        hidden, item = self._hidden, self._item
        saved = (2 * one.tokens + one.scored) * hidden * item
        head = self.policy.head_weight
        trained = head.numel() if head.requires_grad else 0
        working = one.scored * hidden * (4 + item) + one.tokens * hidden * item + GRADIENT_OF_LOGITS + item * trained
        return _Part("head", saved, working, 0.0 if self._tied else 4.0 * trained * self._kept_gradients)

    def _waiting_gradient(self) -> float:
        """Bytes of a tied head's 16-bit gradient, which waits for that of the embedding; 0 for an untied head."""
        waits = self._tied and self._embedding.requires_grad
        return float(self._item * self._embedding.numel()) if waits else 0.0

    def saved_by_block(self, patches: int) -> float:
        """Bytes that a block of the tower saves: inputs and outputs of both norms, the product of queries, keys and
        values, the rotated ones, attention's output and a float32 a head, and the inputs of its MLP's products.
        """
        assert self.policy.vision is not None
        shape, gated = self.policy.vision.shape, self.policy.vision.gated
        elements = 10 * shape.hidden + (3 if gated else 2) * shape.inner
        statistics = 0 if gated else 16  # the towers without a gate have LayerNorm, which keeps mean and deviation
        return patches * (elements * self._item + 4 * shape.heads + statistics)

    def _tower(self, patches: int) -> list[_Part]:
        tower, item = self.policy.vision, self._item
        assert tower is not None
        entry = patches * tower.shape.hidden * item
        working = patches * 3 * tower.shape.inner * item
        saved = self.saved_by_block(patches)
        blocks = [self._part("vision tower", block, saved, working, entry) for block in tower.blocks]
        pixels = tower.patch_values
        embed = 4.0 * _count(tower.patches.parameters()) * self._kept_gradients
        first = _Part("vision tower", patches * pixels * (4 + item), 0.0, embed)
        mergers = [p for merger in tower.mergers for p in merger.parameters()]
        last = _Part("vision tower", 3 * entry, 2 * entry, 4.0 * _count(mergers) * self._kept_gradients)
        return [first, *blocks, last]

    # --- a rollout ---

    def rollout(self, play: Rollout) -> Moment:
        """The fullest moment of sampling: the last turn is prefilled, or it has ended and its KV cache is kept."""
        there = self.base() | self.cache(play) | self.features(play)
        before, after = (min(self.plan.cache_bytes, n * self.kv_bytes) for n in (play.kept_before, play.kept))
        if self.plan.vllm:  # keeps them among those that it has
            before = after = 0
        hidden, inner = self._entering, self._inner
        reading = play.prefill * (3 * hidden + 3 * inner) * self._item
        seeing = 0.0
        if self.policy.vision is not None:
            shape, pixels = self.policy.vision.shape, self.policy.vision.patch_values
            seeing = play.patches * ((7 * shape.hidden + shape.inner) * self._item + pixels * (4 + self._item))
        drawing = play.rows * self._settings.vocab_size * LOGIT_COPIES
        moments = [
            Moment("rollout", there | {KEPT: before, "work of the engine": max(reading, seeing) + drawing}),
            Moment("rollout", there | {KEPT: before + after, "work of the engine": drawing}),
        ]
        return max(moments, key=lambda moment: moment.total)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache of one token."""
        layers, heads, width = self.policy.kv_shape
        return 2 * layers * heads * width * self._item

    def cache(self, play: Rollout) -> dict[str, float]:
        """Bytes of the KV cache of the rows that are decoded together; it stays allocated during an update."""
        if self.plan.vllm:  # takes all it may have at the start
            return {"keys and values": float(self.plan.cache_bytes)}
        rows = max(1, min(play.rows, self.plan.cache_bytes // max(1, play.room * self.kv_bytes)))
        return {"keys and values": float(rows * play.room * self.kv_bytes)}

    def features(self, play: Rollout) -> dict[str, float]:
        """Bytes of cached vision features."""
        deep = 0 if self.policy.vision is None else self.policy.vision.shape.deep
        size = play.image_tokens * self._hidden * (1 + deep) * self._item
        return {"vision features": float(min(self.plan.feature_bytes, size))} if size else {}


def _by_kind(parts: Iterable[_Part]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        found[part.kind] = found.get(part.kind, 0.0) + part.saved
    return found


def _parameters(tower: Tower | None) -> list[nn.Parameter]:
    return [] if tower is None else list(tower.parameters())


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters)


def _bytes(parameters: Iterable[Tensor]) -> float:
    return float(sum(p.numel() * p.element_size() for p in parameters))
