"""Makes models for the checks: tiny ones as folders, and shallow ones with the widths of published models."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from npu_vlrl.acceptance.worker import Machine
from npu_vlrl.config import Config, ModelConfig
from npu_vlrl.estimate import PUBLISHED
from npu_vlrl.kernels.modules import attach
from npu_vlrl.model.load import arranged, outline
from npu_vlrl.model.policy import Policy
from npu_vlrl.types import Sample, Segment, SegmentKind, SpecialTokens, StopReason

LAYERS = 2
"""Number of layers of a shallow model, in the tower and in the text model."""
NARROW = 2**10
"""Vocabulary of a shallow model where sizes are reduced."""
REDUCED_TEXT = {
    "vocab_size": NARROW,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Reduced text model with heads of 128, as in the published models."""
REDUCED_TOWER = {"hidden_size": 160, "intermediate_size": 427, "num_heads": 2, "out_hidden_size": 512}
"""Reduced tower with heads of 80."""


def tiny_config(kind: str, dtype: str, **sections: dict[str, object]) -> Config:
    """Configuration of a training of a `tiny:` model that is large enough for vLLM's operators (heads of 32)."""
    settings: dict[str, dict[str, object]] = {
        "model": {"path": f"tiny:{kind}", "dtype": dtype},
        "data": {"train": {"generator": "photo"}},
        "rollout": {"cache_mib": 64},
        "workflow": {"context_tokens": 512, "turn_tokens": 16},
        "reward": {"rule": "tagged", "options": {"choices": ["up", "right", "down", "left"]}},
        "sync": {"timeout_s": 60.0},
    }
    return Config.model_validate(
        {name: settings.get(name, {}) | sections.get(name, {}) for name in {**settings, **sections}}
    )


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="npu_vlrl_") as folder:
        yield Path(folder)


def shallow(machine: Machine, model: str, dtype: torch.dtype) -> Policy:
    """Makes the first `LAYERS` layers of a published model, with random weights, on this process's device."""
    settings = json.loads((PUBLISHED / model / "config.json").read_text())
    text, vision = settings["text_config"], settings["vision_config"]
    text["num_hidden_layers"] = LAYERS
    vision |= {"depth": LAYERS, "fullatt_block_indexes": [LAYERS - 1]}
    if machine.reduced:
        text |= REDUCED_TEXT
        vision |= REDUCED_TOWER
        settings |= {f"{name}_token_id": NARROW - 1 - i for i, name in enumerate(("image", "video"))}
        settings |= {f"vision_{name}_token_id": NARROW - 3 - i for i, name in enumerate(("start", "end"))}
    with scratch() as folder:
        (folder / "config.json").write_text(json.dumps(settings))
        made = outline(folder, dtype, machine.device)
    attach(made)
    made = arranged(made, ModelConfig(path=model, freeze_vision=True))
    special = SpecialTokens(end_of_turn=(0,), image=settings["image_token_id"])
    return Policy(made, special, text["vocab_size"], vision["spatial_merge_size"])


def token_ids(policy: Policy, number: int, length: int) -> tuple[int, ...]:
    """Random token ids, different for each number, without placeholders of images."""
    below = min(policy.n_tokens, policy.special.image or policy.n_tokens) - 8
    return tuple(1 + (number * 7919 + 31 * place) % below for place in range(length))


def samples_of(policy: Policy, count: int, length: int, sampled: int) -> list[Sample]:
    """Makes `count` samples of `length` tokens that share no prefix; the last `sampled` tokens of each are trained."""
    made = []
    for number in range(count):
        prompt, action = _segments(policy, token_ids(policy, number, length), length - sampled)
        name = f"sample/{number}"
        made.append(Sample(name, name, (prompt, action), (1,), reward=0.0, outcome=0.0, episode=name))
    return made


def _segments(policy: Policy, ids: tuple[int, ...], split: int) -> tuple[Segment, Segment]:
    special, after = policy.special, ids[split:]
    return Segment(SegmentKind.PROMPT, ids[:split], special), Segment(
        SegmentKind.ACTION,
        after,
        special,
        logprobs=(0.0,) * len(after),
        weight_versions=(0,) * len(after),
        stop_reason=StopReason.TURN_BUDGET,
    )
