"""Converts trajectories to samples: one for the whole episode (`concat`), or one for each turn (`individual`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from npu_vlrl.config import ConfigError
from npu_vlrl.types import Sample, SegmentKind, Trajectory

ExportStyle = Literal["concat", "individual"]
RewardMode = Literal["best", "last", "sum"]


def trajectory_reward(
    turn_rewards: Sequence[float], verdicts: Sequence[float | None], mode: RewardMode, discount: float
) -> float:
    """Reward of an episode, with turns counted from 0.

    `verdicts` are the judge's rewards of the answers, v_k, and None for a turn without one. Over the answers, `best`:
    max of discount^k v_k (the rule of AReaL's pull request 931); `last`: v_k of the last one; `sum`: sum of discount^k
    v_k. No answer scores 0. Other rewards of the turns, for tool calls or for their length, are added in every mode,
    discount^k (r_k - v_k) each: inside the maximum of `best`, a penalty of any other turn than the best one would have
    no effect. The sum is rounded once, so its order does not matter.
    """
    answered, besides = [], []
    for k, (reward, verdict) in enumerate(zip(turn_rewards, verdicts, strict=True)):
        besides.append(discount**k * (reward - (verdict or 0.0)))
        if verdict is not None:
            answered.append(discount**k * verdict)
    answered = answered or [0.0]
    terms = [*{"best": [max(answered)], "last": answered[-1:], "sum": answered}[mode], *besides]
    try:
        return math.fsum(terms)
    except OverflowError:  # then it is infinite, and refused by whoever reads it
        return sum(terms)


def pays_for_failing(mode: RewardMode, discount: float, lowest: float) -> bool:
    """Whether wrong answers earn more the longer an episode is, where a judge's lowest verdict is `lowest`."""
    return mode != "sum" and discount < 1 and lowest < 0


def outcome(trajectory: Trajectory, mode: RewardMode, discount: float) -> float:
    """Reward of a whole trajectory, see `trajectory_reward`."""
    verdicts = [turn.verdict.reward if turn.verdict else None for turn in trajectory.turns]
    return trajectory_reward(trajectory.turn_rewards, verdicts, mode, discount)


def returns_to_go(turn_rewards: Sequence[float], discount: float) -> list[float]:
    """Discounted returns in the order of the turns: R_k = r_k + discount * R_(k+1)."""
    returns = [0.0] * (len(turn_rewards) + 1)
    for k in reversed(range(len(turn_rewards))):
        returns[k] = turn_rewards[k] + discount * returns[k + 1]
    return returns[:-1]


def export(
    trajectories: Sequence[Trajectory], style: ExportStyle, mode: RewardMode, discount: float, template: str
) -> list[Sample]:
    """Exports samples in the order of the trajectories; an episode without turns gives none.

    Raises ConfigError for `concat` when the chat template rewrote history, naming template, trajectory and turn.
    """
    make = {"concat": _concat, "individual": _individual}[style]
    return [s for t in trajectories if t.turns for s in make(t, mode, discount, template)]


def _concat(trajectory: Trajectory, mode: RewardMode, discount: float, template: str) -> list[Sample]:
    rewritten = trajectory.rewritten_turn()
    if rewritten is not None:
        raise ConfigError(
            f"trajectory {trajectory.id}: the chat template of {template} rewrote the history before turn "
            f"{rewritten + 1}, so the episode is not one sequence; use workflow.export_style=individual"
        )
    last = trajectory.turns[-1]
    segments = (*last.context, last.action)
    trained = tuple(i for i, segment in enumerate(segments) if segment.kind is SegmentKind.ACTION)
    reward = outcome(trajectory, mode, discount)
    states = tuple(turn.state for turn in trajectory.turns)
    return [Sample(trajectory.id, trajectory.group, segments, trained, reward, reward, trajectory.id, states=states)]


def _individual(trajectory: Trajectory, mode: RewardMode, discount: float, template: str) -> list[Sample]:
    returns = returns_to_go(trajectory.turn_rewards, discount)
    whole = outcome(trajectory, mode, discount)
    return [
        Sample(
            f"{trajectory.id}/{k}",
            trajectory.group,
            (*turn.context, turn.action),
            (len(turn.context),),
            reward,
            whole,
            trajectory.id,
            first_turn=k,
            states=(turn.state,),
        )
        for k, (turn, reward) in enumerate(zip(trajectory.turns, returns, strict=True))
    ]
