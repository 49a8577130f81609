"""The drawings are what their script draws, and the numbers in them are those of the code."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from npu_vlrl.algorithms.advantages.dr_grpo import dr_grpo
from npu_vlrl.algorithms.advantages.gigpo import gigpo
from npu_vlrl.algorithms.advantages.tokens import Tokens, backward_sums, next_in_run
from npu_vlrl.algorithms.advantages.turn_gae import turn_advantages
from npu_vlrl.algorithms.advantages.turns import Turns

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "make" / "drawings.py"))
TURN = np.array([0, 0, 0, 1, 1, 2, 2, 2])
"""Turn of each sampled token of the episode that is drawn."""


def drawn(estimator: str) -> list[float]:
    return [value for turn in SCRIPT["CREDIT"][estimator][1] for value in turn]


@pytest.mark.parametrize("draw", SCRIPT["DRAWINGS"], ids=lambda draw: draw.__name__)
def test_committed_drawings_are_what_the_script_draws(draw) -> None:  # type: ignore[no-untyped-def]
    committed = (DOCS / "images" / f"{draw.__name__}.svg").read_text(encoding="utf-8")
    assert committed == draw().svg(), "run: python docs/make/drawings.py"
    assert ElementTree.fromstring(committed).find("{http://www.w3.org/2000/svg}title") is not None


def test_every_drawing_is_shown_with_words_for_who_cannot_see_it() -> None:
    shown = re.findall(r"!\[(.+)\]\(images/(\w+)\.svg\)", (DOCS / "concepts.md").read_text(encoding="utf-8"))
    assert {name for _, name in shown} == {file.stem for file in (DOCS / "images").glob("*.svg")}
    assert all(len(words) > 20 for words, _ in shown)


def test_the_credit_of_turns() -> None:
    """Two episodes of three turns; the first one is solved in its last turn, and the first states are the same."""
    turns = Turns(
        group_K=np.array(["g"] * 6),
        episode_K=np.array([0, 0, 0, 1, 1, 1]),
        index_K=np.array([0, 1, 2, 0, 1, 2]),
        rewards_K=np.array([0.0, 0, 1, 0, 0, 0]),
        outcomes_K=np.array([1.0, 1, 1, 0, 0, 0]),
    )
    assert drawn("dr_grpo") == pytest.approx(turns.of_episodes(dr_grpo)[TURN])
    found = gigpo(turns, ["start", "a", "b", "start", "c", "d"], turn_discount=0.9, state_weight=1.0)
    assert drawn("gigpo") == pytest.approx(found[TURN])


def test_the_credit_of_tokens() -> None:
    said = np.array([0.5, 0.52, 0.55, 0.6, 0.65, 0.8, 0.85, 0.9])
    rewards = np.eye(8)[7]
    episode = np.zeros(8, dtype=int)
    tokens = Tokens(episode, TURN, np.ones(8, dtype=bool), rewards, said)
    assert drawn("turn_wise_gae") == pytest.approx(turn_advantages(tokens, np.eye(3)[2], 1.0, 1.0)[TURN])
    delta = rewards + next_in_run(said, episode) - said
    assert drawn("masked_gae") == pytest.approx(backward_sums(delta, episode, 1.0))
