"""Shared beginnings: who stands where and who sees whom, against a plain reading, and the same update as without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.kernels.reference import tree_attention, varlen_attention
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.learner import pack
from npu_vlrl.learner.tree import Shared, divide, share
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.types import Sample, Trajectory
from npu_vlrl.workflow.export import export
from tests.support.learning import Probe, an_image, distance, load, make_learner, trajectory, with_advantage
from tests.support.trees import last_seer

torch.set_num_threads(1)

# few values, so that beginnings coincide
sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=7)


def arrays(lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(one) for one in lists]


@settings(max_examples=100, deadline=None)
@given(sequences)
def test_every_beginning_stands_there_once_and_sees_itself(lists: list[list[int]]) -> None:
    shared = share(arrays(lists))
    assert shared.n_tokens == len({tuple(one[: i + 1]) for one in lists for i in range(len(one))})
    seer = last_seer(shared.tree)
    owner: dict[int, tuple[int, ...]] = {}
    for one, places in zip(lists, shared.places, strict=True):
        for i, place in enumerate(places):
            assert owner.setdefault(int(place), tuple(one[: i + 1])) == tuple(one[: i + 1])
            assert [k for k in range(shared.n_tokens) if k <= place < seer[k]] == places[: i + 1].tolist()


@settings(max_examples=100, deadline=None)
@given(sequences)
def test_the_parts_are_what_each_token_sees_once(lists: list[list[int]]) -> None:
    tree = share(arrays(lists)).tree
    seer = last_seer(tree)
    n = tree.bounds[-1]
    seen = np.zeros((n, n), int)
    for part in tree.parts:
        assert part.cu_q[-1] == sum(one.stop - one.start for one in part.queries)
        for queries, keys in zip(part.queries, part.keys, strict=True):
            for query in range(queries.start, queries.stop):
                seen[query, keys.start : query + 1 if part.causal else keys.stop] += 1
    assert seen.tolist() == [[int(k <= q < seer[k]) for k in range(n)] for q in range(n)]


@settings(max_examples=60, deadline=None)
@given(sequences, st.integers(1, 30))
def test_parts_of_a_group_stay_within_the_budget(lists: list[list[int]], budget: int) -> None:
    parts = divide(arrays(lists), budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lists)))
    for part in parts:
        assert len(part) == 1 or share([np.array(lists[i]) for i in part]).n_tokens <= budget


def test_by_hand() -> None:
    shared = share(arrays([[1, 2, 3, 5], [1, 2, 4], [9], [1, 2, 3], [1, 2, 4]]))
    assert [places.tolist() for places in shared.places] == [[0, 1, 2, 3], [0, 1, 4], [5], [0, 1, 2], [0, 1, 4]]
    assert shared.tree == Tree(starts=(0, 2, 4, 5), ends=(5, 4, 5, 6)) and shared.tree.shares
    assert shared.tree.above == ((), (0,), (0,), ())
    assert shared.tree.path.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5] and shared.tree.path_bounds == [0, 2, 6, 9, 10]
    assert not Tree.of_sequences((0, 3, 7)).shares


def attention_inputs(n: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, n, 8), (2, n, 8), (2, n, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@settings(max_examples=25, deadline=None)
@given(sequences, st.integers(0, 99))
def test_attention_is_that_of_each_sequence_alone(lists: list[list[int]], seed: int) -> None:
    shared = share(arrays(lists))
    q, k, v = attention_inputs(shared.n_tokens, seed)
    found = tree_attention(q, k, v, shared.tree, 0.3)
    weights = [torch.randn(len(p), 4, 8, dtype=torch.float64) for p in shared.places]
    sum((found[p] * w).sum() for p, w in zip(shared.places, weights, strict=True)).backward()
    gradients = [x.grad.clone() for x in (q, k, v) if x.grad is not None]
    for x in (q, k, v):
        x.grad = None
    for places, weight in zip(shared.places, weights, strict=True):
        bounds = [0, len(places)]
        alone = varlen_attention(q[:, places], k[:, places], v[:, places], bounds, bounds, True, 0.3)
        torch.testing.assert_close(found[places], alone, rtol=1e-12, atol=1e-12)
        (alone * weight).sum().backward()
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        torch.testing.assert_close(gradient, x.grad, rtol=1e-10, atol=1e-10)


# --- the update ------------------------------------------------------------------------------------------------------


def apart(keys: Sequence[np.ndarray]) -> Shared:
    """No beginning is shared."""
    bounds = [0, *accumulate(map(len, keys))]
    places = tuple(np.arange(a, b) for a, b in zip(bounds, bounds[1:], strict=False))
    return Shared(places, Tree.of_sequences(bounds))


def family(loaded: LoadedModel, seed: int, style: Any) -> list[Sample]:
    """Two groups of members that see the same images, say the same at first, and then something else."""
    rng = random.Random(seed)
    made: list[Trajectory] = []
    for group in ("g0", "g1"):
        images = [an_image(rng.randint(0, 1)) for _ in range(rng.randint(0, 2))]
        whole = trajectory(loaded, seed, (3, 4, 2), images, [an_image(9, 28, 28)], group=group)
        for member in range(3):
            turns = whole.turns[: rng.randint(1, 3)]
            action = turns[-1].action
            same = rng.randint(0, len(action))
            ids = (*action.token_ids[:same], *(rng.randint(10, 40) for _ in range(len(action) - same)))
            own = replace(turns[-1], action=replace(action, token_ids=ids, special=loaded.policy.special))
            made.append(replace(whole, member=member, turns=(*turns[:-1], own)))
    samples = export(made, style, "sum", 0.5, "tiny")
    return [with_advantage(s, rng.choice([-1.5, -0.5, 0.25, 1.0])) for s in samples]


@pytest.mark.parametrize(
    "settings_",
    [{}, {"freeze_vision": True}, {"gradient_checkpointing": True}],
    ids=["trained tower", "frozen tower", "checkpointing"],
)
@pytest.mark.parametrize("style", ["concat", "individual"])
def test_the_update_is_the_same_as_without_sharing(settings_: dict[str, Any], style: str) -> None:
    loaded = load(**settings_)
    for seed in range(4):
        samples = family(loaded, seed, style)
        for budget in (10_000, 60):
            probe = make_learner(
                loaded, {"aggregation": "token-mean", "kl_coef": 0.0}, Probe, micro_batch_tokens=budget
            )
            found, loss = probe.measure(samples), probe.loss
            tokens = sum(batch.tree.bounds[-1] for batch in probe._micro_batches(samples))
            assert tokens < sum(map(len, samples))
            with mock.patch.object(pack, "share", apart):
                expected = probe.measure(samples)
            assert loss == pytest.approx(probe.loss, rel=1e-5, abs=1e-7)
            assert distance(found, expected) < 2e-6


def test_the_comparison_sees_a_token_that_looks_at_a_neighbour() -> None:
    loaded = load()
    samples = family(loaded, 1, "concat")
    probe = make_learner(loaded, {"aggregation": "token-mean"}, Probe)
    expected = probe.measure(samples)

    def leaking(keys: Sequence[np.ndarray]) -> Shared:
        shared = share(keys)
        return Shared(shared.places, Tree.of_sequences((0, shared.n_tokens)))

    with mock.patch.object(pack, "share", leaking):
        assert distance(probe.measure(samples), expected) > 1e-3


def test_each_image_of_a_group_is_encoded_once() -> None:
    loaded = load()
    samples = family(loaded, 0, "individual")
    learner = make_learner(loaded)
    before = learner.vision.encoded
    learner.step(samples)
    distinct = {image.image.hash for sample in samples for image in sample.images}
    assert learner.vision.encoded - before == len(distinct)
    beginnings = {(s.group, *s.token_ids[: i + 1]) for s in samples for i in range(len(s))}
    assert learner.meter.counts.tokens_referenced == sum(map(len, samples)) > learner.meter.counts.tokens_computed
    assert learner.meter.counts.tokens_computed <= len(beginnings)
