"""Episodes of the real workflow with the real renderer and tools, and an engine that recites."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from npu_vlrl.config import WorkflowConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.tiny import tiny_tokenizer, write_tiny_model
from npu_vlrl.types import (
    Generation,
    Image,
    Judge,
    Message,
    SamplingParams,
    Segment,
    StopReason,
    Task,
    Trajectory,
    Turn,
    Verdict,
)
from npu_vlrl.workflow.base import Sampling
from npu_vlrl.workflow.environments.visual_qa import VisualQA
from npu_vlrl.workflow.render import Renderer
from npu_vlrl.workflow.tools import Toolbox
from npu_vlrl.workflow.vision_multiturn import VisionMultiTurnAgenticWorkflow

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
END = "<|im_end|>"


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer(FAMILIES["qwen2_5_vl"])


@cache
def processor() -> ImageProcessor:
    with tempfile.TemporaryDirectory() as folder:
        found = ImageProcessor.from_folder(write_tiny_model("qwen2_5_vl", Path(folder), seed=0, hidden=32, layers=1))
    assert found is not None
    return found


@cache
def tiny_renderer() -> Renderer:
    return Renderer(tokenizer(), processor(), template_name="tiny")


def an_image(side: int = 56, seed: int = 0) -> Image:
    """56 pixels are 2 x 2 placeholder tokens, 28 are one."""
    return Image(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def a_task(*parts: str | Image, answer: str | None = "up", system: str | None = None, **extra: Any) -> Task:
    messages = [Message("user", parts or (an_image(), "Which way?"))]
    if system is not None:
        messages.insert(0, Message("system", (system,)))
    return Task("t/1", tuple(messages), answer, "test", extra)


def encode(text: str) -> tuple[int, ...]:
    """Ids of a text in which control tokens are control tokens."""
    return tuple(tokenizer().encode(text, add_special_tokens=False))


def conversation_ids(*messages: tuple[str, str], images: Sequence[int] = ()) -> tuple[int, ...]:
    """What transformers' own template call makes of (role, content) pairs, generation prompt included. Content spells
    its images as the template does; `images` are their token counts.
    """
    plain = [{"role": role, "content": content} for role, content in messages]
    text: Any = tokenizer().apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    pieces = text.split("<|image_pad|>")
    expanded = pieces[0]
    for count, piece in zip(images, pieces[1:], strict=True):
        expanded += "<|image_pad|>" * count + piece
    return encode(expanded)


def cut(text: str) -> Generation:
    """A turn that the budget ended before the policy did."""
    return _generation(encode(text), StopReason.TURN_BUDGET)


def _generation(ids: tuple[int, ...], stop: StopReason) -> Generation:
    return Generation(ids, tuple(-0.01 * (k + 1) for k in range(len(ids))), (3,) * len(ids), stop)


@dataclass
class Script:
    """An engine's session that says `lines`: texts that end their turn, or whole generations."""

    lines: Iterable[str | Generation]
    contexts: list[tuple[Segment, ...]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    closed: int = 0

    def __post_init__(self) -> None:
        self._lines = iter(self.lines)

    async def generate(self, context: Sequence[Segment], sampling: SamplingParams) -> Generation:
        self.contexts.append(tuple(context))
        self.params.append(sampling)
        line = next(self._lines)
        if isinstance(line, Generation):
            return line
        return _generation((*encode(line), *encode(END)), StopReason.END_OF_TURN)

    def close(self) -> None:
        self.closed += 1


@dataclass
class Verdicts:
    """A judge that hands out what it was given, and notes what it was asked."""

    verdicts: Iterable[Verdict | Exception]
    seen: list[tuple[str, list[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._verdicts = iter(self.verdicts)

    async def judge(self, task: Task, text: str, history: Sequence[Turn]) -> Verdict:
        self.seen.append((text, [turn.text for turn in history]))
        verdict = next(self._verdicts)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


def workflow(
    judge: Judge,
    renderer: Renderer | None = None,
    failed_reward: float = 0.0,
    toolbox: Toolbox | None = None,
    sees: ImageProcessor | None = None,
    **settings: Any,
) -> VisionMultiTurnAgenticWorkflow:
    """Episodes of `VisualQA`, with tools that take positions in what `sees` makes of an image. A `toolbox` of the
    caller's is the caller's to close.
    """
    config = WorkflowConfig(**{"feedback": "No. Try again.", **settings})
    tools = Toolbox(config.tools) if toolbox is None else toolbox
    return VisionMultiTurnAgenticWorkflow(
        config,
        renderer or tiny_renderer(),
        lambda: VisualQA(config, judge, tools, failed_reward, sees),
        tools.schemas() if config.describe_tools else (),
    )


def play(
    flow: VisionMultiTurnAgenticWorkflow, lines: Iterable[str | Generation] | Script, task: Task | None = None
) -> Trajectory:
    script = lines if isinstance(lines, Script) else Script(lines)
    episode = asyncio.run(flow.run(task or a_task(), script, "g", 0, Sampling()))
    assert script.closed == 1
    return episode


def flat(segments: Iterable[Segment]) -> tuple[int, ...]:
    return tuple(token for segment in segments for token in segment.token_ids)


def decode(segments: Iterable[Segment]) -> str:
    return str(tokenizer().decode(list(flat(segments))))
