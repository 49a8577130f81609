"""Layout of parameters in buckets. Both sides compute the plan from the same facts, and compare its checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 512
"""Alignment of tensors in bytes: device memory is read fastest in such units, and every dtype's size divides it."""

SMALLEST = 8
"""Divisor of `bucket_bytes` for the first and the last buckets."""


@dataclass(frozen=True)
class Fact:
    """Name, dtype and shape of a parameter on one side, exchanged before anything is sent.

    Example: `Fact("lm_head.weight", "bfloat16", (1000, 64))`
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        elements = 1
        for length in self.shape:
            elements *= length
        return elements * self.torch_dtype.itemsize

    @staticmethod
    def of(name: str, tensor: Tensor) -> Fact:
        return Fact(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape)]

    @staticmethod
    def from_json(values: Sequence[Any]) -> Fact:
        name, dtype, shape = values
        return Fact(str(name), str(dtype), tuple(shape))


@dataclass(frozen=True)
class Place:
    """Location of a parameter: `fact.size` bytes from `offset` on, in bucket number `bucket`."""

    fact: Fact
    bucket: int
    offset: int

    @cached_property
    def _layout(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Shape, strides and offset, in elements; cached, since transfers look them up often."""
        strides = [1]
        for length in reversed(self.fact.shape[1:]):
            strides.insert(0, strides[0] * length)
        return self.fact.shape, tuple(strides[: len(self.fact.shape)]), self.offset // self.fact.torch_dtype.itemsize

    def view(self, bucket: Tensor) -> Tensor:
        """The parameter as a view into its bucket, which is of its dtype."""
        return bucket.as_strided(*self._layout)


@dataclass(frozen=True)
class Plan:
    """Places in the order of the parameters, and the size of each bucket in bytes."""

    places: tuple[Place, ...]
    bucket_sizes: tuple[int, ...]

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of everything in the plan."""
        content = [[p.fact.to_json(), p.bucket, p.offset] for p in self.places], self.bucket_sizes
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes sent in one update."""
        return sum(self.bucket_sizes)

    @cached_property
    def buckets(self) -> tuple[tuple[Place, ...], ...]:
        """The places of each bucket."""
        found: list[list[Place]] = [[] for _ in self.bucket_sizes]
        for place in self.places:
            found[place.bucket].append(place)
        return tuple(map(tuple, found))

    def views(self, bucket: int, buffer: Tensor) -> dict[str, Tensor]:
        """The parameters of a bucket as views into `buffer`, uint8 of at least the bucket's size."""
        whole = {
            dtype: buffer[: self.bucket_sizes[bucket]].view(dtype)
            for dtype in {place.fact.torch_dtype for place in self.buckets[bucket]}
        }
        return {place.fact.name: place.view(whole[place.fact.torch_dtype]) for place in self.buckets[bucket]}

    def tensors(self, buffers: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All parameters by name, as views into the memory of the buckets."""
        for bucket, buffer in enumerate(buffers):
            yield from self.views(bucket, buffer).items()


def make_plan(facts: Sequence[Fact], bucket_bytes: int) -> Plan:
    """Fills buckets in the given order; a parameter larger than a bucket has one of its own.

    The first bucket is smaller than `bucket_bytes`, and the last ones take no more than half of the rest: packing of
    the first and loading of the last overlap with no transfer.
    """
    padded = [-(-fact.size // ALIGNMENT) * ALIGNMENT for fact in facts]
    places: list[Place] = []
    sizes: list[int] = []
    least, left, limit = bucket_bytes // SMALLEST, sum(padded), 0
    for fact, size in zip(facts, padded, strict=True):
        if not sizes or sizes[-1] + size > limit:
            limit = least if not sizes else min(bucket_bytes, max(left // 2, least))
            sizes.append(0)
        places.append(Place(fact, len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
        left -= size
    return Plan(tuple(places), tuple(sizes))


def distinct(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters with tied ones only once, under the first of their names."""
    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    kept: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and memory in seen:
            continue
        seen[memory] = name
        kept[name] = tensor
    return kept
