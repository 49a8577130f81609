"""Samples -> micro-batches: one packed sequence each, images once, tensors derived from segments at the last moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npu_vlrl.model.policy import Policy
from npu_vlrl.model.positions import rotary_positions
from npu_vlrl.types import Credit, ImageInput, Sample


@dataclass(frozen=True)
class MicroBatch:
    """Samples packed head to tail into one sequence; tensors are on the learner's device."""

    sample_ids: tuple[str, ...]
    token_ids_T: Tensor
    """int64 [T]"""
    position_ids_3T: Tensor
    """int64 [3, T]: rotary positions (time, height, width), restarting with every sample."""
    lengths: tuple[int, ...]
    """Tokens of each sample; they add up to T."""
    images: tuple[ImageInput, ...]
    """Distinct images; each is encoded once."""
    image_order: tuple[int, ...]
    """For each image occurrence in token order, its index in `images`."""
    before_N: Tensor
    """int64 [N]: index in T of the token *before* each scored token, whose hidden state predicts it."""
    target_ids_N: Tensor
    """int64 [N]"""
    sample_N: Tensor
    """int64 [N]: which sample of the micro-batch each scored token belongs to."""
    sampled_N: Tensor
    """bool [N]: which of the scored tokens the policy sampled."""
    behaviour_N: Tensor
    """float32 [N]: log-probabilities under the policy that sampled; those of the proximal one where nobody did."""
    proximal_N: Tensor | None
    reference_N: Tensor | None
    values_N: Tensor | None
    """float32 [N] each; see `Scores`."""
    advantages_N: Tensor
    returns_N: Tensor
    critic_N: Tensor
    """See `Credit`; zeros where nothing was estimated."""


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
    positions, before, targets, owners = [], [], [], []
    images: dict[str, ImageInput] = {}
    slots: dict[str, int] = {}
    order: list[int] = []
    for number, sample in enumerate(samples):
        ids, at = sample.token_ids, _scored_positions(sample)
        before.append(at - 1 + len(token_ids))
        targets.append(np.asarray(ids)[at])
        owners.append(np.full(len(at), number))
        positions.append(rotary_positions(ids, sample.images, policy.special.image, policy.merge_size))
        token_ids += ids
        for image in sample.images:
            images.setdefault(image.image.hash, image)
            order.append(slots.setdefault(image.image.hash, len(slots)))
    device = policy.device

    def on_device(parts: Sequence[np.ndarray], axis: int = 0) -> Tensor:
        return torch.from_numpy(np.concatenate(parts, axis)).to(device)

    def scores(name: str) -> Tensor | None:
        parts = [getattr(sample.scores, name) for sample in samples]
        assert len({part is None for part in parts}) == 1, f"{name}: some samples of a micro-batch were not scored"
        return None if parts[0] is None else on_device(parts)

    credits = [sample.credit or _no_credit(sample.n_scored) for sample in samples]
    sampled_N = on_device([np.asarray(sample.sampled_mask) for sample in samples])
    behaviour_N = on_device([np.asarray(sample.behaviour_logprobs, dtype=np.float32) for sample in samples])
    proximal_N = scores("proximal_N")
    return MicroBatch(
        sample_ids=tuple(sample.id for sample in samples),
        token_ids_T=torch.tensor(token_ids, device=device),
        position_ids_3T=on_device(positions, 1),
        lengths=tuple(map(len, samples)),
        images=tuple(images.values()),
        image_order=tuple(order),
        before_N=on_device(before),
        target_ids_N=on_device(targets),
        sample_N=on_device(owners),
        sampled_N=sampled_N,
        behaviour_N=behaviour_N if proximal_N is None else torch.where(sampled_N, behaviour_N, proximal_N),
        proximal_N=proximal_N,
        reference_N=scores("reference_N"),
        values_N=scores("values_N"),
        advantages_N=on_device([credit.advantages_N for credit in credits]).float(),
        returns_N=on_device([credit.returns_N for credit in credits]).float(),
        critic_N=on_device([credit.critic_N for credit in credits]),
    )


def _scored_positions(sample: Sample) -> np.ndarray:
    """int [N]: where in the sample its scored tokens stand."""
    scored = [i in sample.scored for i, segment in enumerate(sample.segments) for _ in segment.token_ids]
    if not any(scored) or scored[0]:
        raise ValueError(f"sample {sample.id} has no trained token with a context before it")
    return np.flatnonzero(scored)


def _no_credit(n: int) -> Credit:
    return Credit(np.zeros(n), np.zeros(n), np.zeros(n, dtype=bool))
