"""Group rewards: rewards of episodes by comparison within their group, before advantages are estimated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npu_vlrl.algorithms.component import Chosen, Component, F, marked
from npu_vlrl.types import Trajectory


@dataclass(frozen=True)
class Group:
    """The episodes of one task in one step.

    Example: `[len(t.turns) for t in group.trajectories]`
    """

    name: str
    trajectories: Sequence[Trajectory]
    outcomes: Sequence[float]
    """Reward of each episode by `workflow.reward_mode`."""


@dataclass(frozen=True)
class GroupReward(Component):
    """A function of a `Group` that returns a number for each episode, or those and metrics, a mapping of names to
    numbers. The number is added to the reward of the episode's last turn.
    """


def group_reward(options: type[Any] | None = None) -> Callable[[F], F]:
    """Declares a function `f(group)`, with options `f(group, options)`, as a reward of groups, see `GroupReward`.

    Example: `@group_reward(MyOptions)`
    """
    return marked(lambda function: GroupReward(function, options))


class GroupRewards:
    """Computes the rewards of each group once, and adds them to its episodes."""

    def __init__(self, reward: Chosen[GroupReward] | None, outcome: Callable[[Trajectory], float]) -> None:
        """`reward`: None leaves episodes as they are. `outcome`: the reward of a whole episode."""
        self._reward = reward
        self._outcome = outcome
        self._known: dict[str, tuple[list[float], dict[str, float]]] = {}
        """Rewards and metrics of each group, until `metrics` is called."""

    def added(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories of whole groups, in the same order; those without a turn earn nothing.

        Raises what the function of the user's own file raises.
        """
        if self._reward is None:
            return list(trajectories)
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        earned: dict[str, float] = {}
        for name, own in groups.items():
            earned |= zip((t.id for t in own), self._of(name, own), strict=True)
        return [_with_reward(t, earned[t.id]) for t in trajectories]

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Means over the groups of these trajectories: `group_reward`, and the function's own as `group_reward/NAME`.

        Clears the results of all groups.
        """
        known = [self._known[name] for name in dict.fromkeys(t.group for t in trajectories) if name in self._known]
        self._known.clear()
        if not known:
            return {}
        found = {"group_reward": float(np.mean([value for rewards, _ in known for value in rewards]))}
        for name in dict.fromkeys(name for _, own in known for name in own):
            found[f"group_reward/{name}"] = float(np.mean([own[name] for _, own in known if name in own]))
        return found

    def _of(self, name: str, trajectories: Sequence[Trajectory]) -> list[float]:
        if name not in self._known:
            assert self._reward is not None
            made = self._reward(Group(name, trajectories, [self._outcome(t) for t in trajectories]))
            rewards, metrics = made if isinstance(made, tuple) else (made, {})
            self._known[name] = list(rewards), dict(metrics)
        return self._known[name][0]


def _with_reward(trajectory: Trajectory, earned: float) -> Trajectory:
    if not trajectory.turns or not earned:
        return trajectory
    *before, last = trajectory.turns
    action = copy.copy(last.action)  # validated on construction, with special tokens that it does not store
    object.__setattr__(action, "reward", action.reward + earned)
    return replace(trajectory, turns=(*before, replace(last, action=action)))
