"""Engines in processes of their own, on real processes: the same episodes, and errors that name who failed."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.engines.remote_actor import KILLED, MEMBERS, OUT_OF_MEMORY, TASKS
from tests.support.models import tiny_folder
from tests.support.ranks import Forked, finish, fork, said

Seen = dict[str, Any]


def play(folder: Path, scenario: str, size: int) -> list[Forked]:
    """The processes of a scenario, which all go on by themselves."""
    shutil.copytree(tiny_folder("qwen2_5_vl"), folder / "model")
    return fork(size, ["-m", "tests.engines.remote_actor", scenario, folder], folder)


def finish_all(processes: list[Forked]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def seen(folder: Path, rank: int) -> Seen:
    file = folder / f"rank{rank}.json"
    assert file.is_file(), said(folder, rank + 1)
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def matched(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """Two engines; what each of the three processes saw. At the end one is killed, and the other hangs."""
    folder = tmp_path_factory.mktemp("match")
    processes = play(folder, "match", 3)
    try:
        assert finish(processes[:2]) == [0, -signal.SIGKILL], said(folder, 3)
        assert processes[2].poll() is None
    finally:
        finish_all(processes)
    return [seen(folder, rank) for rank in range(3)]


def test_two_engines_play_what_one_in_the_process_plays(matched: list[Seen]) -> None:
    learner = matched[0]
    assert len(learner["remote"]) == len(TASKS) * MEMBERS
    logprobs = set()
    for theirs, ours in zip(learner["remote"], learner["alone"], strict=True):
        for (ids, values, versions), (own_ids, own_values, own_versions) in zip(theirs, ours, strict=True):
            assert ids == own_ids
            assert values == pytest.approx(own_values, abs=1e-5)
            assert versions == own_versions == [3] * len(ids)
            logprobs.update(values)
    assert len(logprobs) > 50, "one token everywhere would compare nothing"


def test_a_group_and_all_turns_of_a_session_stay_together(matched: list[Seen]) -> None:
    homes = matched[0]["homes"][: len(TASKS) * MEMBERS]
    assert all(len(set(session)) == 1 for session in homes) and any(len(session) > 1 for session in homes)
    groups = [{session[0] for session in homes[i : i + MEMBERS]} for i in range(0, len(homes), MEMBERS)]
    assert groups == [{1}, {2}, {1}, {2}, {1}]  # to the engine with fewer sessions, the first of equals


def test_prompts_of_a_group_and_turns_before_are_shared_as_in_one_process(matched: list[Seen]) -> None:
    counts, alone = (dict(matched[0][key]) for key in ("counts", "alone counts"))
    images = [counts.pop(key) for key in ("images_referenced", "images_encoded")]
    del alone["images_referenced"], alone["images_encoded"]
    assert counts == alone
    assert images[0] == matched[0]["alone images"][0]
    assert images[1] >= matched[0]["alone images"][1]  # two engines may see the same image


def test_images_stay_encoded_until_the_features_are_forgotten(matched: list[Seen]) -> None:
    first, (kept, forgotten) = matched[0]["counts"]["images_encoded"], matched[0]["encoded"]
    assert kept == first and forgotten == 2 * first


def test_weights_are_reported(matched: list[Seen]) -> None:
    assert matched[0]["sync"]["sync/bytes"] > 0 and matched[0]["sync"]["sync/seconds"] > 0


def test_an_error_of_one_request_comes_back_as_its_own(matched: list[Seen]) -> None:
    assert [error.partition(" of this turn")[0] for error in matched[0]["not finite"]] == ["b: token 1", "c: token 1"]


def test_an_engine_keeps_sessions_that_go_on_and_no_others(matched: list[Seen]) -> None:
    homes = dict(enumerate(matched[0]["homes"][: len(TASKS) * MEMBERS]))
    for rank in (1, 2):
        for turn, kept in enumerate(matched[rank]["kept"][:3]):
            assert kept == [n for n, played in homes.items() if turn and played[0] == rank and len(played) > turn]
    assert [len(engine["kept"][1]) for engine in matched[1:]] == [4, 4]


def test_an_engine_that_fails_in_a_round_is_named(matched: list[Seen]) -> None:
    kind, message = matched[0][str(OUT_OF_MEMORY)]
    assert kind == "EngineError" and message.startswith("engine 1 (rank 1, process ")
    assert message.endswith(": MemoryError: no room for the cache")


def test_an_engine_killed_in_a_round_is_named_while_another_computes_on(matched: list[Seen]) -> None:
    kind, message = matched[0][str(KILLED)]
    assert kind == "PeerError" and message.startswith("engine 1 (rank 1, process ") and " is gone" in message


def test_an_engine_that_cannot_load_its_model_is_named(tmp_path: Path) -> None:
    codes = finish(play(tmp_path, "load", 2))
    assert codes == [0, 1], said(tmp_path, 2)  # it ends with its own error, after the learner
    kind, message = seen(tmp_path, 0)["error"]
    assert kind == "EngineEnded" and message.startswith("engine 1 (rank 1, ")
    assert message.endswith("): OSError: the disk is full")
