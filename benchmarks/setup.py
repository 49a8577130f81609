"""What the benchmarks have in common: models with random weights, pictures, clocks, and the limits of the device.

A model of size `3b` has the shapes of the published Qwen2.5-VL-3B and is made on the device; `tiny` is for the counts,
on a CPU. No file is loaded, and no tokenizer is needed: texts are random ids.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from npu_vlrl import kernels
from npu_vlrl.config import ModelConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.hardware import Platform, select
from npu_vlrl.kernels.modules import attach
from npu_vlrl.model.load import load_model
from npu_vlrl.model.policy import Policy
from npu_vlrl.types import Image, SpecialTokens

SIZES = ("3b", "tiny")
QWEN_SPECIAL = SpecialTokens(
    end_of_turn=(151645, 151643), image=151655, video=151656, vision_start=151652, vision_end=151653
)
QWEN_IDS = 151665
"""Ids that the published tokenizer has; the rows of the head beyond them are padding."""


def platform() -> Platform:
    """The platform that `NPU_VLRL_PLATFORM` names, else the first that is usable, with its kernels in use."""
    chosen = select()
    chosen.set_device(0)
    kernels.use(chosen.kernels)
    return chosen


# --- models and pictures ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    policy: Policy
    processor: ImageProcessor


def model(
    size: str, device: torch.device, dtype: torch.dtype, frozen_vision: bool = False, checkpointing: bool = False
) -> Model:
    """A Qwen2.5-VL with random weights, the same ones at every call. The op table is attached as it is now.

    Raises ValueError for an unknown size.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; choose one of {', '.join(SIZES)}")
    if size == "tiny":
        return _tiny(device, dtype, frozen_vision, checkpointing)
    built = _qwen_3b(device, dtype)
    attach(built)
    if frozen_vision:
        built.model.visual.requires_grad_(False)
    if checkpointing:
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Model(Policy(built, QWEN_SPECIAL, QWEN_IDS, merge_size=2), ImageProcessor())


def _tiny(device: torch.device, dtype: torch.dtype, frozen_vision: bool, checkpointing: bool) -> Model:
    settings = ModelConfig(
        path="tiny:qwen2_5_vl",
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        freeze_vision=frozen_vision,
        gradient_checkpointing=checkpointing,
    )
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        loaded = load_model(settings, Path(folder), 0, device)
    assert loaded.processor is not None
    return Model(loaded.policy, loaded.processor)


def _qwen_3b(device: torch.device, dtype: torch.dtype) -> Any:
    """3.09e9 parameters in 36 layers of text, 0.67e9 in 32 of vision; initialised as transformers does, at 0.02."""
    text = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "bos_token_id": None,
        "eos_token_id": QWEN_SPECIAL.end_of_turn[0],
        "pad_token_id": QWEN_SPECIAL.end_of_turn[1],
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": 2048,
        "tokens_per_second": 2,
    }
    names = ("image", "video", "vision_start", "vision_end")
    tokens = {f"{name}_token_id": getattr(QWEN_SPECIAL, name) for name in names}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
    usual = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        built = Qwen2_5_VLForConditionalGeneration(config)
    torch.set_default_dtype(usual)
    return built


def pictures(count: int, width: int, height: int, seed: int = 0) -> list[Image]:
    """Pictures of noise, all different."""
    random = np.random.default_rng(seed)
    return [Image(random.integers(256, size=(height, width, 3), dtype=np.uint8)) for _ in range(count)]


# --- clocks ----------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object], on: Platform, repeats: int = 3, warm_up: int = 1) -> float:
    """The median of single runs after `warm_up`, on the host's clock, until the device is done."""
    taken = []
    for _ in range(warm_up + repeats):
        on.synchronize()
        began = time.perf_counter()
        work()
        on.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[warm_up:])


def reset_peak(on: Platform) -> None:
    """Lets `peak_gib` begin again, on a device with memory of its own."""
    if on.memory() is not None:
        torch.get_device_module(on.device()).reset_peak_memory_stats()


def peak_gib(on: Platform) -> float | None:
    """Largest memory in use since `reset_peak`; None on a device without memory of its own."""
    return None if on.memory() is None else on.peak_memory_bytes() / 2**30


