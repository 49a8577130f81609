"""Single rounds of the in-process engine, without a workflow."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from npu_vlrl.types import Generation, Message, SamplingParams, Segment, SegmentKind
from npu_vlrl.workflow.base import action_segment
from tests.support.episodes import Stage, an_image

LOOKS = [an_image(60, 90, 1), an_image(100, 40, 2)]


def run(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results or exceptions; a hang fails after a while."""

    async def together() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 60)

    return asyncio.run(together())


def prompt(stage: Stage, *parts: Any) -> list[Segment]:
    return list(stage.renderer.open([Message("user", parts)]).context)


def params(seed: int, tokens: int = 6, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(tokens, temperature, seed=seed)


def generate_all(stage: Stage, requests: Sequence[tuple[Sequence[Segment], SamplingParams]]) -> list[Generation]:
    """One round."""
    sessions = [stage.engine.session() for _ in requests]
    try:
        return run(*(s.generate(*request) for s, request in zip(sessions, requests, strict=True)))
    finally:
        for session in sessions:
            session.close()


def continued(stage: Stage, context: Sequence[Segment], generation: Generation, text: str) -> list[Segment]:
    """The context of the turn after this one, with a reply of some words."""
    action = action_segment(generation, stage.policy.special)
    ids = tuple(stage.loaded.tokenizer.encode(text, add_special_tokens=False))
    return [*context, action, Segment(SegmentKind.OBSERVATION, ids, stage.policy.special)]


@contextmanager
def watched(module: torch.nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the first input of each call."""
    shapes: list[tuple[int, ...]] = []
    hook = module.register_forward_pre_hook(
        lambda _, inputs, kw: shapes.append(tuple(_first(inputs, kw).shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        hook.remove()


def _first(inputs: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    return inputs[0] if inputs else keywords["hidden_states"]
