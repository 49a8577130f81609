"""Packs samples into micro-batches: one packed sequence each, images once, tensors derived from segments at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from npu_vlrl.kernels.tree import Tree
from npu_vlrl.learner.tree import divide, share
from npu_vlrl.model.policy import Policy
from npu_vlrl.types import Credit, ImageInput, Sample

Cost = Callable[[Sequence[Sample], Tree], float]
"""Function that estimates the operations of samples with their tree."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples packed head to tail into one sequence; tensors are on the learner's device."""

    sample_ids: tuple[str, ...]
    token_ids_T: Tensor
    """int64 [T]: a prefix that several samples share occurs once."""
    position_ids_3T: Tensor
    """int64 [3, T]: rotary positions (time, height, width), counted from the beginning of a sample."""
    tree: Tree
    """Prefix tree, which determines the tokens that each token sees."""
    images: tuple[ImageInput, ...]
    """Distinct images; each is encoded once."""
    image_order: tuple[int, ...]
    """Index in `images` of each occurrence of an image, in token order."""
    before_N: Tensor
    """int64 [N]: index in T of the token *before* each scored token, whose hidden state predicts it."""
    target_ids_N: Tensor
    """int64 [N]"""
    sample_N: Tensor
    """int64 [N]: index in the micro-batch of each scored token's sample."""
    sampled_N: Tensor
    """bool [N]: whether the policy sampled the token."""
    behaviour_N: Tensor
    """float32 [N]: log-probabilities under the behaviour policy; under the proximal one for tokens not sampled."""
    versions_N: Tensor
    """int64 [N]: version of the weights that sampled each token; -1 for tokens not sampled."""
    proximal_N: Tensor | None
    reference_N: Tensor | None
    values_N: Tensor | None
    """Scores, float32 [N] each; see `types.Scores`."""
    advantages_N: Tensor
    returns_N: Tensor
    critic_N: Tensor
    """Credit, see `types.Credit`; zeros before an estimator has run."""
    routes_TLk: Tensor | None = None
    """int16 on the host: the experts that sampled, see `Sample.routes`; None where no engine recorded them."""
    images_elsewhere: bool = False
    """Whether the micro-batch that another rank computes at the same time has images, and this one has none."""

    def is_of(self, version: int | None) -> Tensor:
        """bool [N]: whether this version of the weights sampled the token; None: any version."""
        return self.sampled_N if version is None else self.versions_N == version


def plan_ranks(
    samples: Sequence[Sample],
    max_tokens: int,
    placeholder: int | None,
    ranks: int,
    cost: Cost,
) -> list[list[list[int]]]:
    """Plans the micro-batches of each rank: indices of samples with up to `max_tokens` distinct tokens together;
    `placeholder` is that of images. All ranks have equally many: a rank with fewer gets empty ones, since every rank
    must take part in all collectives.

    A group stays together, so that its shared prefixes are computed once; only a group that is too large is split,
    between members that share least. Bins are filled by best fit, largest first. A sample over `max_tokens` is alone.
    Samples that stay together go to one rank; `cost` estimates their operations, from the samples and their tree.
    """
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    keys = [_keys(sample, placeholder) for sample in samples]
    units: list[list[int]] = []
    for members in groups.values():
        units += [[members[i] for i in unit] for unit in divide([keys[i] for i in members], max_tokens)]
    trees = [share([keys[i] for i in unit]).tree for unit in units]
    costs = [cost([samples[i] for i in unit], tree) for unit, tree in zip(units, trees, strict=True)]
    planned = []
    for mine in balance(costs, ranks):
        bins = fit([trees[unit].bounds[-1] for unit in mine], max_tokens)
        planned.append([sorted(i for place in chosen for i in units[mine[place]]) for chosen in bins])
    agreed = max(map(len, planned))
    return [batches + [[]] * (agreed - len(batches)) for batches in planned]


