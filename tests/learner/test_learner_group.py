"""The learner of one process, and what several compare after each step; the rest needs processes (integration)."""

from __future__ import annotations

import pytest
import torch

from npu_vlrl.learner.group import LearnerGroup, sums_of_bits
from tests.support.learning import load, make_learner

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_changed_bit_of_a_weight_is_seen_under_its_name(dtype: str) -> None:
    learner = make_learner(load(dtype=dtype))
    before = sums_of_bits(learner)
    assert before.keys() == learner.parameters.keys() and before == sums_of_bits(learner)
    name, weight = list(learner.parameters.items())[3]
    with torch.no_grad():
        bits = weight.view(INTEGERS[weight.dtype]).flatten()
        bits[-1] ^= 1
    after = sums_of_bits(learner)
    assert [key for key in before if before[key] != after[key]] == [name]
    assert abs(after[name] - before[name]) == 1


def test_weights_of_a_critic_are_compared_too() -> None:
    learner = make_learner(load(), {"preset": "turn_ppo", "kl_coef": 0.0})
    assert learner.critic is not None
    assert sums_of_bits(learner).keys() == learner.parameters.keys() | learner.critic.parameters.keys()


def test_alone_it_is_the_learner() -> None:
    learner = make_learner(load())
    group = LearnerGroup(lambda: learner)
    assert group.own is learner and group.skipped is learner.skipped
    assert group.tokens_referenced == group.tokens_computed == 0
