"""Arrays that estimators over samples, turns or tokens read, made from samples. S counts samples, K turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from npu_vlrl.algorithms.advantages.tokens import Tokens
from npu_vlrl.algorithms.advantages.turns import Turns
from npu_vlrl.types import Sample


@dataclass(frozen=True)
class AdvantageBatch:
    """The samples of a step, adjacent within an episode, and the rewards of single scored tokens."""

    samples: Sequence[Sample]
    earned_N: np.ndarray
    """float64: reward of each scored token of all samples, such as a KL penalty; 0 on tokens that were not sampled."""

    def __post_init__(self) -> None:
        for sample in self.samples:
            if not np.isfinite([sample.reward, sample.outcome]).all():
                raise ValueError(f"sample {sample.id} has the reward {sample.reward} and the outcome {sample.outcome}")
        assert len(self.earned_N) == sum(self.scored_S)

    @property
    def groups(self) -> list[str]:
        return [sample.group for sample in self.samples]

    @cached_property
    def scored_S(self) -> np.ndarray:
        """int: scored tokens of each sample."""
        return np.array([sample.n_scored for sample in self.samples], dtype=np.int64)

    @property
    def trained_S(self) -> np.ndarray:
        """int: trained tokens of each sample."""
        return np.array([sample.n_trained for sample in self.samples], dtype=np.int64)

    def rewards(self) -> np.ndarray:
        """Reward of each sample with those of its tokens, float64 [S]."""
        owner_N = np.repeat(np.arange(len(self.samples)), self.scored_S)
        own_S = np.bincount(owner_N, weights=self.earned_N, minlength=len(self.samples))
        return own_S + [sample.reward for sample in self.samples]

    @cached_property
    def episode_S(self) -> np.ndarray:
        """int: index of each sample's episode."""
        names = [sample.episode for sample in self.samples]
        new = np.array([i > 0 and name != names[i - 1] for i, name in enumerate(names)], dtype=np.int64)
        assert len(set(names)) == new.sum() + (len(names) > 0), "the samples of an episode do not stand together"
        return new.cumsum()

    def tokens(self, values: bool, turn_rewards: bool) -> Tokens:
        """The scored tokens of all samples, with the critic's values if they are asked for.

        With `turn_rewards` each turn's reward is on its last token; without, the episode's outcome is on its last one.
        """
        turn, sampled = self._turn_and_sampled()
        rewards = self.earned_N.copy()
        if turn_rewards:
            rewards[self._turn_ends()] += [s.segments[i].reward for s in self.samples for i in s.trained]
        else:
            last_S = np.append(self.episode_S[1:] != self.episode_S[:-1], True)
            outcomes_S = np.array([sample.outcome for sample in self.samples])
            rewards[(np.cumsum(self.scored_S) - 1)[last_S]] += outcomes_S[last_S]
        return Tokens(
            np.repeat(self.episode_S, self.scored_S),
            turn,
            sampled,
            rewards,
            self._values() if values else np.zeros_like(rewards),
        )

    def _values(self) -> np.ndarray:
        known = [sample.scores.values_N for sample in self.samples]
        scored = [part for part in known if part is not None]
        assert len(scored) == len(known), "the estimator needs a critic's values"
        return np.concatenate(scored).astype(np.float64)

    def turns(self) -> Turns:
        """The trained turns of all samples."""
        counts = [len(sample.trained) for sample in self.samples]
        own_K = np.bincount(self.on_turns(np.arange(sum(counts))), weights=self.earned_N, minlength=sum(counts))
        episode_K = np.repeat(self.episode_S, counts)
        own_E = np.bincount(episode_K, weights=own_K)
        return Turns(
            np.repeat(np.array(self.groups, dtype=str), counts),
            episode_K,
            np.array([s.first_turn + k for s in self.samples for k in range(len(s.trained))], dtype=np.int64),
            own_K + [s.segments[i].reward for s in self.samples for i in s.trained],
            np.repeat([sample.outcome for sample in self.samples], counts) + own_E[episode_K],
        )

    def states(self) -> list[str]:
        """The environment's `state_key` before each trained turn.

        Raises ValueError, naming the sample, where the environment gave none.
        """
        for sample in self.samples:
            if len(sample.states) != len(sample.trained) or None in sample.states:
                raise ValueError(
                    f"sample {sample.id}: its environment does not say in which state a turn began, which the "
                    "advantage estimator compares; choose an environment with states, or another algorithm.advantage"
                )
        return [str(state) for sample in self.samples for state in sample.states]

    def on_samples(self, values_S: np.ndarray) -> np.ndarray:
        """Gives each scored token the value of its sample, [N]."""
        return np.repeat(values_S, self.scored_S)

    def on_turns(self, values_K: np.ndarray) -> np.ndarray:
        """Gives each scored token the value of its turn, [N]; a token between two turns belongs to the second."""
        return np.repeat(values_K, np.diff(np.append(-1, self._turn_ends())))

    def _turn_ends(self) -> np.ndarray:
        """int [K]: index of the last token of each trained turn among all scored tokens."""
        lengths = [len(s.segments[i]) for s in self.samples for i in s.scored]
        trained = np.array([i in s.trained for s in self.samples for i in s.scored], dtype=bool)
        ends_K: np.ndarray = (np.cumsum(lengths, dtype=np.int64) - 1)[trained]
        return ends_K

    def _turn_and_sampled(self) -> tuple[np.ndarray, np.ndarray]:
        turn: list[int] = []
        sampled: list[bool] = []
        for sample in self.samples:
            following = sample.first_turn
            for i in sample.scored:
                turn += [following] * len(sample.segments[i])
                following += i in sample.trained
            sampled += sample.sampled_mask
        return np.array(turn, dtype=np.int64), np.array(sampled, dtype=bool)
