"""Scripted demonstrations."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from npu_vlrl.rollout.demonstrations import CHOICES, LOOK, ScriptedSession, script
from npu_vlrl.types import SamplingParams, StopReason, Task
from npu_vlrl.workflow.tools import parse_tool_calls
from tests.support.models import loaded, tiny_folder

TASK = Task("t", (), "left", "test")


def test_a_script_looks_first_and_gives_no_answer_twice() -> None:
    for seed in range(40):
        look, *answers = script(TASK, 0.3, random.Random(seed), tries=4)
        assert [call.name for call in parse_tool_calls(look).calls] == ["look"]
        assert sorted(answers) == sorted(f"<answer>{choice}</answer>" for choice in CHOICES)


def test_a_script_knows_the_answer_as_often_as_asked() -> None:
    rng = random.Random(0)
    first = Counter(script(TASK, 0.25, rng, tries=1)[1] for _ in range(4000))
    # five standard deviations of a binomial count around its mean
    assert first["<answer>left</answer>"] == pytest.approx(1000, abs=140)
    assert all(first[f"<answer>{wrong}</answer>"] == pytest.approx(1000, abs=140) for wrong in ("up", "right", "down"))
    assert script(TASK, 1.0, rng, tries=1) == [LOOK, "<answer>left</answer>"]
    assert "<answer>left</answer>" not in script(TASK, 0.0, rng, tries=3)


def test_a_session_recites_and_ends_each_turn() -> None:
    tokenizer = loaded(tiny_folder("qwen3")).tokenizer
    session = ScriptedSession(["up", "<answer>down</answer>"], tokenizer, end_of_turn=5)
    for expected in ("up", "<answer>down</answer>"):
        generation = asyncio.run(session.generate([], SamplingParams(64)))
        assert generation.token_ids[-1] == 5
        assert tokenizer.decode(list(generation.token_ids[:-1])) == expected
        assert len(generation.logprobs) == len(generation.weight_versions) == len(generation.token_ids)
        assert generation.stop_reason is StopReason.END_OF_TURN
    session.close()
