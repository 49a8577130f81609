"""An engine may have given its memory back whenever a learner computes, and is awake whenever it is asked to sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.learner.trainer import Learner
from tests.support.program import program
from tests.support.runs import write_config


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done in turn, each by its first letter; the engine has sleep that says so."""
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    did: list[str] = []

    def noting(owner: type, name: str, word: str) -> None:
        right = getattr(owner, name)

        @wraps(right)
        def noted(*arguments: Any, **more: Any) -> Callable[..., Any]:
            did.append(word)
            return right(*arguments, **more)

        monkeypatch.setattr(owner, name, noted)

    for owner, name, word in (
        (InProcessEngine, "sleep", "zzz"),
        (InProcessEngine, "weights_changed", "awake"),
        (InProcessEngine, "sample", "samples"),
        (Learner, "supervise", "learns"),
        (Learner, "score", "learns"),
        (Learner, "step", "learns"),
    ):
        noting(owner, name, word)
    return did


def check(did: list[str]) -> None:
    awake = True
    for word in did:
        assert word not in ("samples", "learns") or (word == "samples") == awake, did
        awake = {"zzz": False, "awake": True}.get(word, awake)


def test_in_a_training(seen: list[str], tmp_path: Path) -> None:
    words = ("--config", write_config(tmp_path), "--run-dir", tmp_path / "run", "evaluation.every=2")
    assert program("train", *words).code == 0
    check(seen)
    assert seen.count("learns") == 2 + 4 * 2 and seen.count("zzz") == 1 + 4 and "samples" in seen
    with pytest.raises(AssertionError):
        check([word for word in seen if word != "zzz"])


def test_in_rollouts_without_a_learner(seen: list[str], tmp_path: Path) -> None:
    words = ("--config", write_config(tmp_path), "--run-dir", tmp_path / "run", "warm_start.steps=0")
    assert program("train", *words, "--debug-rollout-only").code == 0
    check(seen)
    assert seen.count("zzz") == seen.count("awake") == 4 and "learns" not in seen
