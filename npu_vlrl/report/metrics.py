"""Metrics of the rollouts of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from npu_vlrl.algorithms.equality import equal
from npu_vlrl.config import WorkflowConfig
from npu_vlrl.report.verdicts import disagrees
from npu_vlrl.types import EpisodeStatus, Sample, StopReason, Trajectory, Turn
from npu_vlrl.workflow.export import outcome

FIRST_TURNS = 8
"""Number of turns whose lengths are reported separately: an episode of a game may have a hundred."""


def rollout_metrics(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample], workflow: WorkflowConfig
) -> dict[str, float]:
    """Means over trajectories, also of those groups that are not trained on, over turns, or over the samples that are;
    shares are in 0..1, lengths in tokens. `reward` is that of an episode, as in evaluations.

    A mean or share of no values is left out: `judge_failed` where no turn was judged, `action_tokens/turnK` where no
    trajectory has a K-th turn. `judge_disagreement` is the share of the answers that a checker of weight 0 judged,
    where one found otherwise than the term that decides; `judge_checks_failed` that of the answers on which a checker
    failed.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    rewards = np.array([outcome(t, workflow.reward_mode, workflow.turn_discount) for t in trajectories])
    groups: dict[str, set[float]] = {}
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        groups.setdefault(trajectory.group, set()).add(float(reward))
    return {
        "reward": float(rewards.mean()),
        "reward_std": 0.0 if equal(rewards.min(), rewards.max()) else float(rewards.std()),
        **_mean("first_try_accuracy", (t.solved_first_try for t in trajectories)),
        **_mean("solved", (t.solved for t in trajectories)),
        "turns": len(turns) / len(trajectories),
        "tool_calls": sum(len(turn.tool_calls) for turn in turns) / len(trajectories),
        "tool_errors": sum(result.error for turn in turns for result in turn.tool_results) / len(trajectories),
        **_mean("action_tokens", (len(turn.action) for turn in turns)),
        "response_tokens": sum(len(turn.action) for turn in turns) / len(trajectories),
        **_lengths_by_turn(trajectories),
        **_mean("sample_tokens", map(len, samples)),
        **_mean("invalid_turns", (turn.invalid for turn in turns)),
        **_mean("cut_turns", (turn.action.stop_reason is not StopReason.END_OF_TURN for turn in turns)),
        "judge_errors": float(sum(turn.judge_error is not None for turn in turns)),
        **_mean("judge_failed", (turn.judge_error is not None for turn in turns if turn.verdict is not None)),
        **_second_checks(turns),
        "trained_groups": float(len({sample.group for sample in samples})),
        **_mean("groups_without_spread", (equal(min(values), max(values)) for values in groups.values())),
        **{f"status/{s.value}": sum(t.status is s for t in trajectories) / len(trajectories) for s in EpisodeStatus},
    }


def _second_checks(turns: Sequence[Turn]) -> dict[str, float]:
    """Compares terms of weight 0 with the one that decides; empty where there are none."""
    verdicts = [turn.verdict for turn in turns if turn.verdict is not None and turn.verdict.checks]
    found = [found for verdict in verdicts if (found := disagrees(verdict)) is not None]
    failed = [any(isinstance(check, str) for check in verdict.checks.values()) for verdict in verdicts]
    return {
        **_mean("judge_disagreement", found),
        **_mean("judge_checks_failed", failed),
    }


def throughput(trajectories: Sequence[Trajectory], seconds: float) -> Mapping[str, float]:
    """Throughput of a whole step of `seconds`: sampled tokens and trajectories of its groups per second."""
    tokens = sum(len(turn.action) for trajectory in trajectories for turn in trajectory.turns)
    return {"sampled_tokens_per_second": tokens / seconds, "trajectories_per_second": len(trajectories) / seconds}


def _lengths_by_turn(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    lengths: dict[str, list[int]] = {}
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns[:FIRST_TURNS], start=1):
            lengths.setdefault(f"action_tokens/turn{number}", []).append(len(turn.action))
    return {name: float(np.mean(lengths[name])) for name in sorted(lengths)}


def _mean(name: str, values: Iterable[float]) -> dict[str, float]:
    """The mean as a metric; empty without values."""
    found = list(values)
    return {name: float(sum(found) / len(found))} if found else {}
