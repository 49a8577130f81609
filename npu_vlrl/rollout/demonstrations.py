"""Scripted episodes for the warm start: the real workflow, with a session that returns scripted turns."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from npu_vlrl.config import EnvironmentConfig
from npu_vlrl.types import DataError, Generation, SamplingParams, Segment, StopReason
from npu_vlrl.workflow.environments.formats import THOUGHTS, make_format
from npu_vlrl.workflow.environments.game import Game, Move


def played(
    game: Game,
    seed: int,
    config: EnvironmentConfig,
    right_share: float,
    rng: random.Random,
    opened: bool | None = None,
) -> Iterator[str]:
    """Turns of a demonstrator in an episode of a game, of which `game` is its own copy.

    A turn takes one to `max_actions` actions. A share of `right_share` of the actions is the first one of the game's
    solution from its current state; the others are drawn uniformly from the other actions, or from all where there is
    no solution. The demonstrator's thought is its plan; fields for observations and predictions get "…". `opened`: see
    `formats.Format`.
    """
    form = make_format(config, opened)
    game.start(seed)
    move = Move()
    while not move.last:
        plan: list[str] = []
        for _ in range(rng.randint(1, config.max_actions)):
            plan.append(_choice(game, right_share, rng))
            move = game.act(plan[-1])
            if move.last:
                break
        answer = config.separator.join(plan)
        thoughts = {part: answer if part in ("think", "reasoning") else "…" for part in THOUGHTS[config.format]}
        yield form.write({**thoughts, config.answer_tag: answer})


def _choice(game: Game, right_share: float, rng: random.Random) -> str:
    solution = game.solution()
    best = solution[0] if solution else None
    others = [action for action in game.actions if action != best]
    return best if best is not None and (rng.random() < right_share or not others) else rng.choice(others)


class ScriptedSession:
    """Session that returns scripted lines, see `types.EngineSession`. Raises DataError when there are no more lines."""

    def __init__(self, lines: Iterable[str], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
        """`ends`: see `SpecialTokens.end_of_turn`."""
        self._lines = iter(lines)
        self._tokenizer = tokenizer
        self._ends = ends

    async def generate(self, context: Sequence[Segment], sampling: SamplingParams) -> Generation:
        line = next(self._lines, None)
        if line is None:
            raise DataError(
                "the demonstrator has played its copy of the game to the end, and the episode goes on; make the game "
                "do the same for the same seed and actions"
            )
        ids = tuple(self._tokenizer.encode(line, add_special_tokens=False))
        if ids[-1] not in self._ends:
            ids += (self._ends[0],)
        # these ids were not sampled, and supervised steps do not read the logprobs
        return Generation(ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.END_OF_TURN)

    def close(self) -> None:
        """Does nothing: the session holds no resources."""
