"""Parts for tests of the learner: tiny models, trajectories by hand, and the same loss from plain transformers."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_vl import modeling_qwen3_vl

from npu_vlrl.config import AlgorithmConfig, LoraConfig, ModelConfig, OptimConfig
from npu_vlrl.learner import trainer
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.families import family_of_path
from npu_vlrl.model.load import LoadedModel, load_model
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import (
    Credit,
    EpisodeStatus,
    Image,
    Sample,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from npu_vlrl.workflow.export import ExportStyle, export

_folders = tempfile.TemporaryDirectory(prefix="tiny_models_")
CPU = torch.device("cpu")
SMALL_LORA = LoraConfig(rank=2, alpha=4.0)


def tiny_folder(kind: str = "qwen2_5_vl") -> Path:
    """A model folder that the whole session shares; nobody writes into it."""
    folder = Path(_folders.name) / kind
    return folder if folder.exists() else write_tiny_model(kind, folder, seed=0, hidden=32)


def load(kind: str = "qwen2_5_vl", **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(path=str(tiny_folder(kind)), **settings), Path("unused"), 0, CPU)


def an_image(seed: int, width: int = 56, height: int = 28) -> Image:
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def make_learner(
    loaded: LoadedModel, algorithm: dict[str, Any] | None = None, kind: type[Learner] = Learner, **optim: Any
) -> Any:
    """A learner that trusts the made-up log-probabilities of `trajectory`, without KL unless asked for."""
    settings = AlgorithmConfig(**({"max_logprob_gap": 1e6, "kl_coef": 0.0} | (algorithm or {})))
    vision = VisionFeatures(loaded.policy, loaded.processor, 1 << 24)
    return kind(loaded.policy, vision, settings, OptimConfig(**({"lr": 1e-3} | optim)), 1.0, 10)


def assign_advantages(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> list[Sample]:
    """The samples with credit, without the estimator's metrics."""
    return algorithm.with_credit(samples)[0]


