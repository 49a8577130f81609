"""Times episodes of several turns, with a new picture in each: our engine against transformers' generate.

    python -m benchmarks.rollout [--size 3b] [--episodes 64] [--turns 5] [--new 64] [--peer] [--peer-episodes 64]
        [--out results.json]

Pictures have random sides of 224 to 640 pixels, and every turn samples exactly `--new` tokens. The peer is what loops
around generate do: each turn reads the whole episode again, all its pictures included. Pictures are cut into patches
before the clock starts, for both. `--size tiny` is for a CPU, where only the counts mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode import dtype_of, new_engine, shown, sizes, step_limit, words
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
from benchmarks.transformers_peer import Work, as_installed, generate
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.hardware import Platform
from npu_vlrl.learner.flops import ModelFlops
from npu_vlrl.model.policy import Policy
from npu_vlrl.types import ImageInput, SamplingParams, Segment, SegmentKind
from npu_vlrl.workflow.base import action_segment

PATCH_BYTES = 8 << 30
"""Room for the patches of all pictures, so that none is cut twice."""


@dataclass(frozen=True)
class Workload:
    episodes: int
    turns: int
    new: int
    """Tokens sampled in a turn."""
    sides: tuple[int, int]
    """Smallest and largest side of a picture, in pixels."""
    words: int
    """Tokens of text that come with each picture."""


WORKLOADS = {"3b": Workload(64, 5, 64, (224, 640), 32), "tiny": Workload(3, 3, 4, (56, 112), 4)}

Script = list[Segment]
"""What the world says in an episode: a PROMPT and then an OBSERVATION a turn, each with a picture of its own."""


def scripts(made: Model, workload: Workload, seed: int) -> list[Script]:
    random = np.random.default_rng(seed)
    smallest, largest = workload.sides

    def said(kind: SegmentKind) -> Segment:
        width, height = random.integers(smallest, largest + 1, size=2).tolist()
        image = made.processor.describe(pictures(1, width, height, int(random.integers(2**31)))[0])
        special = made.policy.special
        return Segment(kind, (*shown(special, image), *words(made.policy, workload.words, random)), special, (image,))

    kinds = [SegmentKind.PROMPT] + [SegmentKind.OBSERVATION] * (workload.turns - 1)
    return [[said(kind) for kind in kinds] for _ in range(workload.episodes)]


def pictures_of(told: Sequence[Script]) -> list[ImageInput]:
    return [image for script in told for segment in script for image in segment.images]


def with_patches(made: Model, told: Sequence[Script]) -> tuple[Model, float]:
    """The model with a processor that has cut all pictures and keeps them, and the seconds that it took for one."""
    processor = replace(made.processor, cache_bytes=PATCH_BYTES)
    images = pictures_of(told)
    began = time.perf_counter()
    for image in images:
        processor.patches(image)
    return replace(made, processor=processor), (time.perf_counter() - began) / len(images)


def result(who: str, workload: Workload, counts: dict[str, int], taken: float, limit: float) -> dict[str, Any]:
    """A row of the table."""
    sampled = workload.episodes * workload.turns * workload.new
    return {
        "who": who,
        "episodes": workload.episodes,
        **counts,
        "tokens sampled": sampled,
        "seconds": taken,
        "sampled tokens/s": sampled / taken,
        "over limit": taken / limit,
    }


def floor(policy: Policy, told: Sequence[Script], new: int, reached: Limits) -> float:
    """Seconds that the device needs at least: every picture and token of the world once, and the steps of decoding.

    The last token of a turn is read with the next turn, so a turn of `new` tokens has `new - 1` steps of its own.
    """
    flops = ModelFlops(policy)
    lengths = context_lengths(told, new)
    products = flops.tower(pictures_of(told), train=False) + flops.head(lengths.size, train=False)
    for script, own in zip(told, lengths.tolist(), strict=True):
        for segment, context in zip(script, own, strict=True):
            read = len(segment)
            products += flops.layers(read, read * context - read * (read - 1) // 2, train=False)
    middle = lengths.mean(axis=0) + new / 2
    steps = sum((new - 1) * step_limit(sizes(policy), len(told), context, reached) for context in middle.tolist())
    return products / reached.flops + steps


def context_lengths(told: Sequence[Script], new: int) -> np.ndarray:
    """int [episodes, turns]: tokens that an episode has when each of its turns begins."""
    said = np.array([[len(segment) for segment in script] for script in told])
    return np.cumsum(said + new, axis=1) - new


# --- ours ------------------------------------------------------------------------------------------------------------


async def play(engine: InProcessEngine, told: Sequence[Script], new: int) -> list[list[Segment]]:
    """All episodes at once, each in a session of its own; returns what they became."""
    sessions = [engine.session() for _ in told]

    async def episode(number: int) -> list[Segment]:
        so_far: list[Segment] = []
        for turn, said in enumerate(told[number]):
            so_far.append(said)
            seed = number * len(told[number]) + turn
            answer = await sessions[number].generate(so_far, SamplingParams(new, seed=seed))
            assert len(answer.token_ids) == new, "nothing may end a turn earlier"
            so_far.append(action_segment(answer, engine.policy.special))
        sessions[number].close()
        return so_far

    return list(await asyncio.gather(*map(episode, range(len(told)))))


def ours(size: str, workload: Workload, reached: Limits, on: Platform) -> dict[str, Any]:
    """All is played twice: once to warm up, and once against the clock."""
    made = model(size, on.device(), dtype_of(size))
    told = scripts(made, workload, seed=0)
    made, cutting = with_patches(made, told)
    engine = new_engine(made, on)
    asyncio.run(play(engine, told, workload.new))
    engine.forget_features()
    earlier, encoded, referenced = replace(engine.counts), engine.vision.encoded, engine.vision.referenced
    reset_peak(on)
    taken = seconds(lambda: asyncio.run(play(engine, told, workload.new)), on, repeats=1, warm_up=0)
    counts = {
        "images referenced": engine.vision.referenced - referenced,
        "images encoded": engine.vision.encoded - encoded,
        "tokens requested": engine.counts.tokens_requested - earlier.tokens_requested,
        "tokens prefilled": engine.counts.tokens_prefilled - earlier.tokens_prefilled,
    }
    limit = floor(made.policy, told, workload.new, reached)
    return {
        **result("ours", workload, counts, taken, limit),
        "peak, GiB": peak_gib(on),
        "cut a picture, ms": 1e3 * cutting,
    }


# --- the peer --------------------------------------------------------------------------------------------------------


def peer(size: str, workload: Workload, reached: Limits, on: Platform) -> dict[str, Any]:
    with as_installed(size, on, dtype_of(size)) as made:
        told = scripts(made, workload, seed=0)
        made, cutting = with_patches(made, told)
        loop(made, [script[:1] for script in told[:2]], 2)  # warms up
        work = Work(made.policy.base)
        reset_peak(on)
        taken = seconds(lambda: loop(made, told, workload.new), on, repeats=1, warm_up=0)
        limit = floor(made.policy, told, workload.new, reached)
    counts = {
        "images referenced": work.images,
        "images encoded": work.images,
        "tokens requested": int(context_lengths(told, workload.new).sum()),
        "tokens prefilled": work.prefilled,
    }
    return {
        **result("generate", workload, counts, taken, limit),
        "peak, GiB": peak_gib(on),
        "cut a picture, ms": 1e3 * cutting,
    }


def loop(made: Model, told: Sequence[Script], new: int) -> list[tuple[list[int], list[ImageInput]]]:
    """All episodes at once by transformers, every turn from nothing; returns their tokens and pictures."""
    episodes: list[tuple[list[int], list[ImageInput]]] = [([], []) for _ in told]
    for turn in range(len(told[0])):
        for (ids, images), script in zip(episodes, told, strict=True):
            ids += script[turn].token_ids
            images += script[turn].images
        for (ids, _), answer in zip(episodes, generate(made, episodes, new), strict=True):
            ids += answer
    return episodes


# --- the benchmark ---------------------------------------------------------------------------------------------------


def measure(size: str, workload: Workload, peer_episodes: int | None) -> dict[str, Any]:
    """`peer_episodes` are the first ones, which the peer plays too; None leaves it out."""
    on = platform()
    reached = limits(on, dtype_of(size))
    rows = [ours(size, workload, reached, on)]
    if peer_episodes is not None:
        rows.append(peer(size, replace(workload, episodes=peer_episodes), reached, on))
    for row in rows:
        row["times as long"] = row["seconds"] / row["episodes"] * workload.episodes / rows[0]["seconds"]
    about = {"size": size, "dtype": str(dtype_of(size)), "turns": workload.turns, "new": workload.new}
    return {**environment(on), **about, "rollout": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--peer", action="store_true", help="time transformers' generate as well")
    parser.add_argument("--peer-episodes", type=int, help="how many of the episodes the peer plays")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    usual = WORKLOADS[given.size]
    workload = replace(
        usual,
        episodes=given.episodes or usual.episodes,
        turns=given.turns or usual.turns,
        new=given.new or usual.new,
    )
    peer_episodes = min(given.peer_episodes or workload.episodes, workload.episodes)
    results = measure(given.size, workload, peer_episodes if given.peer else None)
    print(f"{results['device']}, {results['dtype']}; {workload.turns} turns of {workload.new} tokens:")
    print(table(results["rollout"]))
    if given.peer and peer_episodes < workload.episodes:
        print(
            f"The peer played {peer_episodes} of {workload.episodes} episodes; the ratio is that of seconds an episode."
        )
    found = importlib.util.find_spec("vllm") is not None
    print(f"vLLM is {'installed, but' if found else 'not installed, so'} it is not compared.")
    write(given.out, results)


if __name__ == "__main__":
    main()
