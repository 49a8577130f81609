"""Contexts that every engine continues after each update of its weights, so that the learner can compare.

They are made here, not taken from the data: they exist before the first step and after a resume, are small, and are
equal in every run of a model. One has two turns and, where the model has a tower, two images. The first image differs
for each version of the weights, so no engine has its features cached, and the tower runs with its current weights. The
second image and the other context stay the same, and reveal a cache of old weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_vlrl.engines.base import Request
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.types import Generation, Image, Message, Sample, SamplingParams, Segment, SegmentKind, StopReason
from npu_vlrl.workflow.base import action_segment
from npu_vlrl.workflow.render import Renderer

DRAWS = 8
"""Number of turns that continue each context, with different seeds; an engine computes the context once."""

NEW_TOKENS = 2
"""Tokens of each turn: the first comes from the prefill, the second from a decode step."""

TEMPERATURE = 1.0

SIZE = 56, 84
"""Height and width of the images in pixels; the model's own limits may enlarge them."""

QUESTION = "Which way is the top of the picture? Say what you see, and why."
REPLY = "The top is left."
FOLLOW_UP = "No. Here is another one, try again."


class Probe:
    """Makes the requests of the probe, and samples from their answers."""

    def __init__(self, loaded: LoadedModel, renderer: Renderer, context_tokens: int) -> None:
        """`context_tokens` limits context and turn; images that do not fit are left out, and text is cut."""
        self._loaded = loaded
        self._renderer = renderer
        self._new_tokens = min(NEW_TOKENS, context_tokens - 1)
        self._room = context_tokens - self._new_tokens

    def contexts(self, version: int) -> list[tuple[Segment, ...]]:
        """Contexts for one version of the weights."""
        special = self._renderer.special
        seeds = version + 1, 0
        fresh, same = ((_random_image(seed),) if self._loaded.processor is not None else () for seed in seeds)
        opened = self._renderer.open([Message("user", (*fresh, QUESTION))])
        ids = (*self._loaded.tokenizer.encode(REPLY, add_special_tokens=False), special.end_of_turn[0])
        reply = self._action(Generation(ids, (0.0,) * len(ids), (version,) * len(ids), StopReason.END_OF_TURN))
        turns = self._renderer.reply(opened, reply, [Message("user", (*same, FOLLOW_UP))])
        (text,) = self._renderer.open([Message("user", (QUESTION,))]).context
        fitting = [c.context for c in (turns, opened) if c.n_tokens <= self._room]
        return [*fitting[:1], (Segment(SegmentKind.PROMPT, text.token_ids[: self._room], special),)]

    def requests(self, contexts: Sequence[Sequence[Segment]]) -> list[Request]:
        """Requests for `DRAWS` turns of each context, one context after the other."""
        drawn = [(context, draw) for context in contexts for draw in range(DRAWS)]
        return [
            Request(
                -1 - number,  # no session of an episode
                tuple(token for segment in context for token in segment.token_ids),
                tuple(image for segment in context for image in segment.images),
                SamplingParams(self._new_tokens, TEMPERATURE, seed=draw),
            )
            for number, (context, draw) in enumerate(drawn)
        ]

    def samples(
        self, engine: str, contexts: Sequence[Sequence[Segment]], answers: Sequence[Generation]
    ) -> list[Sample]:
        """Samples from the answers of one engine to `requests`. Answers to one context, also of other engines, share a
        group."""
        made = []
        for number, answer in enumerate(answers):
            context = contexts[number // DRAWS]
            name = f"probe/{engine}/{number}"
            segments = (*context, self._action(answer))
            group = f"probe/{number // DRAWS}"
            made.append(Sample(name, group, segments, (len(context),), reward=0.0, outcome=0.0, episode=name))
        return made

    def _action(self, answer: Generation) -> Segment:
        return action_segment(answer, self._renderer.special)


def _random_image(seed: int) -> Image:
    return Image(np.random.default_rng(seed).integers(0, 256, (*SIZE, 3), dtype=np.uint8))
