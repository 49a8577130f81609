"""Log-probabilities of the sampled tokens from three sides: engine, learner, and plain transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pillow
from torch import Tensor

from npu_vlrl.config import AlgorithmConfig, OptimConfig
from npu_vlrl.learner.pack import MicroBatch
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Image, ImageInput, Sample, SpecialTokens
from npu_vlrl.workflow.export import ExportStyle
from tests.support.models import is_vision, loaded, plain, plain_patches

TOLERANCE = 2e-5
"""In nats, float32. The engine computes a prompt alone, the learner within a tree: sums in another order."""
"""Nats, in float32."""
STYLES: tuple[ExportStyle, ...] = ("concat", "individual")
Logprobs = dict[str, Tensor]
"""By sample id, float [N]: one value for each trained token."""


def engine_logprobs(samples: Sequence[Sample]) -> Logprobs:
    return {sample.id: torch.tensor(sample.behaviour_logprobs, dtype=torch.float64) for sample in samples}


def largest_gap(first: Logprobs, second: Logprobs) -> float:
    """Over all tokens of the same samples."""
    assert first.keys() == second.keys()
    gaps = [(first[key] - second[key]).abs().max() for key in first if first[key].shape == second[key].shape]
    assert len(gaps) == len(first), "the samples differ in length"
    return float(torch.stack(gaps).max())


def make_learner(policy: Policy, vision: VisionFeatures, budget: int = 4096, temperature: float = 1.0) -> Learner:
    config = AlgorithmConfig(kl_coef=0.0)
    optim = OptimConfig(micro_batch_tokens=budget, logprob_chunk=5)
    return Learner(policy, vision, config, optim, temperature, 1)


@torch.no_grad()
def learner_logprobs(
    policy: Policy,
    vision: VisionFeatures,
    samples: Sequence[Sample],
    temperature: float = 1.0,
    budget: int = 4096,
    change: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
) -> Logprobs:
    """What the update would compute; `change` tampers with each micro-batch."""
    learner = make_learner(policy, vision, budget, temperature)
    found: Logprobs = {}
    for batch in map(change, learner._micro_batches(samples)):
        logprobs_N, _ = learner._score(batch, policy, vision, temperature)
        counts = torch.bincount(batch.sample_N, minlength=len(batch.sample_ids)).tolist()
        found |= dict(zip(batch.sample_ids, logprobs_N.cpu().double().split(counts), strict=True))
    assert found.keys() == {sample.id for sample in samples}
    return found


@torch.no_grad()
def plain_logprobs(
    folder: Path, samples: Sequence[Sample], temperature: float, side: str, n_tokens: int, model: Any = None
) -> Logprobs:
    """The untouched transformers model on one padded batch, with its own positions and image processor."""
    model = plain(folder) if model is None else model
    longest = max(map(len, samples))
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    starts = [longest - len(sample) if side == "left" else 0 for sample in samples]
    for row, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        ids[row, start : start + len(sample)] = torch.tensor(sample.token_ids)
        mask[row, start : start + len(sample)] = 1
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    forbidden = torch.arange(model.lm_head.weight.shape[0]) >= n_tokens
    if is_vision(model.config.model_type):
        forbidden[list(loaded(folder).policy.special.placeholders)] = True
        images = [Pillow.fromarray(image.image.rgb) for sample in samples for image in sample.images]
        made = plain_patches(folder, images) if images else {}
        inputs |= made
        if hasattr(model.model, "get_rope_index"):
            types = (ids == model.config.image_token_id).long() * mask
            positions, _ = model.model.get_rope_index(
                ids, mm_token_type_ids=types, image_grid_thw=made.get("image_grid_thw"), attention_mask=mask
            )
            inputs |= {"position_ids": positions, "mm_token_type_ids": types}
    logits = model(**inputs, use_cache=False).logits.masked_fill(forbidden, -torch.inf) / temperature
    scores = logits.log_softmax(-1)
    found: Logprobs = {}
    for row, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        at = torch.tensor([i for i, trained in enumerate(sample.loss_mask) if trained])
        found[sample.id] = scores[row, start + at - 1, torch.tensor(sample.token_ids)[at]].double()
    return found


def with_image(sample: Sample, number: int, rgb: Any, special: SpecialTokens) -> Sample:
    """The sample with other pixels in its image of that number."""
    segments, seen = [], 0
    for segment in sample.segments:
        images: list[ImageInput] = list(segment.images)
        if seen <= number < seen + len(images):
            images[number - seen] = dataclasses.replace(images[number - seen], image=Image(rgb))
        seen += len(images)
        segments.append(dataclasses.replace(segment, special=special, images=tuple(images)))
    return dataclasses.replace(sample, segments=tuple(segments))
