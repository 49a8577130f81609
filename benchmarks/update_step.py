"""Times one update (forward, backward, clip, AdamW) on frozen rollouts, beside TRL's on the same tokens.

    python -m benchmarks.update_step [--size 3b|tiny] [--peer] [--ablate] [--out FILE] [--micro-batch-tokens N]
        [--prompts 8] [--group 8] [--freeze-vision] [--no-checkpointing] [--peer-groups 2] [--repeats 3]

`3b` is a Qwen2.5-VL-3B with random weights in bfloat16: 8 prompts of 128 text tokens and a 640x480 picture, each with
8 responses of 64 to 1024 tokens. `tiny` is for the counts, on a CPU. What is timed is `Learner.step`, planning and
packing included. `--ablate` takes one lever away at a time. `--peer` needs trl (requirements-bench.txt): loss and
gradients of a small batch are compared, then TRL is timed with the fused attention that we use, and as installed. The
latter takes a minute at this size, so the first `--peer-groups` groups are timed and stand for the others.

Prints counts, seconds, and the floor: the multiplications that no implementation can leave out at the rate of a large
product, and the bytes of AdamW at the rate of a large copy, both measured in the same run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks import setup
from benchmarks.update_floor import Work, floor
from npu_vlrl import kernels
from npu_vlrl.config import AlgorithmConfig, OptimConfig
from npu_vlrl.hardware import Platform
from npu_vlrl.kernels import table
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.learner import pack
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.learner.tree import Shared
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Sample, Scores, Segment, SegmentKind, SpecialTokens, StopReason

ALGORITHM = AlgorithmConfig(preset="grpo", kl_coef=0.0, aggregation="token-mean", max_logprob_gap=100.0)
"""TRL's defaults: no reference, and the mean over all tokens. Frozen rollouts need no guard."""
COMPARED = (
    "language_model.layers.0.self_attn.q_proj.weight",
    "language_model.layers.1.mlp.gate_proj.weight",
    "language_model.norm.weight",
    "visual.blocks.0.attn.qkv.weight",
    "visual.merger.mlp.0.weight",
)
"""Parameters whose gradients are compared with the peer's, by the ends of their names."""
DRIFT = 0.02
"""Standard deviation, in nats, of what the rollouts' logprobs are off: with ratios of 1 the loss would tell nothing."""
CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Shape:
    """Sizes of the rollouts, in tokens and pixels."""

    text: int
    """Before the picture, and as many behind it."""
    shortest: int
    longest: int
    """Of a response; lengths are lognormal around the geometric mean."""
    width: int
    height: int
    micro_batch_tokens: int


SHAPES = {"3b": Shape(64, 64, 1024, 640, 480, 24576), "tiny": Shape(4, 4, 32, 112, 84, 256)}


# --- frozen rollouts -------------------------------------------------------------------------------------------------


def rollouts(model: setup.Model, shape: Shape, prompts: int, group: int, seed: int = 0) -> list[Sample]:
    """Samples of random tokens with advantages, their logprobs those of the policy as it is, up to `DRIFT`.

    The members of a group begin with different tokens, so that nothing but the prompt is shared by chance.
    """
    random = np.random.default_rng(seed)
    special = model.policy.special
    known = (*special.placeholders, *special.end_of_turn, special.vision_start, special.vision_end)
    highest = min(token for token in known if token is not None)
    median = (shape.shortest * shape.longest) ** 0.5
    samples = []
    for number, picture in enumerate(setup.pictures(prompts, shape.width, shape.height, seed)):
        image = model.processor.describe(picture)
        before, behind = random.integers(highest, size=(2, shape.text)).tolist()
        middle: list[Any] = [special.vision_start, *[special.image] * image.n_tokens, special.vision_end]
        prompt = Segment(SegmentKind.PROMPT, (*before, *middle, *behind), special, images=(image,))
        lengths = random.lognormal(np.log(median), 0.7, group).clip(shape.shortest, shape.longest).astype(int)
        for member, length in enumerate(lengths.tolist()):
            ids = (member, *random.integers(highest, size=length - 1).tolist())
            samples.append(_sample(f"g{number}", member, prompt, ids, [0.0] * length, special, random.normal()))
    return ALGORITHM.with_credit(_with_logprobs(samples, model, shape.micro_batch_tokens, random))[0]


