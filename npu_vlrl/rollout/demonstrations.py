"""Scripted episodes for the warm start: the real workflow, with an engine that recites instead of sampling."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from npu_vlrl.types import Generation, SamplingParams, Segment, StopReason, Task

CHOICES = ("up", "right", "down", "left")
LOOK = '<tool_call>{"name":"look","arguments":{}}</tool_call>'


def script(task: Task, right_share: float, rng: random.Random, tries: int) -> list[str]:
    """What a demonstrator says in an episode of a generated task: look first, then answers, of which `right_share`
    are right and the others drawn evenly from the wrong ones. No answer is given twice.
    """
    left = list(CHOICES)
    lines = [LOOK]
    for _ in range(tries):
        wrong = [choice for choice in left if choice != task.answer]
        right = task.answer in left and (rng.random() < right_share or not wrong)
        answer = task.answer if right else rng.choice(wrong)
        assert answer is not None
        left.remove(answer)
        lines.append(f"<answer>{answer}</answer>")
    return lines


class ScriptedSession:
    """See `types.EngineSession`."""

    def __init__(self, lines: Sequence[str], tokenizer: PreTrainedTokenizerBase, end_of_turn: int) -> None:
        self._lines = iter(lines)
        self._tokenizer = tokenizer
        self._end_of_turn = end_of_turn

    async def generate(self, context: Sequence[Segment], sampling: SamplingParams) -> Generation:
        ids = (*self._tokenizer.encode(next(self._lines), add_special_tokens=False), self._end_of_turn)
        # nobody sampled these ids, and supervised steps do not read the logprobs
        return Generation(ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.END_OF_TURN)

    def close(self) -> None:
        """Nothing is held."""
