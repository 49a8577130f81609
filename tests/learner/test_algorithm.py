"""What the configuration's None means, preset by preset, and rewards to advantages."""

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from npu_vlrl.config import AlgorithmConfig, ConfigError
from npu_vlrl.learner.advantage import PRESETS
from npu_vlrl.learner.algorithm import Algorithm, assign_advantages, resolve
from npu_vlrl.types import Sample, Segment, SegmentKind, SpecialTokens

SPECIAL = SpecialTokens((9,))


def test_presets_are_the_published_settings() -> None:
    def preset(name: Any) -> Algorithm:
        return resolve(AlgorithmConfig(preset=name))

    assert preset("grpo") == Algorithm("grpo", "group", "seq-mean-token-mean", 0.2, 0.2, 3.0, 0.04, False)
    assert preset("dapo") == Algorithm("grpo", "group", "token-mean", 0.2, 0.28, 3.0, 0.0, True)
    assert preset("dr_grpo") == Algorithm("dr_grpo", None, "constant", 0.2, 0.2, 3.0, 0.0, False)
    assert preset("rloo") == Algorithm("rloo", None, "seq-mean-token-sum", 0.2, 0.2, 3.0, 0.05, False)


def test_every_preset_that_the_configuration_offers_resolves() -> None:
    offered = get_args(AlgorithmConfig.model_fields["preset"].annotation)
    assert set(offered) == set(PRESETS)
    for name in offered:
        resolve(AlgorithmConfig(preset=name))
    with pytest.raises(ValidationError):
        AlgorithmConfig(preset="ppo")  # type: ignore[arg-type]


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
    ],
)
def test_what_is_given_goes_before_the_preset(key: str, value: Any) -> None:
    plain = resolve(AlgorithmConfig(preset="grpo"))
    changed = resolve(AlgorithmConfig(preset="grpo", **{key: value}))
    assert getattr(changed, key) == value
    assert {k: v for k, v in vars(changed).items() if k != key} == {k: v for k, v in vars(plain).items() if k != key}


def test_another_estimator_than_the_preset_s() -> None:
    assert resolve(AlgorithmConfig(preset="grpo", advantage="rloo")).advantage_std is None
    assert resolve(AlgorithmConfig(preset="dr_grpo", advantage="grpo")).advantage_std == "group"
    assert resolve(AlgorithmConfig(preset="rloo", advantage="grpo", advantage_std="batch")).advantage_std == "batch"


@pytest.mark.parametrize(
    "settings", [{"preset": "dr_grpo"}, {"preset": "rloo"}, {"preset": "grpo", "advantage": "rloo"}]
)
def test_a_standard_deviation_that_the_estimator_does_not_have(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage_std: (dr_grpo|rloo) has no standard deviation; rem"):
        resolve(AlgorithmConfig(advantage_std="group", **settings))


def sample(name: str, group: str, reward: float) -> Sample:
    prompt = Segment(SegmentKind.PROMPT, (1, 2), SPECIAL)
    return Sample(name, group, (prompt,), (), reward)


def test_advantages_by_hand_keep_samples_and_order() -> None:
    samples = [sample("a/0", "a", 1.0), sample("b/0", "b", 5.0), sample("a/1", "a", 4.0), sample("b/1", "b", 5.0)]
    found = assign_advantages(samples, resolve(AlgorithmConfig(preset="dr_grpo")))
    assert [(s.id, s.advantage) for s in found] == [("a/0", -1.5), ("b/0", 0.0), ("a/1", 1.5), ("b/1", 0.0)]
    assert [s.segments for s in found] == [s.segments for s in samples]
    assert all(s.advantage is None for s in samples)
    leave_one_out = assign_advantages(samples, resolve(AlgorithmConfig(preset="rloo")))
    assert [s.advantage for s in leave_one_out] == [-3.0, 0.0, 3.0, 0.0]
    # the spread of the group a: sqrt(((1 - 2.5)² + (4 - 2.5)²) / (2 - 1)) = 2.1213
    grouped = assign_advantages(samples, resolve(AlgorithmConfig(preset="grpo")))
    assert [s.advantage for s in grouped] == pytest.approx([-0.70711, 0.0, 0.70711, 0.0], abs=1e-4)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_names_the_sample(reward: float) -> None:
    samples = [sample("a/0", "a", 1.0), sample("a/1", "a", reward)]
    with pytest.raises(ValueError, match="sample a/1 has the reward (nan|inf|-inf)"):
        assign_advantages(samples, resolve(AlgorithmConfig()))
