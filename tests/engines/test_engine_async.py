"""Engine processes that wait for nobody, on real processes: new weights in the middle of turns."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.engines.async_actor import UPDATES
from tests.support.models import tiny_folder
from tests.support.ranks import finish, fork, said


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a learner with two engines saw. One of its sessions never asks for anything, and nobody waits for it."""
    folder = tmp_path_factory.mktemp("free")
    shutil.copytree(tiny_folder("qwen2_5_vl"), folder / "model")
    assert finish(fork(3, ["-m", "tests.engines.async_actor", folder], folder)) == [0, 0, 0], said(folder, 3)
    return json.loads((folder / "seen.json").read_text())


def test_turns_go_on_with_new_weights(seen: dict[str, Any]) -> None:
    turns = [versions for trajectory in seen["versions"] for versions in trajectory]
    assert seen["errors"] == [None] * 8 and len(turns) == 2 * (3 + 2 + 2 + 1)
    assert all(versions == sorted(versions) and versions for versions in turns)
    assert any(len(set(versions)) > 1 for versions in turns)
    assert {v for versions in turns for v in versions} == set(range(UPDATES + 1))


def test_each_token_has_the_logprob_of_the_weights_that_made_it(seen: dict[str, Any]) -> None:
    assert len(seen["gaps"]) > 50 and max(right for _, right, _ in seen["gaps"]) < 1e-4
    for version in range(UPDATES + 1):
        assert max(wrong for v, _, wrong in seen["gaps"] if v == version) > 1e-2, "the check tells versions apart"


def test_nothing_is_left_of_what_ended(seen: dict[str, Any]) -> None:
    homes, playing, open_sessions = seen["left"]
    assert (homes, playing, len(open_sessions)) == (0, 0, 1)
    assert seen["counts"]["turns"] == 16


def test_an_engine_that_fails_a_round_is_named_and_goes_on(seen: dict[str, Any]) -> None:
    kinds = sorted(kind for kind, _ in seen["broken"])
    assert kinds == ["EngineError", "Generation"], "each engine had one of them"
    (message,) = (text for kind, text in seen["broken"] if kind == "EngineError")
    assert message.startswith("engine 1 (rank 1, process ") and message.endswith(": MemoryError: no room")
    assert seen["works again"] > 0


def test_versions_never_fall(seen: dict[str, Any]) -> None:
    assert "versions never fall" in seen["falls"]
