"""What the configuration's None means, preset by preset, and rewards to advantages."""

import re
from dataclasses import replace
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from npu_vlrl.algorithms.presets import PRESETS, REMOVED
from npu_vlrl.config import AlgorithmConfig, ConfigError
from npu_vlrl.types import Sample, Segment, SegmentKind, SpecialTokens, StopReason
from tests.support.learning import assign_advantages

SPECIAL = SpecialTokens((9,))


def test_presets_are_the_published_settings() -> None:
    def preset(name: Any) -> AlgorithmConfig:
        return AlgorithmConfig(preset=name).resolved()

    def some(name: Any, *names: str) -> list[Any]:
        return [getattr(preset(name), key) for key in names]

    ppo = ("clip_low", "clip_high", "dual_clip", "loss")
    assert some("grpo", "advantage", "advantage_std", "aggregation") == ["grpo", "group", "seq-mean-token-mean"]
    assert some("grpo", *ppo, "kl_coef", "kl_in", "dynamic_sampling") == [0.2, 0.2, 3.0, "ppo", 0.04, "loss", False]
    assert some("dapo", "advantage", "aggregation", "kl_coef") == ["grpo", "token-mean", 0.0]
    assert some("dapo", *ppo, "dynamic_sampling") == [0.2, 0.28, 3.0, "ppo", True]
    assert some("dr_grpo", "advantage", "advantage_std", "aggregation", "kl_coef") == ["dr_grpo", None, "constant", 0.0]
    assert some("rloo", "advantage", "aggregation", "kl_coef", "kl_in") == [
        "rloo",
        "seq-mean-token-sum",
        0.05,
        "reward",
    ]
    discounts = ("token_discount", "turn_discount", "gae_lambda", "kl_coef")
    masks = ("advantage", "loss_mask", "advantage_mask", "turn_rewards")
    assert some("trico", *masks, *discounts) == ["bi_level_gae", True, True, True, 1.0, 0.95, 1.0, 0.001]
    assert some("aico", *masks, *discounts) == ["masked_gae", True, True, False, 1.0, None, 1.0, 0.001]
    assert some("rico_gae", *masks) == ["gae", False, False, False]
    assert some("rico_grpo", *masks) == ["grpo", False, None, None]
    assert some("turn_ppo", *masks, *discounts) == ["turn_wise_gae", True, True, True, None, 0.95, 1.0, 0.001]
    assert some("gigpo", "advantage", "state_weight", "turn_discount", "kl_coef") == ["gigpo", 1.0, 0.95, 0.01]


ABLATIONS = {
    "aico_without_loss_mask": {"loss_mask"},
    "aico_without_advantage_mask": {"advantage_mask"},
    "trico_without_loss_mask": {"loss_mask"},
    "trico_without_advantage_mask": {"advantage_mask"},
    "trico_without_turn_rewards": {"turn_rewards"},
    "trico_without_bi_level": {"advantage", "turn_discount"},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_override_of_an_ablation_changes_one_thing(name: str) -> None:
    """The removed preset is an error that says which override to write, and that override is the ablation."""
    with pytest.raises(ValidationError, match=re.escape(f"the preset {name} is one override of another; write algor")):
        AlgorithmConfig(preset=name)
    given = dict(word.removeprefix("algorithm.").split("=") for word in REMOVED[name].split())
    base, ablated = AlgorithmConfig(preset=given["preset"]).resolved(), AlgorithmConfig(**given).resolved()
    whole, without = dict(base), dict(ablated)
    assert {key for key in whole if whole[key] != without[key]} == ABLATIONS[name]
    assert name.startswith(given["preset"])


def test_every_preset_that_the_configuration_offers_resolves() -> None:
    offered = get_args(AlgorithmConfig.model_fields["preset"].annotation)
    assert set(offered) == set(PRESETS)
    for name in offered:
        AlgorithmConfig(preset=name).resolved()
    with pytest.raises(ValidationError):
        AlgorithmConfig(preset="pppo")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("aggregation", "token-mean"),
        ("clip_low", 0.1),
        ("clip_high", 0.4),
        ("dual_clip", 2.0),
        ("kl_coef", 0.5),
        ("kl_coef", 0.0),
        ("dynamic_sampling", True),
        ("dynamic_sampling", False),
        ("advantage_std", "batch"),
        ("loss", "gspo"),
        ("kl_in", "reward"),
        ("loss_mask", False),
    ],
)
def test_what_is_given_goes_before_the_preset(key: str, value: Any) -> None:
    plain = AlgorithmConfig(preset="grpo").resolved()
    changed = AlgorithmConfig(preset="grpo", **{key: value}).resolved()
    assert getattr(changed, key) == value
    assert {k: v for k, v in changed if k != key} == {k: v for k, v in plain if k != key}