def batches_of_rank(
    samples: Sequence[Sample], max_tokens: int, policy: Policy, ranks: tuple[int, int], cost: Cost
) -> list[MicroBatch]:
    """Micro-batches of one rank by `plan_ranks`; `ranks` are the rank and the number of ranks."""
    rank, size = ranks
    planned = plan_ranks(samples, max_tokens, policy.special.image, size, cost)
    with_images = [any(samples[i].images for unit in units for i in unit) for units in zip(*planned, strict=True)]
    batches = [
        collate([samples[i] for i in indices], policy) if indices else idle(samples[0], policy)
        for indices in planned[rank]
    ]
    return [
        replace(batch, images_elsewhere=images and not batch.images)
        for batch, images in zip(batches, with_images, strict=True)
    ]


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assigns items to ranks, as indices: the costliest first, each to the rank with the smallest sum (Graham 1969,
    "Bounds on multiprocessing timing anomalies": the largest sum is within 4/3 of the optimum).
    """
    taken: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(range(ranks), key=lambda rank: load[rank])
        taken[least].append(index)
        load[least] += costs[index]
    return [sorted(indices) for indices in taken]


def fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Packs items into bins of `room`, as indices: best fit, largest first. A larger item is alone.

    Every index occurs exactly once, and the result depends on the sizes only.
    """
    bins: list[list[int]] = []
    left: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = [b for b, free in enumerate(left) if free >= sizes[index]]
        if fitting:
            best = min(fitting, key=lambda b: left[b])
            bins[best].append(index)
            left[best] -= sizes[index]
        else:
            bins.append([index])
            left.append(room - sizes[index])
    return bins