def _sample(
    group: str,
    member: int,
    prompt: Segment,
    ids: Sequence[int],
    logprobs: Sequence[float],
    special: SpecialTokens,
    reward: float,
) -> Sample:
    action = Segment(
        SegmentKind.ACTION,
        tuple(ids),
        special,
        logprobs=tuple(logprobs),
        weight_versions=(0,) * len(ids),
        stop_reason=StopReason.TURN_BUDGET,
    )
    name = f"{group}/{member}"
    return Sample(name, group, (prompt, action), (1,), reward=reward, outcome=reward, episode=name)


def _with_logprobs(
    samples: Sequence[Sample], model: setup.Model, room: int, random: np.random.Generator
) -> list[Sample]:
    anchored = AlgorithmConfig(**{**ALGORITHM.model_dump(exclude_unset=True), "loss": "decoupled_ppo"})
    found = []
    for sample in learner(model, room, anchored).score(samples):
        prompt, action = sample.segments
        assert sample.scores.proximal_N is not None
        logprobs = sample.scores.proximal_N + random.normal(0, DRIFT, len(action))
        said = replace(action, special=model.policy.special, logprobs=tuple(logprobs.tolist()))
        found.append(replace(sample, segments=(prompt, said), scores=Scores()))
    return found


# --- our update, and what it is without a lever ----------------------------------------------------------------------

LEVERS = (
    "prefix sharing",
    "image dedupe",
    "fused vision attention",
    "fused tree attention",
    "fused logprob",
    "fused small ops",
    "checkpointing",
)
"""Each is taken away alone; of `checkpointing` the other setting is measured."""
OPS = {
    "fused tree attention": ("tree_attention",),
    "fused logprob": ("logprob_entropy",),
    "fused small ops": ("rms_norm", "rotary", "swiglu", "patch_embed"),
}
"""Ops whose definition then runs in place of the platform's implementation."""


def learner(model: setup.Model, micro_batch_tokens: int, algorithm: AlgorithmConfig = ALGORITHM) -> Learner:
    vision = VisionFeatures(model.policy, model.processor, CACHE_BYTES)
    optim = OptimConfig(micro_batch_tokens=micro_batch_tokens)
    return Learner(model.policy, vision, algorithm, optim, temperature=1.0, total_steps=1000)


def update(ours: Learner, samples: Sequence[Sample]) -> dict[str, float]:
    """One update; the metrics of `Learner.step`."""
    metrics = ours.step(samples)
    assert not metrics["skipped_updates"], "something was not finite"
    ours.vision.weights_changed()
    return metrics


def applies(lever: str, policy: Policy) -> bool:
    """Whether there is something to take away: a frozen tower's features are kept, and a CPU has no fused ops."""
    if lever in ("image dedupe", "fused vision attention"):
        return not policy.vision_is_frozen
    return lever not in OPS or any(kernels.active()[name] != table.REFERENCE for name in OPS[lever])