def test_another_estimator_than_the_preset_s() -> None:
    assert AlgorithmConfig(preset="grpo", advantage="rloo").resolved().advantage_std is None
    assert AlgorithmConfig(preset="dr_grpo", advantage="grpo").resolved().advantage_std == "group"
    assert AlgorithmConfig(preset="rloo", advantage="grpo", advantage_std="batch").resolved().advantage_std == "batch"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"preset": "dr_grpo", "advantage_std": "group"}, "advantage_std"),
        ({"preset": "rloo", "advantage_std": "batch"}, "advantage_std"),
        ({"preset": "grpo", "turn_discount": 0.9}, "turn_discount"),
        ({"preset": "gigpo", "advantage_mask": False}, "advantage_mask"),
        ({"preset": "aico", "turn_discount": 1.0}, "turn_discount"),
        ({"preset": "trico", "state_weight": 1.0}, "state_weight"),
        ({"preset": "trico", "advantage": "opo", "turn_rewards": True}, "turn_rewards"),
        ({"advantage": "reinforce_pp", "gae_lambda": 1.0}, "gae_lambda"),
    ],
)
def test_a_setting_that_the_estimator_does_not_have(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}: the estimator \w+ has no such setting; remove it"):
        AlgorithmConfig(**settings).resolved()


@pytest.mark.parametrize(
    ("settings", "key", "needed"),
    [
        ({"loss_constant": 5.0}, "loss_constant", "algorithm.aggregation=constant"),
        ({"max_extra_groups": 3}, "max_extra_groups", "algorithm.dynamic_sampling=true"),
        ({"loss": "reinforce", "clip_low": 0.2}, "clip_low", "another algorithm.loss"),
        ({"loss": "reinforce", "clip_high": 0.2}, "clip_high", "another algorithm.loss"),
        ({"loss": "reinforce", "dual_clip": 3.0}, "dual_clip", "another algorithm.loss"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip", "another algorithm.loss"),
        ({"correction": "tis", "correction_low": 0.7}, "correction_low", "algorithm.correction=icepop"),
    ],
)
def test_a_key_without_effect(settings: dict[str, Any], key: str, needed: str) -> None:
    with pytest.raises(ConfigError, match=rf"^algorithm\.{key}: has no effect here; leave it out, or set {needed}$"):
        AlgorithmConfig(**settings).resolved()


def test_a_key_that_something_beside_it_uses() -> None:
    AlgorithmConfig(preset="dr_grpo", loss_constant=5.0).resolved()
    AlgorithmConfig(preset="dapo", max_extra_groups=3).resolved()
    AlgorithmConfig(loss="cispo", clip_low=1.0, correction="icepop", correction_low=0.7).resolved()


def test_the_plain_estimator_looks_at_observations_too() -> None:
    assert AlgorithmConfig(advantage="gae").resolved().advantage_mask is False
    assert AlgorithmConfig(advantage="masked_gae").resolved().advantage_mask is True
    assert AlgorithmConfig(advantage="gae", advantage_mask=True).resolved().advantage_mask is True


def advantages(samples: list[Sample], **settings: Any) -> list[float]:
    made = assign_advantages(samples, AlgorithmConfig(**settings).resolved())
    return [sample.credit.advantages_N[0] for sample in made if sample.credit is not None]


def sample(name: str, group: str, reward: float) -> Sample:
    prompt = Segment(SegmentKind.PROMPT, (1, 2), SPECIAL)
    answer = Segment(SegmentKind.ACTION, (3,), SPECIAL, (), (-1.0,), (0,), StopReason.END_OF_TURN, reward)
    return Sample(name, group, (prompt, answer), (1,), reward, reward, name)


def test_advantages_by_hand_keep_samples_and_order() -> None:
    samples = [sample("a/0", "a", 1.0), sample("b/0", "b", 5.0), sample("a/1", "a", 4.0), sample("b/1", "b", 5.0)]
    found = assign_advantages(samples, AlgorithmConfig(preset="dr_grpo").resolved())
    assert [s.id for s in found] == ["a/0", "b/0", "a/1", "b/1"]
    assert [s.segments for s in found] == [s.segments for s in samples]
    assert all(s.credit is None for s in samples)
    assert advantages(samples, preset="dr_grpo") == [-1.5, 0.0, 1.5, 0.0]
    assert advantages(samples, preset="rloo", kl_coef=0.0) == [-3.0, 0.0, 3.0, 0.0]
    # the spread of the group a: sqrt(((1 - 2.5)² + (4 - 2.5)²) / (2 - 1)) = 2.1213
    assert advantages(samples, preset="grpo") == pytest.approx([-0.70711, 0.0, 0.70711, 0.0], abs=1e-4)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_names_the_sample(reward: float) -> None:
    broken = replace(sample("a/1", "a", 0.0), reward=reward)
    with pytest.raises(ValueError, match="sample a/1 has the reward (nan|inf|-inf)"):
        assign_advantages([sample("a/0", "a", 1.0), broken], AlgorithmConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "decoupled_ppo", "correction": "tis"}, "algorithm.correction: decoupled_ppo has a correction of its"),
        ({"correction": "icepop", "correction_low": 2.0}, "algorithm.correction_low: must be below"),
    ],
)
def test_corrections_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig(**settings).resolved()