def collate(samples: Sequence[Sample], policy: Policy) -> MicroBatch:
    """Packs samples, each shared prefix once; the arrays over N are in the given order of samples.

    Raises ValueError for a sample without trained tokens, or one that begins with a trained token, which has no context
    to predict it.
    """
    shared = share([_keys(sample, policy.special.image) for sample in samples])
    token_ids_T = np.zeros(shared.n_tokens, np.int64)
    positions_3T = np.zeros((3, shared.n_tokens), np.int64)
    before, targets, owners = [], [], []
    images: dict[str, ImageInput] = {}
    slots: dict[str, int] = {}
    seen: dict[int, int] = {}
    """Index in `images` of each occurrence of an image, by the position of its first token."""
    for number, (sample, places) in enumerate(zip(samples, shared.places, strict=True)):
        ids, at = np.asarray(sample.token_ids), _scored_positions(sample)
        token_ids_T[places] = ids
        positions_3T[:, places] = policy.positions(ids, sample.images)
        before.append(places[at - 1])
        targets.append(ids[at])
        owners.append(np.full(len(at), number))
        tokens = places[ids == policy.special.image]
        firsts = np.cumsum([0, *(image.n_tokens for image in sample.images)])[:-1]
        for image, first in zip(sample.images, firsts, strict=True):
            images.setdefault(image.image.hash, image)
            seen[int(tokens[first])] = slots.setdefault(image.image.hash, len(slots))
    device = policy.device

    def on_device(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    def scores(name: str) -> Tensor | None:
        parts = [getattr(sample.scores, name) for sample in samples]
        assert len({part is None for part in parts}) == 1, f"{name}: some samples of a micro-batch were not scored"
        return None if parts[0] is None else on_device(parts)

    credits = [sample.credit or _no_credit(sample.n_scored) for sample in samples]
    sampled_N = on_device([np.asarray(sample.sampled_mask) for sample in samples])
    behaviour_N = on_device([np.asarray(sample.behaviour_logprobs, dtype=np.float32) for sample in samples])
    versions_N = torch.full_like(sampled_N, -1, dtype=torch.int64)
    versions_N[sampled_N] = on_device([np.asarray(sample.weight_versions, dtype=np.int64) for sample in samples])
    proximal_N = scores("proximal_N")
    return MicroBatch(
        sample_ids=tuple(sample.id for sample in samples),
        token_ids_T=on_device([token_ids_T]),
        position_ids_3T=on_device([positions_3T]),
        tree=shared.tree,
        images=tuple(images.values()),
        image_order=tuple(seen[place] for place in sorted(seen)),
        before_N=on_device(before),
        target_ids_N=on_device(targets),
        sample_N=on_device(owners),
        sampled_N=sampled_N,
        behaviour_N=behaviour_N if proximal_N is None else torch.where(sampled_N, behaviour_N, proximal_N),
        versions_N=versions_N,
        proximal_N=proximal_N,
        reference_N=scores("reference_N"),
        values_N=scores("values_N"),
        advantages_N=on_device([credit.advantages_N for credit in credits]).float(),
        returns_N=on_device([credit.returns_N for credit in credits]).float(),
        critic_N=on_device([credit.critic_N for credit in credits]),
        routes_TLk=_routes(samples, shared.places, shared.n_tokens),
    )


def _routes(samples: Sequence[Sample], places: Sequence[np.ndarray], n_tokens: int) -> Tensor | None:
    """The routes of packed tokens; a token that several samples share has those of the first that knows them."""
    found = [(sample.routes, at) for sample, at in zip(samples, places, strict=True)]
    shapes = {routes.shape[1:] for routes, _ in found if routes is not None}
    if not shapes:
        return None
    (shape,) = shapes
    routes_TLk = np.full((n_tokens, *shape), -1, np.int16)
    for routes, at in found:
        if routes is not None:
            new = (routes[:, 0, 0] >= 0) & (routes_TLk[at, 0, 0] < 0)
            routes_TLk[at[new]] = routes[new]
    return torch.from_numpy(routes_TLk)


def idle(like: Sample, policy: Policy) -> MicroBatch:
    """Micro-batch of one token without a loss: its loss and all gradients are 0, yet all layers run.

    `like`: a sample of the batch; its arrays exist here, and are empty.
    """
    device = policy.device
    none, nowhere = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    never = torch.zeros(0, dtype=torch.bool, device=device)
    scores = like.scores
    return MicroBatch(
        sample_ids=(),
        token_ids_T=torch.tensor([like.token_ids[-1]], device=device),
        position_ids_3T=torch.zeros(3, 1, dtype=torch.int64, device=device),
        tree=Tree.of_sequences([0, 1]),
        images=(),
        image_order=(),
        before_N=nowhere,
        target_ids_N=nowhere,
        sample_N=nowhere,
        sampled_N=never,
        behaviour_N=none,
        versions_N=nowhere,
        proximal_N=None if scores.proximal_N is None else none,
        reference_N=None if scores.reference_N is None else none,
        values_N=None if scores.values_N is None else none,
        advantages_N=none,
        returns_N=none,
        critic_N=never,
    )


def _scored_positions(sample: Sample) -> np.ndarray:
    """int [N]: positions of the scored tokens in the sample."""
    scored = [i in sample.scored for i, segment in enumerate(sample.segments) for _ in segment.token_ids]
    if not any(scored) or scored[0]:
        raise ValueError(f"sample {sample.id} has no trained token with a context before it")
    return np.flatnonzero(scored)


def _keys(sample: Sample, placeholder: int | None) -> np.ndarray:
    """int64: keys of the sample's tokens, equal exactly for equal inputs: those of placeholders identify the image."""
    ids = np.asarray(sample.token_ids, dtype=np.int64)
    if sample.images:
        keys = [-1 - int(image.image.hash[:15], 16) for image in sample.images]
        ids[ids == placeholder] = np.repeat(keys, [image.n_tokens for image in sample.images])
    return ids


def _no_credit(n: int) -> Credit:
    return Credit(np.zeros(n), np.zeros(n), np.zeros(n, dtype=bool))
