"""Times whole steps of GRPO on one device: sampling, the update, and TRL doing the same.

    python -m benchmarks.grpo_step [--size 3b] [--prompts 4] [--members 8] [--new 128] [--steps 3] [--peer]
        [--peer-steps 1] [--out results.json]

Every prompt has a picture of 896x896 pixels, which are 1024 tokens; every response has exactly `--new` tokens. All
parameters are trained, with checkpointing. Rewards are random. Each step has new pictures, and cutting them into
patches is part of it. `--peer` needs requirements-bench.txt: TRL's GRPOTrainer with transformers' generate, by its own
defaults. `--size tiny` is for a CPU, where only the counts mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image as PilImage
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    TrainerCallback,
)
from transformers.utils import is_torchvision_available

from benchmarks import update_floor
from benchmarks.decode import MICRO_BATCH_TOKENS, dtype_of, new_engine, sizes, step_limit
from benchmarks.setup import (
    QWEN_SPECIAL,
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
    table,
    write,
)
from benchmarks.transformers_peer import Work, as_installed
from npu_vlrl.config import AlgorithmConfig, OptimConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.hardware import Platform
from npu_vlrl.learner.flops import ModelFlops
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.tiny import tiny_tokenizer
from npu_vlrl.types import Message, Sample, SamplingParams, Segment
from npu_vlrl.workflow.base import action_segment
from npu_vlrl.workflow.render import Renderer

ALGORITHM = AlgorithmConfig(preset="grpo", kl_coef=0.0, max_logprob_gap=1.0)
"""No reference, as TRL does without being asked. The gap is reported; weights of bfloat16 that were never trained may
have a larger one than real ones."""


@dataclass(frozen=True)
class Workload:
    prompts: int
    members: int
    new: int
    side: int
    """Width and height of each picture, in pixels."""
    text: str
    """What is asked about each picture."""


WORKLOADS = {"3b": Workload(4, 8, 128, 896, "Which way is up? " * 7), "tiny": Workload(2, 4, 6, 56, "Which way is up?")}


@dataclass(frozen=True)
class Seconds:
    """Of a step."""

    rollout: float
    update: float


# --- tokens ----------------------------------------------------------------------------------------------------------


def tokenizer(size: str) -> Qwen2Tokenizer:
    """One with the ids of the model: bytes, and Qwen's control tokens where the published tokenizer has them."""
    if size == "tiny":
        return tiny_tokenizer(FAMILIES["qwen2_5_vl"])
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    control += [f"<|{name}_{side}|>" for name in ("object_ref", "box", "quad") for side in ("start", "end")]
    control += ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    first = QWEN_SPECIAL.end_of_turn[1]
    ids = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=ids | {f"<{i}>": i for i in range(len(ids), first)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(control)
    made = Qwen2Tokenizer(
        tokenizer_object=bpe,
        unk_token=None,  # type: ignore[arg-type]  # a byte-level BPE knows every byte
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=control[1:],
    )
    made.chat_template = FAMILIES["qwen2_5_vl"].tiny_template
    return made


def prompts(renderer: Renderer, workload: Workload, seed: int) -> list[Segment]:
    """The prompts of a step."""
    opened = [
        renderer.open([Message("user", (picture, workload.text))])
        for picture in pictures(workload.prompts, workload.side, workload.side, seed)
    ]
    return [conversation.context[0] for conversation in opened]


# --- ours ------------------------------------------------------------------------------------------------------------


async def sample(engine: InProcessEngine, asked: Sequence[Segment], workload: Workload, step: int) -> list[Sample]:
    """A group for each prompt, with random rewards."""
    places = [(group, member) for group in range(len(asked)) for member in range(workload.members)]
    rewards = np.random.default_rng(step).random((len(asked), workload.members)).tolist()
    sessions = [engine.session() for _ in places]

    async def episode(number: int) -> Sample:
        group, member = places[number]
        sampling = SamplingParams(workload.new, seed=step * len(places) + number)
        answer = await sessions[number].generate([asked[group]], sampling)
        sessions[number].close()
        assert len(answer.token_ids) == workload.new, "nothing may end a response earlier"
        segments, reward = (asked[group], action_segment(answer, engine.policy.special)), rewards[group][member]
        name = f"{step}/{group}/{member}"
        return Sample(name, f"{step}/{group}", segments, (1,), reward, reward, name)

    return list(await asyncio.gather(*map(episode, range(len(places)))))


def train(
    engine: InProcessEngine, learner: Learner, asked: Sequence[Segment], workload: Workload, step: int, on: Platform
) -> tuple[Seconds, dict[str, float]]:
    """A whole step; returns its seconds and what the learner says of it."""
    on.synchronize()
    began = time.perf_counter()
    samples = asyncio.run(sample(engine, asked, workload, step))
    on.synchronize()
    sampled = time.perf_counter()
    metrics = learner.step(learner.algorithm.with_credit(samples)[0])
    engine.weights_changed(step + 1)
    on.synchronize()
    assert not metrics["skipped_updates"], "something was not finite"
    return Seconds(sampled - began, time.perf_counter() - sampled), metrics


def new_learner(made: Model, engine: InProcessEngine, steps: int) -> Learner:
    """It shares the engine's vision features."""
    optim = OptimConfig(micro_batch_tokens=MICRO_BATCH_TOKENS)
    return Learner(made.policy, engine.vision, ALGORITHM, optim, temperature=1.0, total_steps=steps)


def ours(size: str, workload: Workload, steps: int, on: Platform) -> dict[str, Any]:
    """The row of the table; the step before those that are timed warms up."""
    reached = limits(on, dtype_of(size))
    made = model(size, on.device(), dtype_of(size), checkpointing=True)
    engine = new_engine(made, on)
    learner = new_learner(made, engine, steps + 1)
    renderer = Renderer(tokenizer(size), made.processor)
    given = [prompts(renderer, workload, seed) for seed in range(steps + 1)]
    train(engine, learner, given[0], workload, 0, on)
    reset_peak(on)
    before = counts(engine, learner)
    done = [train(engine, learner, asked, workload, step, on) for step, asked in enumerate(given[1:], start=1)]
    after = counts(engine, learner)
    whole = statistics.median(one.rollout + one.update for one, _ in done)
    rollout, update = floor(made.policy, given[1], workload, reached)
    return {
        "who": "ours",
        **{name: (after[name] - before[name]) // steps for name in after},
        "seconds": whole,
        "rollout, s": statistics.median(one.rollout for one, _ in done),
        "update, s": statistics.median(one.update for one, _ in done),
        "limit of rollout, s": rollout,
        "limit of update, s": update,
        "over limit": whole / (rollout + update),
        "peak, GiB": peak_gib(on),
        "largest logprob gap": max(metrics["logprob_gap"] for _, metrics in done),
    }


def counts(engine: InProcessEngine, learner: Learner) -> dict[str, int]:
    """Work so far. The sampled tokens are those that the layers read: a response's last token is never read."""
    told = engine.counts
    read = told.tokens_prefilled + told.tokens_decoded - told.turns
    return {
        "images encoded": engine.vision.encoded,
        "tokens, rollout": read,
        "tokens, update": int(learner.meter.counts.tokens_computed),
    }


def floor(policy: Policy, asked: Sequence[Segment], workload: Workload, reached: Limits) -> tuple[float, float]:
    """Seconds that the device needs at least for the rollout and for the update, in which layers are computed again."""
    flops = ModelFlops(policy)
    lengths = [len(prompt) for prompt in asked]
    images = tuple(image for prompt in asked for image in prompt.images)
    products = flops.tower(images, train=False)
    products += sum(flops.layers(n, n * (n + 1) // 2, train=False) + flops.head(1, train=False) for n in lengths)
    context = statistics.mean(lengths) + workload.new / 2
    batch = workload.prompts * workload.members
    decoding = (workload.new - 1) * step_limit(sizes(policy), batch, context, reached)
    responses = ((workload.new,) * workload.members,) * len(asked)
    work = update_floor.Work(tuple(lengths), responses, images)
    return (
        products / reached.flops + decoding,
        update_floor.floor(policy, work, reached)["seconds_with_recomputation"],
    )


# --- the peer --------------------------------------------------------------------------------------------------------


class ImagesOnly(Qwen2_5_VLProcessor):
    """transformers' processor without its part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)


def peer_processor(settings: ImageProcessor, words: PreTrainedTokenizerBase) -> ImagesOnly:
    """The same preprocessing by transformers, with torchvision where it is installed, as AutoProcessor chooses."""
    name = "Qwen2VLImageProcessor" if is_torchvision_available() else "Qwen2VLImageProcessorPil"
    cutter = getattr(transformers, name)(
        patch_size=settings.patch_size,
        temporal_patch_size=settings.temporal_patch_size,
        merge_size=settings.merge_size,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        image_mean=list(settings.mean),
        image_std=list(settings.std),
    )
    return ImagesOnly(cutter, words, chat_template=words.chat_template)


class StepClock(TrainerCallback):
    """Seconds of each step: from before its prompts are sampled until its weights are there."""

    def __init__(self, on: Platform) -> None:
        self.on = on
        self.taken: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.on.synchronize()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.on.synchronize()
        self.taken.append(time.perf_counter() - self._began)


def peer(size: str, workload: Workload, steps: int, on: Platform) -> dict[str, Any]:
    """The row of TRL; the step before those that are timed warms up. Raises SystemExit when it is not installed."""
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise SystemExit(f"--peer needs requirements-bench.txt ({error}); install it, or run without --peer") from error

    random = np.random.default_rng(0)

    def reward(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [float(value) for value in random.random(len(completions))]

    small = on.memory() is None
    rows = [
        {"prompt": [{"role": "user", "content": workload.text}], "image": PilImage.fromarray(picture.rgb)}
        for seed in range(steps + 1)
        for picture in pictures(workload.prompts, workload.side, workload.side, seed)
    ]
    clock = StepClock(on)
    with (
        as_installed(size, on, dtype_of(size)) as made,
        tempfile.TemporaryDirectory(prefix="trl_") as folder,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=workload.members,
            gradient_accumulation_steps=workload.prompts,
            num_generations=workload.members,
            max_completion_length=workload.new,
            generation_kwargs={
                "min_new_tokens": workload.new,
                "suppress_tokens": sorted(made.policy.special.placeholders),
            },
            shuffle_dataset=False,
            max_steps=steps + 1,
            use_cpu=small,
            bf16=not small,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        processor = peer_processor(made.processor, tokenizer(size))
        data = Dataset.from_list(rows)
        trainer = GRPOTrainer(made.policy.model, reward, settings, data, processing_class=processor, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        work = Work(made.policy.base)
        reset_peak(on)
        trainer.train()
    whole = statistics.median(clock.taken[1:])
    return {
        "who": "TRL",
        "images encoded": work.images // (steps + 1),
        "tokens, rollout": (work.prefilled + work.decoded) // (steps + 1),
        "tokens, update": work.trained // (steps + 1),
        "seconds": whole,
        "peak, GiB": peak_gib(on),
    }


# --- the benchmark ---------------------------------------------------------------------------------------------------


def measure(size: str, workload: Workload, steps: int, peer_steps: int | None) -> dict[str, Any]:
    """`peer_steps` of TRL are timed; None leaves it out."""
    on = platform()
    rows = [ours(size, workload, steps, on)]
    if peer_steps is not None:
        rows.append(peer(size, workload, peer_steps, on))
    for row in rows:
        row["times as long"] = row["seconds"] / rows[0]["seconds"]
    about = {"size": size, "dtype": str(dtype_of(size)), **asdict(workload)}
    return {**environment(on), **about, "step": [{name: row.get(name) for name in rows[0]} for row in rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--members", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="time TRL as well")
    parser.add_argument("--peer-steps", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    usual = WORKLOADS[given.size]
    workload = replace(
        usual,
        prompts=given.prompts or usual.prompts,
        members=given.members or usual.members,
        new=given.new or usual.new,
    )
    results = measure(given.size, workload, given.steps, given.peer_steps if given.peer else None)
    print(
        f"{results['device']}, {results['dtype']}; {workload.prompts} prompts with {workload.members} responses of "
        f"{workload.new} tokens; counts and seconds of a step:"
    )
    print(table(results["step"]))
    write(given.out, results)


if __name__ == "__main__":
    main()