def forget(on: Platform) -> None:
    """Gives memory back that nobody refers to any more."""
    gc.collect()
    if on.memory() is not None:
        torch.get_device_module(on.device()).empty_cache()


# --- what goes through a model ---------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What went through a model; a recomputation in the backward pass is not counted again."""

    images: int = 0
    patches: int = 0
    tokens: int = 0
    """Through the layers, padding included."""


@contextmanager
def counted(policy: Policy) -> Iterator[Counts]:
    """Counts at the doors of the vision tower and of the language model, so whoever calls them is counted alike."""
    counts = Counts()

    def vision(_: Any, inputs: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
        counts.images += len(options["grid_thw"] if "grid_thw" in options else inputs[1])
        counts.patches += len(inputs[0])

    def text(_: Any, inputs: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
        counts.tokens += options["inputs_embeds"].shape[:-1].numel()

    hooks = [
        policy.vision.roots[0].register_forward_pre_hook(vision, with_kwargs=True),
        policy.text.register_forward_pre_hook(text, with_kwargs=True),
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def gradients(policy: Policy, names: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    """Adds up, in float32, what backward passes make of the gradients of trained parameters whose names end so.

    Before they are clipped, and wherever the optimiser puts them.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            found[name] = gradient.float() + found.get(name, 0)

        return hook

    named = {name: p for name, p in policy.model.named_parameters() if p.requires_grad and name.endswith(names)}
    hooks = [parameter.register_hook(keep(name)) for name, parameter in named.items()]
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()


def cosines(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Of the gradients of each parameter."""
    assert ours.keys() == theirs.keys() and ours, "nothing to compare"
    pairs = {name: (ours[name].flatten().double(), theirs[name].flatten().double()) for name in ours}
    return {name: float(torch.nn.functional.cosine_similarity(a, b, 0)) for name, (a, b) in pairs.items()}


def measure(name: str, work: Callable[[], object], on: Platform, policy: Policy, repeats: int) -> dict[str, Any]:
    """A row: name, counts of one call, median seconds, peak memory. One more call warms up; with `repeats` 0 it is the
    one that is measured.

    To run out of memory is a result as well: the seconds are None.
    """
    forget(on)
    reset_peak(on)
    taken: float | None
    try:
        if repeats:
            work()
        with counted(policy) as counts:
            taken = seconds(work, on, max(repeats, 1), warm_up=0)
    except torch.OutOfMemoryError:
        taken, counts = None, Counts()
        policy.model.zero_grad(set_to_none=True)
    each = {key: value // max(repeats, 1) for key, value in asdict(counts).items()}
    row = {"name": name, **each, "seconds": taken, "peak_gib": peak_gib(on)}
    print(row, file=sys.stderr, flush=True)
    return row


# --- limits and environment ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What this device reaches, measured now."""

    flops: float
    """Multiplications and additions a second in one large product."""
    bandwidth: float
    """Bytes read and written a second in one large copy."""


def limits(on: Platform, dtype: torch.dtype) -> Limits:
    """One product of 8192³ and one copy of 1 GiB; on a device without memory of its own 512³ and 64 MiB."""
    small = on.memory() is None
    size, length = (512, 2**26) if small else (8192, 2**30)
    device = on.device()
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    product = seconds(lambda: torch.mm(left, right, out=out), on, repeats=10, warm_up=3)
    source = torch.ones(length, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), on, repeats=10, warm_up=3)
    return Limits(2 * size**3 / product, 2 * length / copy)


def environment(on: Platform) -> dict[str, Any]:
    """The device and the versions that a result belongs to."""
    return {
        "platform": on.name,
        "device": on.device_name(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "triton", "trl")} | on.versions(),
        "kernels": kernels.active(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# --- results ---------------------------------------------------------------------------------------------------------


def write(path: Path | None, results: Mapping[str, Any]) -> None:
    """Writes JSON, if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys as a Markdown table; numbers with three digits, nothing for None."""
    head = list(rows[0])
    cells = [[_cell(row[name]) for name in head] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *cells])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if type(value) is int else str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
