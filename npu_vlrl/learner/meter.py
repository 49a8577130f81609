"""Counts of tokens, images and operations of an update, and its throughput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from time import perf_counter

import torch

from npu_vlrl.hardware import Platform
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.learner.flops import ModelFlops, seen_pairs
from npu_vlrl.learner.pack import MicroBatch
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Sample


@dataclass
class Counts:
    """Counts of this rank since the start; each pass counts."""

    tokens_referenced: float = 0
    """Tokens of samples that went through the layers."""
    tokens_computed: float = 0
    """Tokens that went through the layers: a shared prefix in a micro-batch counts once, and idle tokens count."""
    tokens_idle: float = 0
    """Tokens of micro-batches without a sample, which keep ranks in step."""
    micro_batches: float = 0
    images_referenced: float = 0
    images_encoded: float = 0
    flops: float = 0
    """Floating-point operations, see `flops.py`."""


class Meter:
    """Counts passes; `metrics` describes those since `begin`."""

    def __init__(self, platform: Platform, ranks: Ranks, micro_batch_tokens: int) -> None:
        self.counts = Counts()
        self._platform = platform
        self._ranks = ranks
        self._micro_batch_tokens = micro_batch_tokens
        self._models: dict[Policy, ModelFlops] = {}
        self._before = self._now()

    def planned(self, batches: Sequence[MicroBatch], tokens_referenced: int) -> None:
        """Counts micro-batches of this rank, and the tokens of their samples."""
        self.counts.tokens_referenced += tokens_referenced
        self.counts.micro_batches += len(batches)
        self.counts.tokens_computed += sum(len(batch.token_ids_T) for batch in batches)
        self.counts.tokens_idle += sum(len(batch.token_ids_T) for batch in batches if not batch.sample_ids)

    def flops(self, policy: Policy) -> ModelFlops:
        if policy not in self._models:
            self._models[policy] = ModelFlops(policy)
        return self._models[policy]

    def cost(self, policy: Policy, samples: Sequence[Sample], tree: Tree) -> float:
        """Operations of an update on samples: the same number on every rank, independent of its cached features."""
        model = self.flops(policy)
        images = {image.image.hash: image for sample in samples for image in sample.images}
        scored = sum(sample.n_scored for sample in samples)
        layers = model.layers(tree.bounds[-1], seen_pairs(tree), train=True)
        return layers + model.head(scored, train=True) + model.tower(list(images.values()), train=True)

    def layers(self, policy: Policy, batch: MicroBatch, vision: VisionFeatures, before: tuple[int, int]) -> None:
        """Counts a micro-batch that went through the layers, and its new images through the tower. `before`: referenced
        and encoded images that `vision` had counted before.
        """
        model, train = self.flops(policy), torch.is_grad_enabled()
        referenced, encoded = vision.referenced - before[0], vision.encoded - before[1]
        self.counts.images_referenced += referenced
        self.counts.images_encoded += encoded
        self.counts.flops += model.layers(len(batch.token_ids_T), seen_pairs(batch.tree), train)
        if encoded:  # which images were cached is not known
            self.counts.flops += model.tower(batch.images, train) * encoded / len(batch.images)

    def head(self, policy: Policy, scored: int) -> None:
        """Counts tokens that were scored."""
        self.counts.flops += self.flops(policy).head(scored, torch.is_grad_enabled())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which passes do not count."""
        kept = replace(self.counts)
        try:
            yield
        finally:
            self.counts = kept

    def begin(self) -> None:
        self._before = self._now()

    def metrics(self) -> dict[str, float]:
        """Metrics of all ranks together since `begin`; `update/mfu` only for a device whose peak is published."""
        before, now = self._before, self._now()
        local = torch.tensor([b - a for a, b in zip(before, now, strict=True)], dtype=torch.float64)
        everyone = torch.stack(self._ranks.gather(local))
        seconds = float(everyone[:, -1].max())
        counts = Counts(*everyone[:, :-1].sum(0).tolist())
        metrics = {
            "tokens_useful": counts.tokens_referenced,
            "tokens_computed": counts.tokens_computed,
            "micro_batches": counts.micro_batches,
            "images_referenced": counts.images_referenced,
            "images_encoded": counts.images_encoded,
            "seconds": seconds,
            "useful_tokens_per_second": counts.tokens_referenced / seconds,
            "computed_tokens_per_second": counts.tokens_computed / seconds,
            "tflop": counts.flops / 1e12,
        }
        if counts.tokens_referenced:  # shares of no tokens are undefined
            metrics |= {
                "tokens_shared": 1 - (counts.tokens_computed - counts.tokens_idle) / counts.tokens_referenced,
                "padding": counts.tokens_idle / counts.tokens_computed,
                "fill": counts.tokens_computed / (counts.micro_batches * self._micro_batch_tokens),
            }
        peak = self._platform.peak()
        if peak is not None:
            metrics["mfu"] = counts.flops / (seconds * peak.flops * self._ranks.size)
        return {f"update/{name}": value for name, value in metrics.items()}

    def _now(self) -> tuple[float, ...]:
        self._platform.synchronize()
        return *astuple(self.counts), perf_counter()
