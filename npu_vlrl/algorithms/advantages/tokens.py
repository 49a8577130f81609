"""Arrays of the token-level estimators, and their shared parts: a recursion along runs, and whitening.

N counts scored tokens, K turns. The tokens of an episode are adjacent, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from npu_vlrl.algorithms.equality import equal
from npu_vlrl.types import Credit

EPSILON = 1e-8


@dataclass(frozen=True)
class Tokens:
    """The response tokens of a batch: each episode from its first ACTION token to its last, observations included."""

    episode_N: np.ndarray
    """int: index of the episode; the tokens of one episode are adjacent."""
    turn_N: np.ndarray
    """int: index of the turn in its episode, rising; an observation belongs to the turn after it."""
    sampled_N: np.ndarray
    """bool: sampled by the policy."""
    rewards_N: np.ndarray
    """float64: the reward of a turn on its last token; on all tokens, rewards of single tokens such as a KL term."""
    values_N: np.ndarray
    """float64: the critic's value of the state before the token was sampled."""

    def __post_init__(self) -> None:
        shapes = {x.shape for x in vars(self).values()}
        assert len(shapes) == 1, f"the arrays of a batch disagree in shape: {shapes}"
        unusable = np.flatnonzero(~(np.isfinite(self.rewards_N) & np.isfinite(self.values_N)))
        if unusable.size:
            at = int(unusable[0])
            raise ValueError(
                f"advantages: token {at} of episode {self.episode_N[at]} has the reward {self.rewards_N[at]} and the "
                f"value {self.values_N[at]}; both must be finite. Look at the reward function and at the critic."
            )

    def select(self, keep_N: np.ndarray) -> Tokens:
        return Tokens(*(x[keep_N] for x in vars(self).values()))

    def turn_ids(self) -> np.ndarray:
        """int [N]: one number for each turn of each episode."""
        return run_ids(self.episode_N, self.turn_N)

    def turn_ends(self) -> np.ndarray:
        """int [K]: indices of e_k, the last token of each turn, episode after episode."""
        last = np.ones(len(self.turn_N), dtype=bool)
        last[:-1] = changes(self.turn_ids())
        return np.flatnonzero(last)


def over(tokens: Tokens, mask_N: np.ndarray, estimator: Callable[[Tokens], Credit]) -> Credit:
    """Credit of the tokens in `mask_N` (VAGEN's M^adv), as if there were no others; the others get 0."""
    part = estimator(tokens.select(mask_N))
    full = [np.zeros(mask_N.shape, dtype=x.dtype) for x in (part.advantages_N, part.returns_N, part.critic_N)]
    for array, values in zip(full, (part.advantages_N, part.returns_N, part.critic_N), strict=True):
        array[mask_N] = values
    return Credit(*full)


def changes(ids: np.ndarray) -> np.ndarray:
    """bool [n - 1]: whether the next entry differs."""
    changed: np.ndarray = ids[1:] != ids[:-1]
    return changed


def next_in_run(values: np.ndarray, run: np.ndarray) -> np.ndarray:
    """The value of the following entry of the same run, 0 at the end of a run. `run` names each entry's run."""
    following = np.zeros_like(values)
    following[:-1] = np.where(changes(run), 0.0, values[1:])
    return following


def backward_sums(values: np.ndarray, run: np.ndarray, factor: float) -> np.ndarray:
    """y_t = x_t + factor · y_(t+1), where y is 0 beyond the end of a run; entries of a run are adjacent.

    The sums are doubled: a sum over 2s entries is the sum over s, plus factor^s times the sum over s that begins s
    later. This takes log2(longest run) passes over the whole batch instead of a loop over tokens.
    """
    sums, reach, weight = np.array(values, dtype=np.float64), 1, factor
    while reach < len(sums):
        joined = run[reach:] == run[:-reach]
        if not joined.any():
            break
        sums[:-reach] += np.where(joined, weight * sums[reach:], 0.0)
        reach, weight = 2 * reach, weight * weight
    return sums


def run_ids(*keys: np.ndarray) -> np.ndarray:
    """One number a run: a new run begins wherever one of the keys changes."""
    changed = np.zeros(len(keys[0]), dtype=np.int64)
    for key in keys:
        changed[1:] |= changes(key)
    return changed.cumsum()


def whiten(values: np.ndarray) -> np.ndarray:
    """(values - mean) / sqrt(variance + 1e-8), with the unbiased variance. Values that are `equal` give exactly 0."""
    if values.size < 2 or equal(values.min(), values.max()):
        return np.zeros_like(values, dtype=np.float64)
    whitened: np.ndarray = (values - values.mean()) / np.sqrt(values.var(ddof=1) + EPSILON)
    return whitened
