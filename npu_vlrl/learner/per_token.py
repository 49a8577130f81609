"""Collects numbers of scored tokens from micro-batches, by sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from npu_vlrl.learner.pack import MicroBatch
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.types import Sample


class PerToken:
    """Collects R numbers for each scored token; they stay on the device until `gathered`."""

    def __init__(self, samples: Sequence[Sample], rows: int) -> None:
        """`rows` is R; all ranks collect for the same samples, each from its own micro-batches."""
        self._lengths = {sample.id: sample.n_scored for sample in samples}
        self._found = torch.zeros(rows, sum(self._lengths.values()), dtype=torch.float64)
        self._parts: dict[str, Tensor] = {}

    def add(self, batch: MicroBatch, values_RN: Tensor) -> None:
        """Adds the numbers of a micro-batch, in the order of its scored tokens; those of known samples are ignored."""
        own = torch.split(values_RN.detach(), [self._lengths[name] for name in batch.sample_ids], dim=1)
        self._parts = dict(zip(batch.sample_ids, own, strict=True)) | self._parts

    def gathered(self, ranks: Ranks) -> dict[str, np.ndarray]:
        """Numbers of all ranks by sample, float32 [R, N], on every rank; zeros for a sample in no micro-batch."""
        ends = np.cumsum(list(self._lengths.values())).tolist()
        starts = dict(zip(self._lengths, [0, *ends], strict=False))
        if self._parts:
            at = [starts[name] + i for name in self._parts for i in range(self._lengths[name])]
            self._found[:, at] = torch.cat(list(self._parts.values()), dim=1).cpu().double()
        parts = np.split(ranks.sum(self._found).float().numpy(), ends[:-1], axis=1)
        return dict(zip(self._lengths, parts, strict=True))
