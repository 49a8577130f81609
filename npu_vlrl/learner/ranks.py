"""Data-parallel ranks: the collectives of the processes that compute one update together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from npu_vlrl.algorithms.metrics import Metrics
from npu_vlrl.learner.optimizer import sharded, stepped
from npu_vlrl.types import Sample

BUCKET_BYTES = 64 * 2**20
"""Bytes of gradients in one all-reduce: large enough for the links, small beside the model."""


class Ranks:
    """The learners of a process group: each takes its share of the samples, and all take the same steps.

    All get the same samples, begin with the same weights, and call the same methods in the same order; a rank without a
    contribution adds zeros. The group must support tensors on the host and on the device of the weights, as one of the
    backend `Platform.process_group_backend` does. After a failure of a rank, the others wait until the group's timeout,
    which raises; `LearnerGroup` notices it earlier.

    Example: `Learner(..., ranks=Ranks(torch.distributed.group.WORLD))`
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Without a group this process is the only rank, and all collectives are local."""
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def same_samples(self, samples: Sequence[Sample]) -> bool:
        """Whether every rank has these samples, with these advantages."""
        return self.size == 1 or self.agree(_number(samples))

    def agree(self, number: int) -> bool:
        """Whether every rank has this number, of up to 63 bits."""
        return len({int(other) for other in self.gather(torch.tensor(number, dtype=torch.int64))}) == 1

    def sum(self, values: Tensor) -> Tensor:
        """All-reduces a tensor of the host: its sum over all ranks, the same bits on each; NaN stays."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.group)
        return values

    def meet(self) -> None:
        """Barrier: returns when all ranks have called it."""
        self.sum(torch.zeros(1))

    def broadcast_flag(self, yes: bool) -> bool:
        """The flag of rank 0, on all ranks."""
        return bool(self.sum(torch.tensor([float(yes and self.rank == 0)])))

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Broadcasts the values of rank 0 into the tensors of all, which are on the host or on the device."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    def gather(self, values: Tensor) -> list[Tensor]:
        """All-gathers a tensor of the host: those of all ranks, in their order, with the same shape and dtype."""
        if self.size == 1:
            return [values]
        found = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(found, values.contiguous(), group=self.group)
        return found

    def rows(self, total: int) -> range:
        """Rows of this rank in a sharded tensor of `total` rows: equally many for each, and fewer for the last ones."""
        each = -(-total // self.size)
        return range(min(self.rank * each, total), min((self.rank + 1) * each, total))

    def gather_rows(self, rows: Tensor, total: int) -> Tensor:
        """All-gathers a full tensor [total, …] from the shards of all ranks, see `rows`; on host or device."""
        each = -(-total // self.size)
        padded = rows.new_zeros(each, *rows.shape[1:])
        padded[: len(rows)] = rows
        full = rows.new_empty(each * self.size, *rows.shape[1:])
        dist.all_gather(list(torch.split(full, each)), padded, group=self.group)
        return full[:total]

    def gather_metrics(self, metrics: Sequence[Metrics]) -> list[Metrics]:
        """All-gathers the metrics of micro-batches; all ranks have equally many, under the same names."""
        if self.size == 1 or not metrics:
            return list(metrics)
        names = list(metrics[0])
        values = torch.stack([torch.stack([part[name] for name in names]) for part in metrics])
        return [dict(zip(names, row, strict=True)) for rows in self.gather(values.double().cpu()) for row in rows]

    def sum_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """All-reduces the gradients of the tensors that the optimiser steps, in a few large calls.

        A tensor without a gradient on this rank, such as the tower's where no sample has an image, contributes zeros.
        One without a gradient on any rank keeps none, so that the optimiser skips it as in one process.
        """
        if self.size == 1:
            return
        tensors = stepped(optimizer)
        for rows in tensors:
            weight = sharded(rows)
            if weight is not None and weight.grad is not None:  # reduced and scattered already
                rows.grad, weight.grad = weight.grad.to_local(), None  # type: ignore[attr-defined]
        tensors = [tensor for tensor in tensors if sharded(tensor) is None]
        owners = self.sum(torch.tensor([float(tensor.grad is not None) for tensor in tensors]))
        for bucket in _buckets([tensor for tensor, n in zip(tensors, owners.tolist(), strict=True) if n]):
            for tensor in bucket:
                tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            gradients = [tensor.grad for tensor in bucket if tensor.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=self.group)
            for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Splits tensors into runs of one dtype and up to `BUCKET_BYTES` together; a larger tensor is alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _number(samples: Sequence[Sample]) -> int:
    """Digest of ids, tokens and advantages, 63 bits."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(repr((sample.id, sample.group)).encode())
        digest.update(np.asarray(sample.token_ids, dtype=np.int64).tobytes())
        if sample.credit is not None:
            digest.update(sample.credit.advantages_N.tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 1
