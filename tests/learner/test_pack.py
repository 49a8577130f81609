"""Micro-batches: every sample once, within the budget, and every tensor what the segments say."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.kernels.tree import Tree
from npu_vlrl.learner.flops import ModelFlops, seen_pairs
from npu_vlrl.learner.pack import MicroBatch, balance, collate, fit, idle, plan_ranks
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.types import Image, Sample, Segment, SegmentKind, SpecialTokens
from npu_vlrl.workflow.export import export
from tests.support.learning import an_image, load, make_learner, plain_model, samples_of, tiny_folder, trajectory
from tests.support.trees import last_seer

torch.set_num_threads(1)


@cache
def vision_model() -> LoadedModel:
    return load()


@pytest.fixture
def loaded() -> LoadedModel:
    return vision_model()


def plan(samples: Sequence[Sample], max_tokens: int, placeholder: int | None) -> list[list[int]]:
    """The micro-batches of one rank, which takes all, whatever they cost."""
    return plan_ranks(samples, max_tokens, placeholder, 1, lambda members, tree: tree.bounds[-1])[0]


# --- bins ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 70))
def test_bins_cover_every_index_once_within_the_budget(sizes: list[int], budget: int) -> None:
    bins = fit(sizes, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(sizes)))
    for members in bins:
        assert members
        assert sum(sizes[i] for i in members) <= budget or len(members) == 1
    assert bins == fit(list(sizes), budget)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(30, 70))
def test_no_two_bins_would_fit_into_one(sizes: list[int], budget: int) -> None:
    sums = sorted(sum(sizes[i] for i in members) for members in fit(sizes, budget))
    assert len(sums) == 1 or sums[0] + sums[1] > budget


def test_bins_by_hand() -> None:
    # largest first: 9 | 7; 3 fits best beside 7; 1 beside 9; what has 12 is over the budget and stands alone
    assert fit([3, 9, 7, 12, 1], 10) == [[3], [1, 4], [2, 0]]
    assert fit([7, 5, 4, 1], 10) == [[0], [1, 2, 3]]  # 1 fits beside 7 too, but exactly beside 5 and 4
    assert fit([5, 5, 5], 10) == [[0, 1], [2]]
    assert fit([], 10) == []


def test_a_group_stays_together_unless_it_is_too_large(loaded: LoadedModel) -> None:
    samples = [*samples_of(loaded), *(replace(s, id=f"{s.id}+", group=f"{s.group}+") for s in samples_of(loaded))]
    placeholder = loaded.policy.special.image
    sizes = {
        name: collate([s for s in samples if s.group == name], loaded.policy).tree.bounds[-1] for name in ("g0", "g1")
    }
    both = plan(samples, sum(sizes.values()), placeholder)
    assert sorted(map(sorted, both)) == [[0, 1, 6, 7], [2, 3, 4, 5]] or sorted(map(sorted, both)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    alone = plan(samples, max(sizes.values()), placeholder)
    assert sorted(map(sorted, alone)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(map(sorted, plan(samples, 1, placeholder))) == [[i] for i in range(8)]


# --- ranks -----------------------------------------------------------------------------------------------------------

LISTS = st.lists(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=4), max_size=9)
"""Groups of samples of tokens, which often begin alike."""


def written(groups: Sequence[Sequence[Sequence[int]]]) -> list[Sample]:
    special = SpecialTokens((9,))
    return [
        Sample(f"{g}/{n}", str(g), (Segment(SegmentKind.PROMPT, tuple(ids), special),), (), 0.0, 0.0, f"{g}/{n}")
        for g, members in enumerate(groups)
        for n, ids in enumerate(members)
    ]


def distinct_tokens(samples: Sequence[Sample]) -> int:
    """How many different beginnings there are."""
    return len({tuple(s.token_ids[: i + 1]) for s in samples for i in range(len(s))})


def work(samples: Sequence[Sample], tree: Tree) -> float:
    return float(len(samples) + tree.bounds[-1] ** 2)


@settings(max_examples=60)
@given(LISTS, st.integers(1, 40), st.integers(1, 4))
def test_ranks_share_every_sample_out_once_in_as_many_micro_batches(
    groups: list[list[list[int]]], budget: int, ranks: int
) -> None:
    samples = written(groups)
    planned = plan_ranks(samples, budget, None, ranks, work)
    assert len(planned) == ranks and len({len(batches) for batches in planned}) == 1
    batches = [[samples[i] for i in batch] for own in planned for batch in own]
    assert sorted(s.id for batch in batches for s in batch) == sorted(s.id for s in samples)
    for batch in batches:
        assert distinct_tokens(batch) <= budget or len(batch) == 1
    assert any(all(own[at] for at in range(len(own))) for own in planned)  # no more than somebody needs
    assert planned == plan_ranks(samples, budget, None, ranks, work)
    for name in {s.group for s in samples}:
        if distinct_tokens([s for s in samples if s.group == name]) <= budget:
            assert sum(any(s.group == name for s in batch) for batch in batches) == 1  # it stays together
    assert plan_ranks(samples, budget, None, 1, work)[0] == plan(samples, budget, None)


@settings(max_examples=60)
@given(st.lists(st.floats(0, 1e6), max_size=30), st.integers(1, 8))
def test_no_rank_has_more_than_a_fair_share_and_one_thing(costs: list[float], ranks: int) -> None:
    """Graham's bound for any list: when the last thing went to the fullest rank, that one had least."""
    taken = balance(costs, ranks)
    assert sorted(i for own in taken for i in own) == list(range(len(costs)))
    most = max(sum(costs[i] for i in own) for own in taken)
    assert most <= sum(costs) / ranks + (1 - 1 / ranks) * max(costs, default=0.0) + 1e-6


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(2, 3))
def test_the_fullest_rank_is_within_four_thirds_of_the_best(costs: list[int], ranks: int) -> None:
    most = max(sum(costs[i] for i in own) for own in balance(costs, ranks))
    best = min(
        max(sum(c for c, r in zip(costs, given_to, strict=True) if r == rank) for rank in range(ranks))
        for given_to in itertools.product(range(ranks), repeat=len(costs))
    )
    assert most <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_ranks_by_hand() -> None:
    # largest first: 7 | 6, then 5 to the second, 4 to the first, and of 11 and 11 the first takes 2
    assert balance([2, 7, 6, 5, 4], 2) == [[0, 1, 4], [2, 3]]
    assert balance([3.0], 3) == [[0], [], []]
    assert balance([], 2) == [[], []]


