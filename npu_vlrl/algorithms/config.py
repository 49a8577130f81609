"""The section `algorithm` of the configuration: its vocabulary and its keys are those of the components."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_type_hints

from pydantic import Field, ValidationError, create_model, field_validator

from npu_vlrl.algorithms import own
from npu_vlrl.algorithms.advantages import ESTIMATORS, Estimator
from npu_vlrl.algorithms.advantages.assign import assign_advantages
from npu_vlrl.algorithms.aggregation import AGGREGATIONS
from npu_vlrl.algorithms.component import FIXED, C, Chosen, Component, Options
from npu_vlrl.algorithms.correction import CORRECTIONS, OFF
from npu_vlrl.algorithms.entropy import Entropy
from npu_vlrl.algorithms.group_rewards import GroupReward
from npu_vlrl.algorithms.kl import KL
from npu_vlrl.algorithms.losses import LOSSES, Loss
from npu_vlrl.algorithms.policy_loss import PolicyTerms
from npu_vlrl.algorithms.presets import PRESETS, REMOVED
from npu_vlrl.algorithms.selection import Selection
from npu_vlrl.common.fields import ConfigError, Count, Positive, Section, expand_home
from npu_vlrl.common.user_file import is_spec
from npu_vlrl.types import Sample

TABLES: dict[str, Mapping[str, Component]] = {
    "advantage": ESTIMATORS,
    "loss": LOSSES,
    "correction": CORRECTIONS,
    "aggregation": AGGREGATIONS,
}
"""Components by name, for each key that names one."""
ALWAYS: tuple[type[Options], ...] = (KL, Entropy, Selection)
"""Options of components that every algorithm has."""
UNLESS_GIVEN = {"loss": "ppo", "aggregation": "token-mean", "loss_mask": True}
"""Defaults where neither the configuration nor the preset chooses."""

if TYPE_CHECKING:
    PresetName = str
    EstimatorName = str
    LossName = str
    CorrectionName = str
    AggregationName = str
else:
    PresetName, EstimatorName, LossName, CorrectionName, AggregationName = (
        Literal[tuple(names)] for names in (PRESETS, ESTIMATORS, LOSSES, CORRECTIONS, AGGREGATIONS)
    )
OwnFile = Annotated[str, Field(pattern=r"\.py:\w+$")]
O = TypeVar("O", bound=Options)  # noqa: E741


class AlgorithmBase(Section):
    """`preset` fills what is left at null; docs/algorithms.md has a table of what each fills in."""

    preset: PresetName = "grpo"
    """A published algorithm, which chooses what is null below."""
    advantage: EstimatorName | OwnFile | None = None
    """The estimator of advantages, or `path/to/file.py:function`, see docs/algorithms.md."""
    advantage_options: dict[str, Any] = {}
    """Options of an estimator from a file of your own."""
    loss: LossName | OwnFile | None = None
    """The loss of a token, or `path/to/file.py:function`, see docs/losses.md."""
    loss_options: dict[str, Any] = {}
    """Options of a loss from a file of your own."""
    loss_mask: bool | None = None
    """Trains on the sampled tokens alone (VAGEN's M^loss), not on the observations between them."""
    aggregation: AggregationName | None = None
    """The sum that makes one number of the losses of tokens, see docs/losses.md."""
    correction: CorrectionName = OFF
    """Weighs tokens by learner over engine probability: capped (`tis`), or left out beyond the bounds (`icepop`)."""
    group_reward: OwnFile | None = None
    """`path/to/file.py:function`, which rewards the episodes of a group by comparison, see docs/algorithms.md."""
    group_reward_options: dict[str, Any] = {}
    """Options of that function."""
    updates: Count = 1
    """Optimiser steps on each batch of trajectories; the batch is split into as many mini-batches."""
    epochs: Count = 1
    """Passes over each batch."""
    max_logprob_gap: Positive | None = None
    """Largest |learner - engine| log-probability allowed on the first mini-batch; more ends the run. Not set: 0.05 for
    a model in float32, 1 in bfloat16, where rounding alone makes a gap of 0.15 (benchmarks/README.md)."""

    _home = expand_home("advantage", "loss", "group_reward")

    @field_validator("preset", mode="before")
    @classmethod
    def _removed(cls, name: Any) -> Any:
        if name in REMOVED:
            raise ValueError(f"the preset {name} is one override of another; write {REMOVED[name]}")
        return name

    @field_validator("advantage", "loss", mode="before")
    @classmethod
    def _known(cls, name: Any, info: Any) -> Any:
        table = TABLES[info.field_name]
        if name is not None and not (isinstance(name, str) and (name in table or is_spec(name))):
            raise ValueError(f"unknown name; choose one of {', '.join(table)}, or write path/to/file.py:function")
        return name

    def resolved(self) -> Self:
        """A copy with every key filled in, by the preset and then by the components; an option that no chosen component
        has is None or its default.

        Raises ConfigError for a combination that means nothing.
        """
        filled = UNLESS_GIVEN | PRESETS[self.preset]
        values: dict[str, Any] = {}
        for key in ("advantage", "loss", "aggregation", "loss_mask"):
            given = getattr(self, key)
            values[key] = filled[key] if given is None else given
        defaults = {key: info.default for cls in self._used(values) for key, info in cls.model_fields.items()}
        for key, (_, info) in option_keys().items():
            given = getattr(self, key)
            if key in defaults:
                values[key] = filled.get(key, defaults[key]) if given is None else given
            elif given is not None and given != info.default:
                raise ConfigError(f"algorithm.{key}: {self._no_use(key, values)}")
            else:
                values[key] = info.default
        self._check(values)
        found = self.model_copy(update=values)
        for options in self._used(values):
            found._options(options)
        return found

    def _used(self, names: Mapping[str, Any]) -> Iterator[type[Options]]:
        """Options of all components that are chosen."""
        for kind, table in TABLES.items():
            name = names.get(kind, getattr(self, kind))
            if name in table and (options := table[name].options) is not None:
                yield options
        yield from ALWAYS

    def _no_use(self, key: str, names: Mapping[str, Any]) -> str:
        kind, owners = next(
            (kind, owners)
            for kind in ("advantage", "correction", "aggregation", "loss")
            if (owners := [name for name, component in TABLES[kind].items() if key in component.option_names])
        )
        if kind == "advantage":
            return f"the estimator {names[kind]} has no such setting; remove it"
        needed = f"algorithm.{kind}={owners[0]}" if len(owners) == 1 else f"another algorithm.{kind}"
        return f"has no effect here; leave it out, or set {needed}"

    def _check(self, values: Mapping[str, Any]) -> None:
        for kind in ("advantage", "loss"):
            name, given = values[kind], getattr(self, f"{kind}_options")
            if given and not is_spec(name):
                keys = ", ".join(f"algorithm.{key}" for key in TABLES[kind][name].option_names) or "none"
                remedy = f"remove them, or write what {name} has: {keys}"
                raise ConfigError(f"algorithm.{kind}_options: are for a file of your own; {remedy}")
        if self.group_reward_options and self.group_reward is None:
            raise ConfigError("algorithm.group_reward_options: has no effect without algorithm.group_reward; set that")
        if self.correction != OFF and values["loss"] in LOSSES and LOSSES[values["loss"]].corrects:
            raise ConfigError(f"algorithm.correction: {values['loss']} has a correction of its own; set it to off")

    def _options(self, options: type[O]) -> O:
        """The options of one class, from the values of this section. Raises ConfigError for contradictory ones."""
        try:
            return options(**{key: getattr(self, key) for key in options.model_fields})
        except ValidationError as error:
            raise ConfigError(f"algorithm.{error.errors()[0]['msg'].removeprefix('Value error, ')}") from None

    def _chosen(self, kind: str, name: str | None, component: type[C]) -> Chosen[C]:
        """The component that a key of these resolved settings names, with its options. Raises ConfigError for a user's
        file that cannot be used.
        """
        assert name is not None, "the settings are resolved"
        found: Any = TABLES.get(kind, {}).get(name)
        if found is None:
            return own.load(component, f"algorithm.{kind}", name, getattr(self, f"{kind}_options"))
        return Chosen(found, None if found.options is None else self._options(found.options))

    @property
    def kl(self) -> KL:
        return self.resolved()._options(KL)

    @property
    def selection(self) -> Selection:
        return self.resolved()._options(Selection)

    @property
    def estimator(self) -> Chosen[Estimator]:
        here = self.resolved()
        return here._chosen("advantage", here.advantage, Estimator)

    @property
    def weights(self) -> Chosen[Component]:
        """The component that weights tokens, see `aggregation.token_weights`."""
        here = self.resolved()
        return here._chosen("aggregation", here.aggregation, Component)

    @property
    def reward_of_groups(self) -> Chosen[GroupReward] | None:
        name = self.group_reward
        return None if name is None else self._chosen("group_reward", name, GroupReward)

    def policy_terms(self) -> PolicyTerms:
        """The parts of the policy's loss. Raises what `resolved` raises, and ConfigError for a user's file."""
        here = self.resolved()
        loss = here._chosen("loss", here.loss, Loss)
        if loss.component.corrects and self.correction != OFF:
            raise ConfigError("algorithm.correction: the loss has a correction of its own; set it to off")
        correction = here._chosen("correction", here.correction, Component)
        return PolicyTerms(loss, correction, here._options(KL), here._options(Entropy))

    def try_own(self) -> None:
        """Loads the components in the user's files, and tries a loss, before a model is loaded. Raises ConfigError."""
        here = self.resolved()
        _, _, terms = here.estimator, here.reward_of_groups, here.policy_terms()
        if here.loss not in LOSSES:
            own.try_loss(terms.loss, "algorithm.loss")

    @property
    def with_observations(self) -> bool:
        """Whether tokens that the policy did not sample are scored."""
        here = self.resolved()
        return not here.loss_mask or getattr(here, "advantage_mask", None) is False

    @property
    def needs(self) -> frozenset[str]:
        """Names of the `Scores` that the learner computes before an update."""
        terms = self.policy_terms()
        found = self.estimator.component.needs | terms.loss.component.needs | terms.correction.component.needs
        return found | terms.kl.needs | ({"proximal_N"} if not self.resolved().loss_mask else frozenset())

    @property
    def needs_critic(self) -> bool:
        return "values_N" in self.needs

    @property
    def needs_reference(self) -> bool:
        return "reference_N" in self.needs

    @property
    def tolerated_staleness(self) -> float:
        """Largest number of updates, between the policy that sampled and the learner's, that the loss corrects for."""
        loss = self.policy_terms().loss.component
        if self.correction != OFF or loss.corrects:
            return math.inf
        return 1 if loss.ratio and self.resolved().loss_mask else 0

    def with_credit(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """See `assign_advantages`."""
        return assign_advantages(samples, self.estimator, self.kl)


@cache
def option_keys() -> dict[str, tuple[Any, Any]]:
    """Type and field of each option of a built-in component, by its key in the configuration."""
    classes = [component.options for table in TABLES.values() for component in table.values()]
    found: dict[str, tuple[Any, Any]] = {}
    for options in (*classes, *ALWAYS):
        if options is None:
            continue
        hints = get_type_hints(options, include_extras=True)
        for key, info in options.model_fields.items():
            fixed = FIXED in info.metadata
            hint = _without_mark(hints[key]) if fixed else hints[key] | None
            made = (hint, Field(default=info.default if fixed else None, description=info.description))
            before = found.setdefault(key, made)
            assert repr(before[0]) == repr(hint), f"two components disagree about the type of {key}"
    return found


def _without_mark(hint: Any) -> Any:
    """`Annotated[Annotated[float, limits], FIXED]` is one flat Annotated."""
    base, *rest = hint.__origin__, *(item for item in hint.__metadata__ if item != FIXED)
    return Annotated.__class_getitem__((base, *rest)) if rest else base  # type: ignore[attr-defined]


if TYPE_CHECKING:

    class AlgorithmConfig(AlgorithmBase):
        def __init__(self, **settings: Any) -> None: ...
else:
    AlgorithmConfig = create_model(
        "AlgorithmConfig", __base__=AlgorithmBase, __doc__=AlgorithmBase.__doc__, __module__=__name__, **option_keys()
    )