@contextmanager
def without(lever: str, model: setup.Model, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Within it one lever is off; yields the samples to train on. The result of the update stays the same."""
    hf, config, chosen = model.policy.model, model.policy.base.config.vision_config, list(samples)
    with ExitStack() as undo:
        if lever == "prefix sharing":
            undo.enter_context(patch.object(pack, "share", unshared))
            chosen = [replace(sample, group=sample.id) for sample in samples]
        elif lever == "image dedupe":
            undo.enter_context(patch.object(pack, "collate", partial(every_reference, pack.collate)))
        elif lever == "fused vision attention":
            undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = "sdpa"
        elif lever == "checkpointing":
            undo.callback(checkpoint, hf, hf.is_gradient_checkpointing)
            checkpoint(hf, not hf.is_gradient_checkpointing)
        else:
            for name in OPS[lever]:
                definition = table.reference_of(name)
                undo.enter_context(patch.dict(table._table[name], dict.fromkeys(table.PLATFORMS, definition)))
        yield chosen


def unshared(sequences: Sequence[np.ndarray]) -> Shared:
    """In place of `tree.share`: sequences head to tail, whatever they begin with."""
    bounds = np.cumsum([0, *map(len, sequences)])
    places = tuple(np.arange(a, b) for a, b in zip(bounds, bounds[1:], strict=False))
    return Shared(places, Tree.of_sequences(bounds.tolist()))


def every_reference(
    collate: Callable[[Sequence[Sample], Policy], pack.MicroBatch], samples: Sequence[Sample], policy: Policy
) -> pack.MicroBatch:
    """In place of `collate`: the pictures of every sample are encoded, and the first encoding of each is used."""
    batch = collate(samples, policy)
    images = tuple(image for sample in samples for image in sample.images)
    order = tuple(images.index(batch.images[i]) for i in batch.image_order)
    return replace(batch, images=images, image_order=order)


def checkpoint(model: Any, on: bool) -> None:
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


# --- the runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exact:
    """A small update in float32, for the comparison of results, and what came out of ours."""

    samples: list[Sample]
    loss: float
    gradients: dict[str, Tensor]
    """On the host."""


def exact(options: argparse.Namespace, on: Platform) -> Exact:
    """In bfloat16 rounding alone makes TRL with one attention differ from TRL with another."""
    shape = SHAPES[options.size]
    model = _model(options, on, torch.float32)
    samples = rollouts(model, shape, 2, min(4, options.group), seed=1)
    ours = learner(model, shape.micro_batch_tokens)
    with setup.gradients(model.policy, COMPARED) as found:
        loss = update(ours, samples)["pg_loss"]
    return Exact(samples, loss, {name: gradient.cpu() for name, gradient in found.items()})


def _model(options: argparse.Namespace, on: Platform, dtype: torch.dtype) -> setup.Model:
    model = setup.model(options.size, on.device(), dtype, options.freeze_vision, options.checkpointing)
    model.policy.forbidden_V.zero_()  # TRL knows no ids that may not be sampled
    return model


def run_ours(options: argparse.Namespace, on: Platform, dtype: torch.dtype) -> tuple[dict[str, Any], list[Sample]]:
    shape, model = SHAPES[options.size], _model(options, on, dtype)
    samples = rollouts(model, shape, options.prompts, options.group)
    ours = learner(model, options.micro_batch_tokens or shape.micro_batch_tokens)

    def row(name: str, chosen: Sequence[Sample]) -> dict[str, Any]:
        found = setup.measure(name, lambda: update(ours, chosen), on, model.policy, options.repeats)
        ours.optimizer.zero_grad(set_to_none=True)  # what is left where the memory ran out
        return found

    rows = [row("ours", samples)]
    for lever in LEVERS if options.ablate else ():
        if applies(lever, model.policy):
            with without(lever, model, samples) as chosen:
                rows.append(row(title(lever, options.checkpointing), chosen))
    work, reached = Work.of(samples), setup.limits(on, dtype)
    results = {
        "work": {name: getattr(work, name) for name in ("referenced", "tokens", "trained", "patches")},
        "limits": asdict(reached),
        "floor": floor(model.policy, work, reached),
        "rows": rows,
    }
    return results, samples


def title(lever: str, checkpointing: bool) -> str:
    if lever != "checkpointing":
        return f"without {lever}"
    return "without checkpointing" if checkpointing else "with checkpointing"


def shown(results: dict[str, Any]) -> str:
    """The table: counts first, then seconds, then what they are compared with."""
    ours, work, least = results["rows"][0]["seconds"], results["work"], results["floor"]
    limit = least["seconds_with_recomputation" if results["options"]["checkpointing"] else "seconds"]
    lines = []
    for row in results["rows"]:
        taken = row["seconds"]
        lines.append(
            {
                "update": row["name"],
                "images": row["images"],
                "patches": row["patches"],
                "tokens, layers": row["tokens"],
                "tokens, head": work["trained"],
                "seconds": taken or "out of memory",
                "tokens/s": taken and work["referenced"] / taken,
                "peak GiB": row["peak_gib"],
                "times ours": taken and ours and taken / ours,
                "times floor": taken and taken / limit,
            }
        )
    return setup.table(lines)


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b", choices=list(SHAPES))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--micro-batch-tokens", type=int, help="default: 24576 for 3b, 256 for tiny")
    parser.add_argument("--freeze-vision", action="store_true")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-groups", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    on = setup.platform()
    dtype = torch.float32 if on.memory() is None else torch.bfloat16
    given = {name: value for name, value in vars(options).items() if name != "out"}
    results = {**setup.environment(on), "dtype": str(dtype), "options": given}
    if options.peer:  # another install: only who asks for it needs it
        peer = importlib.import_module("benchmarks.update_peer")
        results["check"] = peer.check(options, on, exact(options, on))
        setup.forget(on)
    found, samples = run_ours(options, on, dtype)
    results |= found
    setup.forget(on)
    if options.peer:
        results["rows"] += peer.run(options, on, dtype, samples)
    print(shown(results))
    told = ("work", "limits", "floor", "check")
    print(json.dumps({name: value for name, value in results.items() if name in told}, indent=1))
    setup.write(options.out, results)
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
