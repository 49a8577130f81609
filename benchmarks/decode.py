"""Times a decoding step of the engine: against the device's memory, and against transformers' generate.

    python -m benchmarks.decode [--size 3b] [--batch 8 32 64 128] [--context 1200] [--new 64] [--peer]
        [--out results.json]

Rows of random prompts, all different, decode `--new` tokens each; nothing ends earlier. What a step takes is the
difference between rounds of `--new` tokens and of one, so reading the prompts is left out. The log-probabilities of
the engine are compared with those of the learner's forward pass, for texts and for prompts with a picture.
`--size tiny` is for a CPU, where the seconds mean nothing.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.setup import (
    SIZES,
    Limits,
    Model,
    environment,
    limits,
    model,
    peak_gib,
    pictures,
    platform,
    reset_peak,
    seconds,
    table,
    write,
)
from benchmarks.transformers_peer import as_installed, generate
from npu_vlrl.config import AlgorithmConfig, OptimConfig
from npu_vlrl.engines.base import Request
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.hardware import Platform
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Generation, ImageInput, Sample, SamplingParams, Segment, SegmentKind, SpecialTokens
from npu_vlrl.workflow.base import action_segment

FEATURE_BYTES = 4 << 30
"""Memory for vision features."""
MICRO_BATCH_TOKENS = 16384


@dataclass(frozen=True)
class Workload:
    batches: tuple[int, ...]
    context: int
    """Tokens of each prompt."""
    new: int
    """Tokens that each row samples."""
    side: int
    """Width and height of the picture of a prompt that has one, in pixels."""


WORKLOADS = {"3b": Workload((8, 32, 64, 128), 1200, 64, 896), "tiny": Workload((2, 4), 24, 5, 56)}


def dtype_of(size: str) -> torch.dtype:
    return torch.float32 if size == "tiny" else torch.bfloat16


# --- the engine ------------------------------------------------------------------------------------------------------


def new_engine(made: Model, on: Platform) -> InProcessEngine:
    """An engine of the same weights whose turns are never cut short: their end is an id that is never drawn."""
    policy = copy.copy(made.policy)
    assert policy.special.image is not None
    policy.special = replace(policy.special, end_of_turn=(policy.special.image,))
    vision = VisionFeatures(policy, made.processor, FEATURE_BYTES)
    return InProcessEngine(policy, vision, new_capture=on.graph_capture)


def words(policy: Policy, count: int, random: np.random.Generator) -> tuple[int, ...]:
    """Random ids that are no control tokens."""
    special = policy.special
    control = (*special.end_of_turn, special.image, special.video, special.vision_start, special.vision_end)
    return tuple(random.integers(min(i for i in control if i is not None), size=count).tolist())


def shown(special: SpecialTokens, image: ImageInput) -> tuple[int, ...]:
    """The ids of a picture."""
    assert special.image is not None and special.vision_start is not None and special.vision_end is not None
    return (special.vision_start, *(special.image,) * image.n_tokens, special.vision_end)


def requests(made: Model, batch: int, workload: Workload, with_pictures: bool, seed: int = 0) -> list[Request]:
    """Prompts of `context` tokens for the sessions 0, 1, …; with pictures, one at the beginning of each.

    Raises ValueError when a picture does not fit into the context.
    """
    random = np.random.default_rng(seed)
    images: list[tuple[ImageInput, ...]] = [()] * batch
    if with_pictures:
        images = [(made.processor.describe(p),) for p in pictures(batch, workload.side, workload.side, seed)]
    asked = []
    for row, own in enumerate(images):
        seen = tuple(token for image in own for token in shown(made.policy.special, image))
        if len(seen) >= workload.context:
            raise ValueError(f"a picture of {len(seen)} tokens leaves no room in --context {workload.context}")
        ids = (*seen, *words(made.policy, workload.context - len(seen), random))
        asked.append(Request(row, ids, own, SamplingParams(workload.new, seed=seed + row)))
    return asked


def play(engine: InProcessEngine, asked: Sequence[Request], new: int) -> list[Generation]:
    """A round of `new` tokens in every row, of sessions that are over afterwards. Raises what a row failed with."""
    outcomes = engine.sample([replace(one, sampling=replace(one.sampling, max_new_tokens=new)) for one in asked])
    for one in asked:
        engine.forget_session(one.session)
    generations = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        assert len(outcome.token_ids) == new, "nothing may end a row earlier"
        generations.append(outcome)
    return generations


def logprob_gap(made: Model, asked: Sequence[Request], generations: Sequence[Generation]) -> tuple[float, float]:
    """Largest and mean |engine - learner| log-probability of the sampled tokens, in nats."""
    samples = samples_of(asked, generations, made.policy.special)
    # a correction wants the log-probabilities of the policy as it is
    config = AlgorithmConfig(preset="grpo", kl_coef=0.0, correction="tis")
    vision = VisionFeatures(made.policy, made.processor, FEATURE_BYTES)
    optim = OptimConfig(micro_batch_tokens=MICRO_BATCH_TOKENS)
    learner = Learner(made.policy, vision, config, optim, temperature=1.0, total_steps=1)
    found = [sample.scores.proximal_N for sample in learner.score(samples)]
    told_N = np.concatenate([told.logprobs for told in generations])
    gap_N = np.abs(np.concatenate([values for values in found if values is not None]) - told_N)
    return float(gap_N.max()), float(gap_N.mean())


def samples_of(asked: Sequence[Request], generations: Sequence[Generation], special: SpecialTokens) -> list[Sample]:
    """A sample of each turn of a round, in order."""
    samples = []
    for one, told in zip(asked, generations, strict=True):
        name = str(one.session)
        prompt = Segment(SegmentKind.PROMPT, one.token_ids, special, one.images)
        samples.append(Sample(name, name, (prompt, action_segment(told, special)), (1,), 0.0, 0.0, name))
    return samples


# --- limits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What the limit of a decoding step is made of."""

    weights: int
    """Parameters that every token is multiplied with, those of the head included."""
    kept: int
    """Bytes of keys and values of a token."""
    attention: int
    """Operations for each key that a token looks at."""
    width: int
    """Bytes of a parameter."""


