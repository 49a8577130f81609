"""Numbers that describe the rollouts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from npu_vlrl.config import WorkflowConfig
from npu_vlrl.report.verdicts import disagrees
from npu_vlrl.types import EpisodeStatus, Sample, StopReason, Trajectory, Turn
from npu_vlrl.workflow.export import outcome

FIRST_TURNS = 8
"""Turns whose lengths are told one by one: an episode of a game may have a hundred."""


def rollout_metrics(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample], workflow: WorkflowConfig
) -> dict[str, float]:
    """Means over trajectories, also of those groups that are not trained on, over turns, or over the samples that are;
    shares are in 0..1, lengths in tokens. `reward` is that of an episode, as in evaluations.

    `judge_disagreement` is the share of the answers that a checker of weight 0 judged, where one found otherwise than
    the term that decides; `judge_checks_failed` that of the answers on which a checker failed. Both are absent without
    checkers. `action_tokens/turnK` is the mean over the trajectories that have a K-th turn, absent where none has.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    rewards = np.array([outcome(t, workflow.reward_mode, workflow.turn_discount) for t in trajectories])
    groups: dict[str, set[float]] = {}
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        groups.setdefault(trajectory.group, set()).add(float(reward))
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "first_try_accuracy": _share(t.solved_first_try for t in trajectories),
        "solved": _share(t.solved for t in trajectories),
        "turns": len(turns) / len(trajectories),
        "tool_calls": sum(len(turn.tool_calls) for turn in turns) / len(trajectories),
        "tool_errors": sum(result.error for turn in turns for result in turn.tool_results) / len(trajectories),
        "action_tokens": sum(len(turn.action) for turn in turns) / max(1, len(turns)),
        "response_tokens": sum(len(turn.action) for turn in turns) / len(trajectories),
        **_lengths_by_turn(trajectories),
        "sample_tokens": float(np.mean([len(sample) for sample in samples])),
        "cut_turns": _share(turn.action.stop_reason is not StopReason.END_OF_TURN for turn in turns),
        "judge_errors": float(sum(turn.judge_error is not None for turn in turns)),
        "judge_failed": _share(turn.judge_error is not None for turn in turns if turn.verdict is not None),
        **_second_checks(turns),
        "trained_groups": float(len({sample.group for sample in samples})),
        "groups_without_spread": _share(len(values) == 1 for values in groups.values()),
        **{f"status/{s.value}": _share(t.status is s for t in trajectories) for s in EpisodeStatus},
    }


def _second_checks(turns: Sequence[Turn]) -> dict[str, float]:
    """How terms of weight 0 compare with the one that decides; nothing where there are none."""
    verdicts = [turn.verdict for turn in turns if turn.verdict is not None and turn.verdict.checks]
    found = [found for verdict in verdicts if (found := disagrees(verdict)) is not None]
    failed = [any(isinstance(check, str) for check in verdict.checks.values()) for verdict in verdicts]
    return {
        **({"judge_disagreement": _share(found)} if found else {}),
        **({"judge_checks_failed": _share(failed)} if failed else {}),
    }


def throughput(trajectories: Sequence[Trajectory], seconds: float) -> Mapping[str, float]:
    """What a whole step of `seconds` brought: sampled tokens and trajectories of its groups for each second."""
    tokens = sum(len(turn.action) for trajectory in trajectories for turn in trajectory.turns)
    return {"sampled_tokens_per_second": tokens / seconds, "trajectories_per_second": len(trajectories) / seconds}


def _lengths_by_turn(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    lengths: dict[str, list[int]] = {}
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns[:FIRST_TURNS], start=1):
            lengths.setdefault(f"action_tokens/turn{number}", []).append(len(turn.action))
    return {name: float(np.mean(lengths[name])) for name in sorted(lengths)}


def _share(flags: object) -> float:
    values = list(flags)  # type: ignore[call-overload]
    return sum(values) / max(1, len(values))
