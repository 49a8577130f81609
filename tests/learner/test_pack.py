"""Micro-batches: every sample once, within the budget, and every tensor what the segments say."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.learner.pack import MicroBatch, collate, split
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.types import Image, Sample, Segment, SegmentKind, SpecialTokens
from tests.support.learning import load, make_learner, plain_model, samples_of, tiny_folder

torch.set_num_threads(1)


@cache
def vision_model() -> LoadedModel:
    return load()


@pytest.fixture
def loaded() -> LoadedModel:
    return vision_model()


# --- split -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 70))
def test_split_covers_every_index_once_within_the_budget(lengths: list[int], budget: int) -> None:
    bins = split(lengths, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for members in bins:
        assert members
        assert sum(lengths[i] for i in members) <= budget or len(members) == 1
    assert bins == split(list(lengths), budget)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(30, 70))
def test_split_leaves_no_two_micro_batches_that_would_fit_into_one(lengths: list[int], budget: int) -> None:
    sums = sorted(sum(lengths[i] for i in members) for members in split(lengths, budget))
    assert len(sums) == 1 or sums[0] + sums[1] > budget


def test_split_by_hand() -> None:
    # longest first: 9 | 7; 3 fits best beside 7; 1 beside 9; the sample of 12 is over the budget and stands alone
    assert split([3, 9, 7, 12, 1], 10) == [[3], [1, 4], [2, 0]]
    assert split([7, 5, 4, 1], 10) == [[0], [1, 2, 3]]  # 1 fits beside 7 too, but exactly beside 5 and 4
    assert split([5, 5, 5], 10) == [[0, 1], [2]]
    assert split([], 10) == []


# --- collate ---------------------------------------------------------------------------------------------------------


def test_tensors_are_what_the_segments_say(loaded: LoadedModel) -> None:
    samples = samples_of(loaded)
    batch = collate(samples, loaded.policy)
    ids: list[int] = []
    before, targets, owners, behaviour, advantages = [], [], [], [], []
    for number, sample in enumerate(samples):
        for index, segment in enumerate(sample.segments):
            for place, token in enumerate(segment.token_ids):
                if index in sample.trained:
                    before.append(len(ids) - 1)
                    targets.append(token)
                    owners.append(number)
                    behaviour.append(segment.logprobs[place])
                    assert sample.credit is not None
                    advantages.append(sample.credit.advantages_N[0])
                ids.append(token)
    assert batch.sample_ids == ("g0/0", "g0/1", "g1/2", "g1/3")
    assert batch.token_ids_T.tolist() == ids and batch.token_ids_T.dtype == torch.int64
    assert batch.lengths == tuple(len(sample.token_ids) for sample in samples)
    assert batch.before_N.tolist() == before and batch.target_ids_N.tolist() == targets
    assert batch.sample_N.tolist() == owners
    assert batch.behaviour_N.tolist() == behaviour  # multiples of 1/64: exact in float32
    assert batch.advantages_N.tolist() == advantages
    assert batch.behaviour_N.dtype == batch.advantages_N.dtype == torch.float32
    assert [batch.token_ids_T[i + 1] for i in batch.before_N] == targets


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers_for_each_sample(kind: str) -> None:
    loaded = load(kind)
    samples = samples_of(loaded)
    core = plain_model(tiny_folder(kind)).model
    expected = []
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        grids = torch.tensor([image.grid for image in sample.images]) if sample.images else None
        kinds = torch.eq(ids, loaded.policy.special.image or -1).int()
        expected.append(core.get_rope_index(ids, kinds, image_grid_thw=grids, attention_mask=torch.ones_like(ids))[0])
    batch = collate(samples, loaded.policy)
    assert torch.equal(batch.position_ids_3T, torch.cat(expected, dim=2)[:, 0])
    alone = torch.arange(len(samples[2]))  # the sample without images: all three rows count up from 0
    assert torch.equal(batch.position_ids_3T[:, sum(batch.lengths[:2]) :][:, : len(alone)], alone.expand(3, -1))


def shown(sample: Sample) -> list[str]:
    return [image.image.hash for image in sample.images]


def shown_in(batch: MicroBatch) -> list[str]:
    return [batch.images[index].image.hash for index in batch.image_order]


@settings(max_examples=25)
@given(st.permutations(range(4)))
def test_each_occurrence_keeps_its_own_picture_in_any_order(order: list[int]) -> None:
    loaded = vision_model()
    samples = samples_of(loaded)
    assert sorted(len(shown(sample)) for sample in samples) == [0, 1, 1, 3]
    samples = [samples[i] for i in order]
    batch = collate(samples, loaded.policy)
    assert shown_in(batch) == [name for sample in samples for name in shown(sample)]
    hashes = [image.image.hash for image in batch.images]
    assert len(hashes) == len(set(hashes)) == 3  # five occurrences of three pictures


def score(loaded: LoadedModel, batch: MicroBatch) -> dict[str, list[float]]:
    learner = make_learner(loaded)
    with torch.no_grad():
        logprobs, _ = learner._score(batch, loaded.policy, learner.vision, 1.0)
    return {name: logprobs[batch.sample_N == i].tolist() for i, name in enumerate(batch.sample_ids)}


def test_a_shuffled_batch_scores_every_sample_as_if_it_were_alone(loaded: LoadedModel) -> None:
    samples = samples_of(loaded)
    alone: dict[str, list[float]] = {}
    for sample in samples:
        alone |= score(loaded, collate([sample], loaded.policy))
    for seed in range(4):
        shuffled = random.Random(seed).sample(samples, len(samples))
        together = score(loaded, collate(shuffled, loaded.policy))
        for name, values in alone.items():
            assert together[name] == pytest.approx(values, abs=2e-6)


def test_the_check_above_sees_a_wrong_picture(loaded: LoadedModel) -> None:
    batch = collate(samples_of(loaded), loaded.policy)
    right = score(loaded, batch)
    changed = replace(batch.images[0], image=Image(255 - batch.images[0].image.rgb))
    wrong = score(loaded, replace(batch, images=(changed, *batch.images[1:])))
    assert max(abs(a - b) for a, b in zip(right["g0/0"], wrong["g0/0"], strict=True)) > 1e-4
    assert right["g1/2"] == pytest.approx(wrong["g1/2"], abs=1e-6)  # it has no picture


def test_a_batch_without_images_and_a_text_model() -> None:
    for kind in ("qwen2_5_vl", "qwen3"):
        loaded = load(kind)
        batch = collate(samples_of(loaded, with_images=False), loaded.policy)
        assert batch.images == () and batch.image_order == ()
        assert batch.position_ids_3T.shape == (3, sum(batch.lengths))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_sample_without_trained_tokens_is_refused(loaded: LoadedModel) -> None:
    sample = replace(samples_of(loaded)[1], trained=())
    with pytest.raises(ValueError, match="sample g0/1 has no trained token"):
        collate([sample], loaded.policy)


def test_a_sample_that_begins_with_a_trained_token_is_refused(loaded: LoadedModel) -> None:
    sample = samples_of(loaded)[2]
    action = sample.segments[sample.trained[0]]
    with pytest.raises(ValueError, match="sample g1/2 has no trained token with a context before it"):
        collate([replace(sample, segments=(action,), trained=(0,))], loaded.policy)


def test_placeholders_without_pictures_are_refused(loaded: LoadedModel) -> None:
    sample = samples_of(loaded)[0]
    blind = SpecialTokens(loaded.policy.special.end_of_turn)  # a segment that does not know its placeholders
    prompt = Segment(SegmentKind.PROMPT, sample.segments[0].token_ids, blind)
    with pytest.raises(ValueError, match="2 placeholder tokens for images of \\[\\]"):
        collate([replace(sample, segments=(prompt, *sample.segments[1:]))], loaded.policy)