def test_a_image_is_work(loaded: LoadedModel) -> None:
    """Three groups of text, and one with fewer tokens but an image, which goes through the tower."""
    made = [trajectory(loaded, g, (110,), group=f"g{g}") for g in range(3)]
    made.append(trajectory(loaded, 3, (10,), [an_image(1, 224, 224)], group="g3"))
    samples = export(made, "concat", "sum", 1.0, "tiny")
    model = ModelFlops(loaded.policy)

    def text(members: Sequence[Sample], tree: Tree) -> float:
        return model.layers(tree.bounds[-1], seen_pairs(tree), train=True)

    def whole(members: Sequence[Sample], tree: Tree) -> float:
        return text(members, tree) + model.tower([image for s in members for image in s.images], train=True)

    def shares(cost: Callable[[Sequence[Sample], Tree], float]) -> list[list[int]]:
        planned = plan_ranks(samples, 10_000, loaded.policy.special.image, 2, cost)
        return sorted(sorted(i for batch in own for i in batch) for own in planned)

    assert shares(whole) == [[0, 1, 2], [3]]
    assert [3] not in shares(text)


@pytest.mark.parametrize("loss", ["ppo", "decoupled_ppo", "gspo", "cispo", "reinforce"])
def test_an_idle_micro_batch_runs_all_layers_and_teaches_nothing(loss: str) -> None:
    loaded = load()
    learner = make_learner(loaded, {"loss": loss, "kl_coef": 0.1, "entropy_coef": 0.1})
    (sample, *_) = learner.score(samples_of(loaded))
    batch = idle(sample, loaded.policy)
    assert (batch.proximal_N is None) == (loss != "decoupled_ppo") and batch.reference_N is not None
    found, metrics, finite_N = learner._policy_loss(batch, learner._hidden(batch, loaded.policy, learner.vision), 32, 4)
    found.backward()
    assert found.item() == 0 and finite_N.numel() == 0
    assert all(value == 0 for value in metrics.values())
    gradients = {name: p.grad for name, p in learner.parameters.items() if "layers" in name}
    assert gradients and all(g is not None and not g.any() for g in gradients.values())


# --- collate ---------------------------------------------------------------------------------------------------------