class Probe(Learner):
    """A learner that keeps the loss and the gradients of its last update instead of stepping."""

    loss: float
    gradients: dict[str, Tensor | None]

    def _apply(self, lr: float, skip: bool = False) -> float | None:
        self.gradients = {name: None if p.grad is None else p.grad.clone() for name, p in self.parameters.items()}
        self.optimizer.zero_grad(set_to_none=True)
        return None if skip else 0.0

    def measure(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        losses: list[float] = []

        def record(*arguments: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = original(*arguments, **options)
            losses.append(loss.item())
            return loss, metrics

        original = trainer.policy_loss
        with mock.patch.object(trainer, "policy_loss", record):
            self.step(samples)
        self.loss = sum(losses)
        return {name: gradient for name, gradient in self.gradients.items() if gradient is not None}


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest difference, relative to the largest entry of all."""
    assert first.keys() == second.keys() and first
    largest = max(float(gradient.abs().max()) for gradient in first.values())
    assert largest > 0
    return max(float((first[name] - second[name]).abs().max()) for name in first) / largest


# --- trajectories by hand --------------------------------------------------------------------------------------------


def context_segment(loaded: LoadedModel, kind: SegmentKind, text: str, images: Sequence[Image] = ()) -> Segment:
    """The images one after the other, then the text."""
    special = loaded.policy.special
    ids: list[int] = []
    inputs = []
    for image in images:
        assert loaded.processor is not None and special.image is not None
        assert special.vision_start is not None and special.vision_end is not None
        inputs.append(loaded.processor.describe(image))
        ids += [special.vision_start, *[special.image] * inputs[-1].n_tokens, special.vision_end]
    ids += loaded.tokenizer.encode(text, add_special_tokens=False)
    return Segment(kind, tuple(ids), special, images=tuple(inputs))


def trajectory(
    loaded: LoadedModel,
    seed: int,
    turns: Sequence[int] = (3, 4),
    images: Sequence[Image] = (),
    later_images: Sequence[Image] = (),
    group: str = "g0",
    rewards: Sequence[float] | None = None,
    cut: bool = False,
) -> Trajectory:
    """An episode whose turns have the given lengths. `images` stand in the prompt, `later_images` after turn 1."""
    rng = random.Random(seed)
    special, n = loaded.policy.special, loaded.policy.n_tokens
    usable = [i for i in range(n) if i not in special.placeholders]
    context = [context_segment(loaded, SegmentKind.PROMPT, "Which way is the top? " * rng.randint(1, 2), images)]
    done = []
    for index, length in enumerate(turns):
        if index:
            shown = later_images if index == 1 else ()
            context.append(context_segment(loaded, SegmentKind.OBSERVATION, "No. Try again.", shown))
        action = Segment(
            SegmentKind.ACTION,
            tuple(rng.choice(usable) for _ in range(length)),
            special,
            # about log(1/n), in steps of 1/64 so that float32 holds it exactly
            logprobs=tuple(-6.0 + rng.randint(-40, 40) / 64 for _ in range(length)),
            weight_versions=(0,) * length,
            stop_reason=StopReason.TURN_BUDGET if cut else StopReason.END_OF_TURN,
            reward=rewards[index] if rewards is not None else float(rng.randint(0, 2)),
        )
        done.append(Turn(tuple(context), action, ""))
        context.append(action)
    return Trajectory(Task(f"task/{seed}", (), None, "test"), group, seed, tuple(done), EpisodeStatus.MAX_TURNS)


def samples_of(
    loaded: LoadedModel, style: ExportStyle = "concat", with_images: bool = True, first_seed: int = 0
) -> list[Sample]:
    """Two groups of two: several turns, 1, 3 and 0 images, 8 + 4 + 4 + 16 trained tokens, advantages of both signs."""
    a, b, c = an_image(1), an_image(2, 28, 28), an_image(3, 84, 28)
    some, many = ((a,), (b, a, c)) if with_images else ((), ())
    made = [
        trajectory(loaded, first_seed, (3, 5), some, group="g0"),
        trajectory(loaded, first_seed + 1, (4,), some, group="g0"),
        trajectory(loaded, first_seed + 2, (1, 3), group="g1"),
        trajectory(loaded, first_seed + 3, (7, 4, 5), many[:1], later_images=many[1:], group="g1"),
    ]
    values = (1.5, -0.75, -2.0, 0.5, 1.25, -1.0, 0.25)
    exported = export(made, style, "sum", 0.5, "tiny")
    return [with_advantage(s, values[i % len(values)]) for i, s in enumerate(exported)]


def with_advantage(sample: Sample, advantage: float) -> Sample:
    """The same advantage on every scored token; the critic is not trained."""
    n = sample.n_scored
    return replace(sample, credit=Credit(np.full(n, advantage), np.zeros(n), np.zeros(n, dtype=bool)))


# --- the same from plain transformers --------------------------------------------------------------------------------


def plain_model(folder: Path) -> Any:
    """The model as any user of transformers gets it, with its own attention, masks and positions."""
    family = family_of_path(str(folder))
    assert family is not None, f"{folder} holds no model"
    made = AutoModelForCausalLM if family.vision is None else AutoModelForImageTextToText
    return made.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def plain_logits(model: Any, loaded: LoadedModel, samples: Sequence[Sample]) -> list[Tensor]:
    """Logits [T, V] of each sample: one batch, padded on the right, through the model's own forward."""
    longest = max(map(len, samples))
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = torch.tensor(sample.token_ids)
        mask[row, : len(sample)] = 1
    images = [image for sample in samples for image in sample.images]
    extra: dict[str, Any] = {}
    if images:
        assert loaded.processor is not None
        dtype = next(model.parameters()).dtype
        extra = {
            "pixel_values": torch.cat([loaded.processor.patches(image) for image in images]).to(dtype),
            "image_grid_thw": torch.tensor([image.grid for image in images]),
            "mm_token_type_ids": torch.eq(ids, loaded.policy.special.image or -1).long(),
        }
    logits = model(input_ids=ids, attention_mask=mask, **extra).logits
    return [logits[row, : len(sample)] for row, sample in enumerate(samples)]


def plain_logprobs(model: Any, loaded: LoadedModel, samples: Sequence[Sample]) -> list[tuple[Tensor, Tensor]]:
    """Log-probability and entropy [N] of the trained tokens of each sample, one token after the other."""
    found = []
    for sample, logits in zip(samples, plain_logits(model, loaded, samples), strict=True):
        logprobs, entropies = [], []
        position = 0
        for number, segment in enumerate(sample.segments):
            for token in segment.token_ids:
                if number in sample.trained:
                    allowed = logits[position - 1].clone()
                    allowed[sorted(loaded.policy.special.placeholders)] = -torch.inf
                    allowed[loaded.policy.n_tokens :] = -torch.inf
                    distribution = torch.distributions.Categorical(logits=allowed)
                    logprobs.append(distribution.log_prob(torch.tensor(token)))
                    entropies.append(distribution.entropy())
                position += 1
        found.append((torch.stack(logprobs), torch.stack(entropies)))
    return found


class _WideTorch(ModuleType):
    """`torch` for a module that casts to float32 where precision matters; here it casts to float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def float64_inside() -> Iterator[None]:
    """transformers' norms and rotary embeddings round to float32 inside; with a float64 model they do not, here.

    Positions become as wide as the frequencies: 5.10 multiplies the two as matrices, which must be of one type.
    """
    narrow = Tensor.float

    def keep_wide(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if tensor.dtype in (torch.float64, torch.int64):
            return tensor.double()
        return narrow(tensor, *arguments, **options)

    wide = _WideTorch("wide_torch")
    with (
        mock.patch.object(modeling_qwen2_5_vl, "torch", wide),
        mock.patch.object(modeling_qwen3, "torch", wide),
        mock.patch.object(modeling_qwen3_vl, "torch", wide),
        mock.patch.object(Tensor, "float", keep_wide),
    ):
        yield
