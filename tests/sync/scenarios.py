"""What every transport must do. The checks read what the processes of `tests.sync.actor` saw."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.sync.plan import ALIGNMENT
from tests.support.models import tiny_folder
from tests.support.ranks import ROOT
from tests.sync.actor import BUCKET_BYTES, SHORT_S

Seen = dict[str, Any]


@dataclass(frozen=True)
class Played:
    codes: list[int | None]
    """Exit code of each rank, -9 of one that was killed, None of one that hung."""
    seen: list[Seen]
    """What each rank saw, by scenario."""
    said: str


def play(folder: Path, size: int, environment: Mapping[str, str], groups: Sequence[str]) -> dict[str, Played]:
    """Plays the scenarios of each group in processes of their own."""
    shutil.copytree(tiny_folder("qwen2_5_vl"), folder / "model")
    settings = {"OMP_NUM_THREADS": "1", "NPU_VLRL_PLATFORM": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-m", "tests.sync.actor", folder, str(size), *groups]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **settings, **environment}, check=True)
    return {group: _read(folder / group, size) for group in groups}


def _read(folder: Path, size: int) -> Played:
    codes = json.loads((folder / "codes.json").read_text())
    files = [folder / f"rank{rank}.json" for rank in range(size)]
    said = "\n".join(f"--- rank {rank}\n{(folder / f'rank{rank}.log').read_text()}" for rank in range(size))
    assert all(file.is_file() or code == -9 for file, code in zip(files, codes, strict=True)), f"{codes}\n{said}"
    return Played(codes, [json.loads(file.read_text()) if file.is_file() else {} for file in files], said)


class Scenarios:
    """Subclasses say how many processes there are and what their environment is."""

    size = 2
    environment: Mapping[str, str] = {}
    living: Sequence[str] = ("plain", "corrupted", "other_shape", "missing", "two_dtypes")
    """In these all processes live, and so they follow each other in the same ones."""
    failing: Sequence[str] = ("engine_dies", "learner_dies")

    @pytest.fixture(scope="class")
    @classmethod
    def played(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
        return play(tmp_path_factory.mktemp("sync"), cls.size, cls.environment, [",".join(cls.living), *cls.failing])

    @pytest.fixture
    def good(self, played: dict[str, Played]) -> dict[str, list[Seen]]:
        """Scenario -> what each rank saw."""
        found = played[",".join(self.living)]
        assert found.codes == [0] * self.size, found.said
        return {name: [process[name] for process in found.seen] for name in self.living}

    @staticmethod
    def failed(played: dict[str, Played], scenario: str, codes: list[int]) -> list[Seen]:
        """What each rank saw; they must have ended with these codes."""
        found = played[scenario]
        assert found.codes == codes, found.said
        return [process.get(scenario, {}) for process in found.seen]

    def test_engines_hold_the_learners_weights_bit_for_bit(self, good: dict[str, list[Seen]]) -> None:
        learner, *engines = good["plain"]
        updates = learner["history"]
        for engine in engines:
            assert [state["version"] for state in engine["history"]] == [-1, 0, 1, 2, 3]
            assert engine["history"][0]["weights"] != updates[0]["weights"]
            for theirs, ours in zip(engine["history"][1:], updates, strict=True):
                assert theirs["weights"] == ours["weights"]
                assert theirs["logprobs"] == ours["logprobs"]
        assert len({tuple(state["logprobs"]) for state in updates}) == 3, "an update that changes nothing shows nothing"

    def test_nothing_frozen_nothing_twice_and_nothing_unchanged_is_sent(self, good: dict[str, list[Seen]]) -> None:
        learner = good["plain"][0]
        sizes = learner["sizes"]
        assert not any("visual" in name for name in sizes), "the tower is frozen"
        assert sum("embed_tokens" in name or "lm_head" in name for name in sizes) == 1, "the head is tied"
        padded = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
        filled = buckets(list(padded.values()))
        everything = [sum(filled), len(sizes), len(filled)]
        alone = [sum(buckets([padded[learner["changed alone"]]])), 1, 1]
        assert [state["sent"] for state in learner["history"]] == [everything, [0, 0, 0], alone, everything]

    def test_a_difference_of_the_models_is_named(self, good: dict[str, list[Seen]]) -> None:
        last = f"engine {self.size - 1} (rank {self.size - 1}, process "
        shape = good["other_shape"][0]["refused"]
        assert shape.startswith(
            f"parameter down_proj.weight has the shape [64, 96] here and has the shape [64, 5] in {last}"
        )
        assert "start all processes with the same model.path and the same model.lora" in shape
        gone = good["missing"][0]["refused"]
        assert gone.startswith(f"parameter down_proj.weight has the shape [64, 96] here and is missing in {last}")
        dtypes = good["two_dtypes"][0]
        if self.size == 2:
            assert dtypes == {}  # one engine may well have a dtype of its own
        else:
            assert dtypes["refused"].startswith(f"parameter bias is bfloat16 in {last}")
            assert "float32 in another engine" in dtypes["refused"] and "same model.dtype" in dtypes["refused"]

    def test_wrong_bytes_are_noticed_and_dropped_by_all(self, good: dict[str, list[Seen]]) -> None:
        learner, *engines = good["corrupted"]
        assert len(learner["errors"]) == 1
        assert f"bucket 1 of {learner['history'][0]['sent'][2]} of engine {self.size - 1}" in learner["errors"][0]
        for engine in engines:
            begin, dropped, updated = engine["history"]
            assert [begin["version"], dropped["version"], updated["version"]] == [-1, None, 1]
            assert updated["weights"] == learner["history"][0]["weights"] != begin["weights"]

    def test_an_engine_that_dies_in_the_middle_is_named_in_time(self, played: dict[str, Played]) -> None:
        last = self.size - 1
        learner, *engines = self.failed(played, "engine_dies", [1] * last + [-9])
        assert learner["kind"] == "PeerError" and learner["error"].startswith(f"engine {last} (rank {last}, process ")
        for engine in engines[:-1]:  # they see that the learner has ended
            assert engine["kind"] == "PeerError" and engine["error"].startswith("learner (rank 0, process ")
            assert len(engine["history"]) == 1 and engine["after"]["version"] is None

    def test_a_learner_that_dies_in_the_middle_leaves_no_version(self, played: dict[str, Played]) -> None:
        _, *engines = self.failed(played, "learner_dies", [-9] + [1] * (self.size - 1))
        for engine in engines:
            assert engine["kind"] == "PeerError" and engine["error"].startswith("learner (rank 0, process ")
            assert len(engine["history"]) == 1 and engine["after"]["version"] is None


class OneEngine(Scenarios):
    """What does not depend on the number of engines, too."""

    living = (*Scenarios.living, "half", "adapter", "falling")

    def test_an_engine_in_bfloat16_gets_the_rounded_weights(self, good: dict[str, list[Seen]]) -> None:
        learner, *engines = good["half"]
        assert all(engine["history"][1]["weights"] == learner["rounded"] for engine in engines)
        padded = [-(-size // 2 // ALIGNMENT) * ALIGNMENT for size in learner["sizes"].values()]
        assert learner["history"][0]["sent"][0] == sum(buckets(padded))

    def test_of_an_adapter_run_only_the_adapter_is_sent(self, good: dict[str, list[Seen]]) -> None:
        learner, *engines = good["adapter"]
        assert all("lora_" in name for name in learner["sizes"])
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in learner["sizes"].values()]
        filled = buckets(padded)
        assert learner["history"][0]["sent"] == [sum(filled), len(padded), len(filled)]
        for engine in engines:
            before, after = engine["history"]
            assert after["version"] == 0
            assert after["logprobs"] == learner["history"][0]["logprobs"] != before["logprobs"]

    def test_versions_never_fall(self, good: dict[str, list[Seen]]) -> None:
        assert good["falling"][0]["errors"] == ["sync: version 4 comes after version 5; versions never fall"]


class TwoEngines(Scenarios):
    """What only several engines show, too."""

    size = 3
    failing = (
        *Scenarios.failing,
        "learner_dies_late",
        "engine_stands_still",
        "transfer_fails",
        "engine_without_memory",
        "absent",
    )

    def test_of_a_learner_that_dies_between_two_commits_one_engine_has_the_version(
        self, played: dict[str, Played]
    ) -> None:
        _, first, second = self.failed(played, "learner_dies_late", [-9, 1, 1])
        old, new = first["history"]
        assert (old["version"], new["version"]) == (-1, 0) and old["weights"] != new["weights"]
        assert second["history"] == [old] and second["after"]["version"] is None

    def test_an_engine_that_stands_still_is_named_after_the_timeout(self, played: dict[str, Played]) -> None:
        learner, other, _ = self.failed(played, "engine_stands_still", [1, 1, -9])
        assert learner["kind"] == "PeerError" and "engine 2 (rank 2, process " in learner["error"]
        assert f"did not take the weights within sync.timeout_s={SHORT_S:g}" in learner["error"]
        assert other["kind"] == "PeerError" and other["after"]["version"] is None

    def test_an_error_of_one_engine_ends_the_wait_of_all(self, played: dict[str, Played]) -> None:
        learner, *engines = self.failed(played, "transfer_fails", [1, 1, 1])
        assert learner["kind"] == "SyncError" and learner["error"].startswith("engine 2 (rank 2, process ")
        assert learner["error"].endswith("the transfer of weights failed: link down")
        assert all(engine["after"]["version"] is None for engine in engines)

    def test_an_engine_without_memory_says_so(self, played: dict[str, Played]) -> None:
        learner, other, _ = self.failed(played, "engine_without_memory", [1, 1, 1])
        assert learner["kind"] == "SyncError" and learner["error"].startswith("engine 2 (rank 2, process ")
        assert learner["error"].endswith("no memory for 42 bytes")
        assert other["kind"] == "PeerError" and other["after"]["version"] is None

    def test_an_engine_that_says_nothing_is_named_after_the_timeout(self, played: dict[str, Played]) -> None:
        learner, *_ = self.failed(played, "absent", [1, 1, 1])
        assert learner["error"].startswith("engine 1 (rank 1, ") and "did not answer within 2 s" in learner["error"]


def buckets(padded: list[int]) -> list[int]:
    """Sizes of the buckets, counted here once more by hand."""
    filled: list[int] = []
    room, left = 0, sum(padded)
    for size in padded:
        if not filled or size > room:
            room = BUCKET_BYTES // 8 if not filled else min(BUCKET_BYTES, max(left // 2, BUCKET_BYTES // 8))
            room = max(room, size)
            filled.append(0)
        filled[-1] += size
        room -= size
        left -= size
    return filled
