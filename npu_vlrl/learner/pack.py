"""Samples -> micro-batches: one packed sequence each, images once, tensors derived from segments at the last moment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from npu_vlrl.model.policy import Policy
from npu_vlrl.model.positions import rotary_positions
from npu_vlrl.types import ImageInput, MicroBatch, Sample


def split(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of samples for each micro-batch: best fit, longest first. A sample over `max_tokens` stands alone.

    Every index occurs exactly once, and the result depends on the lengths only.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [b for b, free in enumerate(room) if free >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda b: room[b])
            bins[best].append(index)
            room[best] -= lengths[index]
        else:
            bins.append([index])
            room.append(max_tokens - lengths[index])
    return bins


def collate(samples: Sequence[Sample], policy: Policy) -> MicroBatch:
    """Packs samples head to tail, in the given order. Raises ValueError for a sample without trained tokens, or one
    that begins with a trained token (nothing would predict it).
    """
    token_ids: list[int] = []
    positions, trained, targets, owners, behaviour, advantages = [], [], [], [], [], []
    images: dict[str, ImageInput] = {}
    slots: dict[str, int] = {}
    order: list[int] = []
    for number, sample in enumerate(samples):
        ids, mask = sample.token_ids, np.asarray(sample.loss_mask)
        if not mask.any() or mask[0]:
            raise ValueError(f"sample {sample.id} has no trained token with a context before it")
        at = np.flatnonzero(mask)
        trained.append(at - 1 + len(token_ids))
        targets.append(np.asarray(ids)[at])
        owners.append(np.full(len(at), number))
        behaviour += sample.behaviour_logprobs
        advantages.append(np.full(len(at), 0.0 if sample.advantage is None else sample.advantage))
        positions.append(rotary_positions(ids, sample.images, policy.special.image, policy.merge_size))
        token_ids += ids
        for image in sample.images:
            images.setdefault(image.image.hash, image)
            order.append(slots.setdefault(image.image.hash, len(slots)))
    device = policy.device

    def on_device(parts: list[np.ndarray], axis: int = 0) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts, axis)).to(device)

    return MicroBatch(
        sample_ids=tuple(sample.id for sample in samples),
        token_ids_T=torch.tensor(token_ids, device=device),
        position_ids_3T=on_device(positions, 1),
        lengths=tuple(map(len, samples)),
        images=tuple(images.values()),
        image_order=tuple(order),
        trained_N=on_device(trained),
        target_ids_N=on_device(targets),
        sample_N=on_device(owners),
        behaviour_logprobs_N=torch.tensor(behaviour, dtype=torch.float32, device=device),
        advantages_N=on_device(advantages).float(),
    )