def sizes(policy: Policy) -> Sizes:
    head = policy.head_weight
    layers = [layer.self_attn for layer in policy.text.layers]
    return Sizes(
        weights=head.numel() + sum(m.weight.numel() for m in policy.text.modules() if isinstance(m, nn.Linear)),
        kept=2 * head.element_size() * sum(layer.k_proj.out_features for layer in layers),
        attention=4 * sum(layer.q_proj.out_features for layer in layers),
        width=head.element_size(),
    )


def step_limit(of: Sizes, batch: int, context: float, reached: Limits) -> float:
    """Seconds of a decoding step of `batch` rows with `context` tokens each: weights, keys and values are read once, or
    the products are done, whichever takes longer.
    """
    memory = (of.width * of.weights + batch * context * of.kept) / reached.bandwidth
    return max(memory, batch * (2 * of.weights + of.attention * context) / reached.flops)


# --- the benchmark ---------------------------------------------------------------------------------------------------


def timed(run: Callable[[int], object], new: int, on: Platform, repeats: int) -> tuple[float, float]:
    """Seconds until the first token, and seconds of a decoding step, of which `new` tokens take `new - 1`."""
    first = seconds(lambda: run(1), on, repeats)
    return first, (seconds(lambda: run(new), on, repeats) - first) / (new - 1)


def exactness(made: Model, engine: InProcessEngine, workload: Workload) -> list[dict[str, Any]]:
    rows = []
    for kind in ("text", "picture"):
        asked = requests(made, workload.batches[0], workload, with_pictures=kind == "picture")
        largest, mean = logprob_gap(made, asked, play(engine, asked, workload.new))
        rows.append({"prompts": kind, "rows": len(asked), "largest gap": largest, "mean gap": mean})
    return rows


def ours(
    size: str, workload: Workload, on: Platform, repeats: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the table, with text for every batch and with pictures for the first; and how exact the engine is."""
    reached = limits(on, dtype_of(size))
    made = model(size, on.device(), dtype_of(size))
    engine = new_engine(made, on)
    cases = [(batch, "text") for batch in workload.batches] + [(workload.batches[0], "picture")]
    rows = []
    for batch, kind in cases:
        asked = requests(made, batch, workload, with_pictures=kind == "picture")
        reset_peak(on)
        first, step = timed(lambda new, asked=asked: play(engine, asked, new), workload.new, on, repeats)  # type: ignore[misc]
        limit = step_limit(sizes(made.policy), batch, workload.context + workload.new / 2, reached)
        rows.append(
            {
                "prompts": kind,
                "batch": batch,
                "first token, s": first,
                "step, ms": 1e3 * step,
                "tokens/s": batch / step,
                "limit, ms": 1e3 * limit,
                "over limit": step / limit,
                "peak, GiB": peak_gib(on),
            }
        )
    return rows, exactness(made, engine, workload)


def peer(size: str, workload: Workload, on: Platform, repeats: int) -> list[float]:
    """Seconds of a decoding step of transformers' generate, for each batch."""
    steps = []
    with as_installed(size, on, dtype_of(size)) as made:
        for batch in workload.batches:
            contexts = [(one.token_ids, one.images) for one in requests(made, batch, workload, with_pictures=False)]

            def run(new: int, contexts: Any = contexts) -> object:
                return generate(made, contexts, new)

            steps.append(timed(run, workload.new, on, repeats)[1])
    return steps


def measure(size: str, workload: Workload, with_peer: bool, repeats: int = 3) -> dict[str, Any]:
    on = platform()
    rows, exact = ours(size, workload, on, repeats)
    found = [*peer(size, workload, on, 1)] if with_peer else [None] * len(workload.batches)
    for row, step in zip(rows, [*found, None], strict=True):
        row["generate, ms"] = None if step is None else 1e3 * step
        row["generate over ours"] = None if step is None else 1e3 * step / row["step, ms"]
    about = {"size": size, "dtype": str(dtype_of(size)), "context": workload.context, "new": workload.new}
    return {**environment(on), **about, "exactness": exact, "decode": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--context", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--peer", action="store_true", help="time transformers' generate as well")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    usual = WORKLOADS[given.size]
    batches = tuple(given.batch or usual.batches)
    workload = replace(usual, batches=batches, context=given.context or usual.context, new=given.new or usual.new)
    results = measure(given.size, workload, given.peer)
    print(f"{results['device']}, {results['dtype']}; log-probabilities of the engine against the learner's, in nats:")
    print(table(results["exactness"]))
    print(f"\n{workload.new} tokens after {workload.context}:")
    print(table(results["decode"]))
    write(given.out, results)


if __name__ == "__main__":
    main()
