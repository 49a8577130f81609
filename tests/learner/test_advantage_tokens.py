"""The token estimators against a plain reading of their definitions, one token at a time, in Python floats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.algorithms.advantages.gae import gae
from npu_vlrl.algorithms.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from npu_vlrl.algorithms.advantages.tokens import Tokens, over
from npu_vlrl.algorithms.advantages.turn_gae import bi_level_gae, turn_wise_gae
from npu_vlrl.types import Credit

number = st.floats(-3, 3, allow_nan=False).map(lambda x: round(x, 3))
factor = st.sampled_from([0.0, 0.5, 0.9, 1.0])
few = settings(max_examples=40, deadline=None)


@st.composite
def batches(draw: st.DrawFn) -> Tokens:
    """Episodes of 0..4 turns with 1..5 sampled tokens each and 0..3 observed ones between them; with KL in the reward
    every sampled token earns something.
    """
    kl = draw(st.booleans())
    episode, turn, sampled, rewards, values = [], [], [], [], []
    for number_of_episode in range(draw(st.integers(1, 4))):
        for k in range(draw(st.integers(0, 4))):
            observed = draw(st.integers(0, 3)) if k else 0
            own = draw(st.integers(1, 5))
            episode += [number_of_episode] * (observed + own)
            turn += [k] * (observed + own)
            sampled += [False] * observed + [True] * own
            rewards += [0.0] * observed + [draw(number) if kl else 0.0 for _ in range(own - 1)] + [draw(number)]
            values += [draw(number) for _ in range(observed + own)]
    return tokens_of(episode, turn, sampled, rewards, values)


def tokens_of(
    episode: Sequence[int],
    turn: Sequence[int],
    sampled: Sequence[bool],
    rewards: Sequence[float],
    values: Sequence[float],
) -> Tokens:
    return Tokens(
        np.array(episode, int),
        np.array(turn, int),
        np.array(sampled, bool),
        np.array(rewards, float),
        np.array(values, float),
    )


def without_values(tokens: Tokens) -> Tokens:
    return Tokens(**(vars(tokens) | {"values_N": np.zeros_like(tokens.values_N)}))


def one_by_one(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> list[float]:
    advantages: list[float] = []
    following = next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + discount * next_value - value + discount * decay * following
        next_value = value
        advantages.insert(0, following)
    return advantages


def whitened(values: Sequence[float]) -> list[float]:
    if len(values) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    return [(v - mean) / math.sqrt(statistics.variance(values) + 1e-8) for v in values]


def episodes(tokens: Tokens) -> Iterator[np.ndarray]:
    for name in sorted(set(tokens.episode_N.tolist())):
        yield np.flatnonzero(tokens.episode_N == name)


def close(found: object, expected: object) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)  # type: ignore[arg-type]


@few
@given(batches(), factor, factor)
def test_gae(tokens: Tokens, discount: float, decay: float) -> None:
    raw = [a for at in episodes(tokens) for a in one_by_one(tokens.rewards_N[at], tokens.values_N[at], discount, decay)]
    credit = gae(tokens, discount, decay)
    close(credit.returns_N, np.array(raw) + tokens.values_N)
    close(credit.advantages_N, whitened(raw))
    assert credit.critic_N.all()


@few
@given(batches(), factor, factor)
def test_gae_over_the_sampled_tokens_alone(tokens: Tokens, discount: float, decay: float) -> None:
    raw: dict[int, float] = {}
    for everything in episodes(tokens):
        at = [i for i in everything if tokens.sampled_N[i]]
        raw |= dict(zip(at, one_by_one(tokens.rewards_N[at], tokens.values_N[at], discount, decay), strict=True))
    white = dict(zip(raw, whitened(list(raw.values())), strict=True))
    credit = over(tokens, tokens.sampled_N, lambda part: gae(part, discount, decay))
    for i in range(len(tokens.turn_N)):
        close(credit.advantages_N[i], white.get(i, 0.0))
        close(credit.returns_N[i], raw[i] + tokens.values_N[i] if i in raw else 0.0)
        assert credit.critic_N[i] == (i in raw)


Key = tuple[int, int]


def turn_level(
    tokens: Tokens, turn_discount: float, decay: float, masked: bool, whole: bool
) -> tuple[dict[Key, list[int]], dict[Key, float]]:
    """By (episode, turn): the positions of the turn's tokens, and its advantage. A turn earns what its last token does,
    or what all of them do.
    """
    places: dict[Key, list[int]] = {}
    found: dict[Key, float] = {}
    for i, key in enumerate(zip(tokens.episode_N.tolist(), tokens.turn_N.tolist(), strict=True)):
        if tokens.sampled_N[i] or not masked:
            places.setdefault(key, []).append(i)
    for e in {e for e, _ in places}:
        own = [key for key in sorted(places) if key[0] == e]
        ends = [places[key][-1] for key in own]
        rewards = [math.fsum(tokens.rewards_N[places[key] if whole else places[key][-1:]]) for key in own]
        advantages = one_by_one(rewards, tokens.values_N[ends], turn_discount, decay)
        found |= dict(zip(own, advantages, strict=True))
    return places, found


def estimated(tokens: Tokens, masked: bool, *arguments: float, by: object) -> Credit:
    mask = tokens.sampled_N if masked else np.ones_like(tokens.sampled_N)
    return over(tokens, mask, lambda part: by(part, *arguments))  # type: ignore[operator]


@few
@given(batches(), factor, factor, factor, st.booleans())
def test_bi_level_gae(tokens: Tokens, token_discount: float, turn_discount: float, decay: float, masked: bool) -> None:
    places, turns = turn_level(tokens, turn_discount, decay, masked, whole=False)
    raw: dict[int, float] = {}
    for key, at in places.items():
        raw[at[-1]] = turns[key]
        for i, after in reversed(list(zip(at, at[1:], strict=False))):
            delta = tokens.rewards_N[i] + token_discount * tokens.values_N[after] - tokens.values_N[i]
            raw[i] = delta + token_discount * decay * raw[after]
    order = sorted(raw)
    credit = estimated(tokens, masked, token_discount, turn_discount, decay, by=bi_level_gae)
    close(credit.returns_N[order], [raw[i] + tokens.values_N[i] for i in order])
    close(credit.advantages_N[order], whitened([raw[i] for i in order]))
    assert not masked or not credit.advantages_N[~tokens.sampled_N].any()


@few
@given(batches(), factor, factor, st.booleans())
def test_turn_wise_gae(tokens: Tokens, turn_discount: float, decay: float, masked: bool) -> None:
    places, turns = turn_level(tokens, turn_discount, decay, masked, whole=True)
    keys = sorted(places)
    white = dict(zip(keys, whitened([turns[key] for key in keys]), strict=True))
    credit = estimated(tokens, masked, turn_discount, decay, by=turn_wise_gae)
    for key in keys:
        close(credit.advantages_N[places[key]], white[key])
        close(credit.returns_N[places[key][-1]], turns[key] + tokens.values_N[places[key][-1]])
    assert np.flatnonzero(credit.critic_N).tolist() == sorted(at[-1] for at in places.values())


@few
@given(batches(), factor)
def test_reinforce_pp(tokens: Tokens, discount: float) -> None:
    credit = reinforce_pp(tokens, discount)
    raw = [a for at in episodes(tokens) for a in one_by_one(tokens.rewards_N[at], [0.0] * len(at), discount, 1.0)]
    close(credit.returns_N, raw)
    close(credit.advantages_N, whitened(raw))
    assert not credit.critic_N.any()


def test_reinforce_pp_with_a_baseline_by_hand() -> None:
    # centred: 1.5, -1.5, 0; on the tokens 1.5, 1.5, -1.5, 0, whose mean is 0.375
    # and whose variance is (2 * 1.265625 + 3.515625 + 0.140625) / 3 = 2.0625
    found = reinforce_pp_baseline(np.array([4.0, 1.0, 7.0]), ["a", "a", "b"], np.array([2, 1, 1]))
    assert found == pytest.approx([1.125 / 1.436141, -1.875 / 1.436141, -0.375 / 1.436141], rel=1e-5)


# --- checks by hand ---------------------------------------------------------------------------------------------------


@few
@given(batches())
def test_without_discounts_and_critic_observations_change_nothing(tokens: Tokens) -> None:
    still, sampled = without_values(tokens), tokens.sampled_N
    masked = over(still, sampled, lambda part: gae(part, 1.0, 1.0))
    close(gae(still, 1.0, 1.0).returns_N[sampled], masked.returns_N[sampled])


@few
@given(batches())
def test_without_discounts_the_telescope_forgets_the_values_in_between(tokens: Tokens) -> None:
    """γ = λ = 1: A + V is what is still earned, whatever the critic said on the way."""
    sampled = tokens.sampled_N
    masked = over(tokens, sampled, lambda part: gae(part, 1.0, 1.0))
    close(gae(tokens, 1.0, 1.0).returns_N[sampled], masked.returns_N[sampled])


@few
@given(batches(), factor, factor)
def test_in_an_episode_of_one_turn_the_turn_discount_does_not_matter(
    tokens: Tokens, turn_discount: float, decay: float
) -> None:
    first = tokens.select(tokens.turn_N == 0)
    close(bi_level_gae(first, 0.9, turn_discount, decay).advantages_N, gae(first, 0.9, decay).advantages_N)


def test_turn_wise_without_a_critic_is_the_discounted_return() -> None:
    turn = [0, 0, 1, 2, 2, 2]
    tokens = tokens_of([0] * 6, turn, [True] * 6, [0, 1, 2, 0, 0, 4], [0] * 6)
    credit = turn_wise_gae(tokens, 0.5, 1.0)
    assert credit.returns_N.tolist() == [0, 1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 0, 0, 4]


def test_turn_wise_feels_kl_at_every_token() -> None:
    """Two turns of two tokens that earn 1 at their ends; KL of 3 at the first token of the second."""
    turn, none = [0, 0, 1, 1], [0] * 4
    credit = turn_wise_gae(tokens_of(none, turn, [True] * 4, [0, 1, -3, 1], none), 0.5, 1.0)
    assert credit.returns_N.tolist() == [0, 1 + 0.5 * (1 - 3), 0, 1 - 3]


def test_no_tokens_at_all() -> None:
    nothing = tokens_of([], [], [], [], [])
    for credit in (gae(nothing, 1, 1), bi_level_gae(nothing, 1, 1, 1), turn_wise_gae(nothing, 1, 1)):
        assert len(credit.advantages_N) == len(credit.returns_N) == len(credit.critic_N) == 0


def test_one_token_has_no_spread() -> None:
    one = tokens_of([0], [0], [True], [5.0], [1.0])
    assert gae(one, 1.0, 1.0).advantages_N.tolist() == [0.0] and gae(one, 1.0, 1.0).returns_N.tolist() == [5.0]


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match="token 1 of episode 0 has the reward nan"):
        tokens_of([0, 0], [0, 0], [True, True], [0, np.nan], [0, 0])
    with pytest.raises(ValueError, match="token 0 of episode 0 has the reward 0.0 and the value inf"):
        tokens_of([0, 0], [0, 0], [True, True], [0, 0], [np.inf, 0])
