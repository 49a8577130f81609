"""Estimates the duration of a step from operations and bytes, at assumed shares of the maker's peak, measured once.

All shares come from one kind of device (H200, benchmarks/README.md); nothing was measured on others, NPUs among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from npu_vlrl.estimate.memory import MemoryModel, Pass, Rollout
from npu_vlrl.estimate.workload import Episode
from npu_vlrl.hardware import Peak
from npu_vlrl.learner.flops import ModelFlops

UPDATE_SHARE = 0.45
"""Achieved share of the peak's operations in forward and backward passes, recomputed ones included."""
PREFILL_SHARE = 0.5
"""Achieved share of the peak's operations during prefill."""
DECODE_SHARE = 0.35
"""Achieved share of the peak's bandwidth during decoding: weights and KV cache are read for each token."""
STEP_BYTES = 30
"""Bytes that AdamW reads and writes for each trained parameter: gradient 4, moments and master 24, weight 2."""
LINK = 1e11
"""Bytes a second from device to device; between two H200 of one host 3e11 were measured."""


def update_seconds(memory: MemoryModel, work: Sequence[Pass], peak: Peak, extra_forwards: int = 0) -> float:
    """Seconds of one learner's update. `extra_forwards`: passes without gradients, e.g. for the KL reference."""
    policy = memory.policy
    flops = ModelFlops(policy)
    recomputed = 1 + extra_forwards if _recomputes(memory) else extra_forwards

    def operations(one: Pass, train: bool) -> float:
        # a frozen tower's features are kept from the rollout
        tower = 0.0 if policy.vision_is_frozen else flops.tower(one.images, train)
        return flops.layers(one.tokens, one.pairs, train) + flops.head(one.scored, train) + tower

    alike = Counter(map(id, work))  # micro-batches of equal episodes are one object
    total = 0.0
    for one in {id(one): one for one in work}.values():
        total += alike[id(one)] * (operations(one, True) + recomputed * operations(one, False))
    trained = sum(p.numel() for p in policy.trainable().values())
    share = memory.plan.learners if memory.plan.shard else 1
    return total / (UPDATE_SHARE * peak.flops) + STEP_BYTES * trained / share / peak.bandwidth


def _recomputes(memory: MemoryModel) -> bool:
    return bool(getattr(memory.policy.text.layers[0], "gradient_checkpointing", False))


def prefill_seconds(memory: MemoryModel, episode: Episode, groups: int, rows: int, peak: Peak) -> float:
    """Seconds of the prefill of all openings once, and of the environment's replies to each episode."""
    flops = ModelFlops(memory.policy)
    replies = episode.turns - 1
    tokens = groups * episode.opening + rows * replies * episode.reply
    seen = groups * episode.opening**2 // 2 + rows * replies * episode.reply * episode.tokens // 2
    images = [i for i in [episode.first_image] * groups + [episode.later_image] * rows * replies if i is not None]
    products = flops.layers(tokens, seen, False) + flops.head(rows * episode.turns, False) + flops.tower(images, False)
    return products / (PREFILL_SHARE * peak.flops)


def decode_seconds(memory: MemoryModel, episode: Episode, play: Rollout, peak: Peak) -> float:
    """Seconds of decoding every token of every turn; rows beyond the room of the KV cache wait."""
    together = max(1, min(play.rows, memory.plan.cache_bytes // max(1, play.room * memory.kv_bytes)))
    waves = -(-play.rows // together)
    layers: int = sum(p.numel() * p.element_size() for p in memory.policy.text.parameters())
    head = memory.policy.head_weight
    untied = 0 if head is memory.policy.base.get_input_embeddings().weight else head.numel() * head.element_size()
    read = layers + untied + together * (episode.tokens + episode.opening) / 2 * memory.kv_bytes
    return waves * episode.turns * episode.sampled * read / (DECODE_SHARE * peak.bandwidth)


def sync_seconds(memory: MemoryModel, sampling_apart: bool) -> float:
    """Seconds of sending new weights to engines in other processes, or to the full policy beside a sharded one."""
    if not sampling_apart and not memory.plan.shard:
        return 0.0
    return sum(p.numel() * memory.policy.dtype.itemsize for p in memory.policy.trainable().values()) / LINK
