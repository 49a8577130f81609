"""What the learner notes of each token, against plain transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npu_vlrl.learner.per_token import PerToken
from npu_vlrl.learner.ranks import Ranks
from tests.support.learning import (
    load,
    make_learner,
    plain_logprobs,
    plain_model,
    samples_of,
    tiny_folder,
    with_advantage,
)

torch.set_num_threads(1)


@pytest.mark.parametrize("style", ["concat", "individual"])
def test_the_first_look_at_each_token_is_noted(style: str) -> None:
    loaded = load()
    samples = samples_of(loaded, style)  # type: ignore[arg-type]
    expected = plain_logprobs(plain_model(tiny_folder()), loaded, samples)
    learner = make_learner(loaded, {"epochs": 2}, micro_batch_tokens=64, lr=1e-2)
    learner.step(samples)
    assert learner.noted == {}  # nobody asked
    learner = make_learner(load(), {"epochs": 2}, micro_batch_tokens=64, lr=1e-2)
    learner.step(samples, note=True)
    assert list(learner.noted) == [sample.id for sample in samples]
    for sample, (logprobs, entropies) in zip(samples, expected, strict=True):
        found = learner.noted[sample.id]
        assert found.dtype == np.float32 and found.shape == (2, sample.n_scored)
        assert found[0] == pytest.approx(logprobs.detach().numpy(), abs=1e-4)
        assert found[1] == pytest.approx(entropies.detach().numpy(), abs=1e-4)
    before = learner.noted
    learner.step(samples, note=True)  # the policy has moved by now
    assert max(np.abs(learner.noted[name] - before[name]).max() for name in before) > 1e-2
    learner.step(samples)
    assert learner.noted == {}


def test_tokens_between_the_turns_are_noted_in_their_places() -> None:
    loaded = load()
    samples = samples_of(loaded)
    expected = plain_logprobs(plain_model(tiny_folder()), loaded, samples)
    learner = make_learner(loaded, {"advantage": "gae", "loss_mask": False})
    scored = [with_advantage(sample, 1.0) for sample in learner.score(samples)]
    learner.step(scored, note=True)
    for sample, (logprobs, _) in zip(scored, expected, strict=True):
        assert sample.n_scored >= sample.n_trained
        assert learner.noted[sample.id][0][sample.sampled_mask] == pytest.approx(logprobs.detach().numpy(), abs=1e-4)
    assert any(sample.n_scored > sample.n_trained for sample in scored)


def test_a_sample_that_no_micro_batch_held_has_zeros() -> None:
    samples = samples_of(load())
    found = PerToken(samples, 3).gathered(Ranks())
    assert [values.shape for values in found.values()] == [(3, sample.n_scored) for sample in samples]
    assert not any(values.any() for values in found.values())