def test_tensors_are_what_the_segments_say(loaded: LoadedModel) -> None:
    samples = samples_of(loaded)
    batch = collate(samples, loaded.policy)
    seen: list[tuple[object, ...]] = []  # what stands before each place, itself included, in order of the places
    before, targets, owners, behaviour, advantages = [], [], [], [], []
    for number, sample in enumerate(samples):
        images = iter(sample.images)
        whole: tuple[object, ...] = ()
        left = 0
        for index, segment in enumerate(sample.segments):
            for place, token in enumerate(segment.token_ids):
                if index in sample.trained:
                    before.append(whole)
                    targets.append(token)
                    owners.append(number)
                    behaviour.append(segment.logprobs[place])
                    assert sample.credit is not None
                    advantages.append(sample.credit.advantages_N[0])
                if token == loaded.policy.special.image and not left:
                    image = next(images)
                    left = image.n_tokens
                left -= token == loaded.policy.special.image
                whole = (*whole, image.image.hash if token == loaded.policy.special.image else token)
                seen.append(whole)
    distinct = dict.fromkeys(seen)
    assert len(batch.token_ids_T) == len(distinct) < len(seen)  # the prompts of a group begin alike
    assert batch.sample_ids == ("g0/0", "g0/1", "g1/2", "g1/3")
    assert batch.token_ids_T.dtype == torch.int64
    seer, t = last_seer(batch.tree), len(batch.token_ids_T)
    names = [batch.images[i].image.hash for i in batch.image_order]
    for at, context in zip(batch.before_N.tolist(), before, strict=True):
        path = [k for k in range(t) if k <= at < seer[k]]
        assert len(path) == len(context)
        ids = [i if isinstance(i, int) else loaded.policy.special.image for i in context]
        assert batch.token_ids_T[path].tolist() == ids
    assert set(names) == {i.image.hash for s in samples for i in s.images}
    assert batch.target_ids_N.tolist() == targets
    assert batch.sample_N.tolist() == owners
    assert batch.behaviour_N.tolist() == behaviour  # multiples of 1/64: exact in float32
    assert batch.advantages_N.tolist() == advantages
    assert batch.behaviour_N.dtype == batch.advantages_N.dtype == torch.float32


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
    for sample, positions in zip(samples, expected, strict=True):
        alone = collate([sample], loaded.policy)
        assert torch.equal(alone.position_ids_3T, positions[:, 0])
    seer = last_seer(batch.tree)
    for at, owner in zip(batch.before_N.tolist(), batch.sample_N.tolist(), strict=True):
        path = [k for k in range(at + 1) if at < seer[k]]
        assert torch.equal(batch.position_ids_3T[:, path], expected[owner][:, 0, : len(path)])


def shown(sample: Sample) -> list[str]:
    return [image.image.hash for image in sample.images]


def shown_in(batch: MicroBatch) -> list[str]:
    return [batch.images[index].image.hash for index in batch.image_order]


@settings(max_examples=25)
@given(st.permutations(range(4)))
def test_each_occurrence_keeps_its_own_image_in_any_order(order: list[int]) -> None:
    loaded = vision_model()
    samples = samples_of(loaded)
    assert sorted(len(shown(sample)) for sample in samples) == [0, 1, 1, 3]
    samples = [samples[i] for i in order]
    batch = collate(samples, loaded.policy)
    # both samples of g0 begin with the same image, which stands there once
    assert sorted(shown_in(batch)) == sorted(name for s in samples for name in shown(s) if s.id != "g0/1")
    hashes = [image.image.hash for image in batch.images]
    assert len(hashes) == len(set(hashes)) == 3  # four places of three images


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


def test_the_check_above_sees_a_wrong_image(loaded: LoadedModel) -> None:
    batch = collate(samples_of(loaded), loaded.policy)
    right = score(loaded, batch)
    changed = replace(batch.images[0], image=Image(255 - batch.images[0].image.rgb))
    wrong = score(loaded, replace(batch, images=(changed, *batch.images[1:])))
    assert max(abs(a - b) for a, b in zip(right["g0/0"], wrong["g0/0"], strict=True)) > 1e-4
    assert right["g1/2"] == pytest.approx(wrong["g1/2"], abs=1e-6)  # it has no image


def test_a_batch_without_images_and_a_text_model() -> None:
    for kind in ("qwen2_5_vl", "qwen3"):
        loaded = load(kind)
        batch = collate(samples_of(loaded, with_images=False), loaded.policy)
        assert batch.images == () and batch.image_order == ()
        assert batch.position_ids_3T.shape == (3, batch.tree.bounds[-1])


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


def test_placeholders_without_images_are_refused(loaded: LoadedModel) -> None:
    sample = samples_of(loaded)[0]
    blind = SpecialTokens(loaded.policy.special.end_of_turn)  # a segment that does not know its placeholders
    prompt = Segment(SegmentKind.PROMPT, sample.segments[0].token_ids, blind)
    with pytest.raises(ValueError, match="2 placeholder tokens for images of \\[\\]"):
        collate([replace(sample, segments=(prompt, *sample.segments[1:]))], loaded.policy)
