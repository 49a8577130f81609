"""Losses by the names and options of the configuration, of which tests may also give what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npu_vlrl.algorithms import LOSSES, aggregation
from npu_vlrl.algorithms import policy_loss as made_of_terms
from npu_vlrl.algorithms.aggregation import AGGREGATIONS
from npu_vlrl.algorithms.component import Chosen, Component
from npu_vlrl.algorithms.correction import CORRECTIONS
from npu_vlrl.algorithms.entropy import Entropy
from npu_vlrl.algorithms.kl import KL
from npu_vlrl.algorithms.loss_tokens import LossTokens


class Bounds(NamedTuple):
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    correction_low: float = 0.5
    correction_high: float = 2.0


def chosen(table: Mapping[str, Component], name: str, settings: Mapping[str, Any]) -> Chosen[Any]:
    """A component with those of the settings that it knows."""
    component = table[name]
    if component.options is None:
        return Chosen(component)
    return Chosen(component, component.options(**{k: v for k, v in settings.items() if k in component.option_names}))


def call(name: str, tokens: LossTokens, bounds: Bounds) -> Any:
    return chosen(LOSSES, name, bounds._asdict())(tokens)


def policy_loss(*tensors: Tensor, loss: str = "ppo", correction: str = "off", **settings: Any) -> Any:
    """`policy_loss` with the five tensors that it begins with; there is no dual clip unless it is given."""
    named = {k: settings.pop(k) for k in list(settings) if k.endswith("_N") or k == "n_samples"}
    bounds = Bounds(**{k: settings.pop(k) for k in list(settings) if k in Bounds._fields})._asdict()
    entropy = Entropy(**{k: settings.pop(k) for k in list(settings) if k in Entropy.model_fields})
    terms = made_of_terms.PolicyTerms(
        chosen(LOSSES, loss, bounds), chosen(CORRECTIONS, correction, bounds), KL(**settings), entropy
    )
    return made_of_terms.policy_loss(*tensors, terms, **named)


def token_weights(
    sample_N: Tensor,
    trained_S: Tensor,
    mode: str,
    tokens: int,
    samples: int,
    constant: float,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    found = chosen(AGGREGATIONS, mode, {"loss_constant": constant})
    return aggregation.token_weights(found, sample_N, trained_S.to(dtype), tokens, samples)
