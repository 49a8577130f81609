"""What every transport must do. Each check plays a scenario of `tests.sync.actor` with real processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npu_vlrl.sync.plan import ALIGNMENT
from tests.support.models import tiny_folder
from tests.support.ranks import finish, said, start
from tests.sync.actor import BUCKET_BYTES

Seen = dict[str, Any]


class Scenarios:
    """Subclasses say how many processes there are and what their environment is."""

    size = 2
    environment: Mapping[str, str] = {}

    def play(self, folder: Path, scenario: str, size: int | None = None) -> tuple[list[int], list[Seen]]:
        """Exit codes, and what each process saw; {} of a process that was killed."""
        size = size or self.size
        shutil.copytree(tiny_folder("qwen2_5_vl"), folder / "model")
        codes = finish(start(size, ["-m", "tests.sync.actor", scenario, folder], folder, self.environment), 100)
        files = [folder / f"rank{rank}.json" for rank in range(size)]
        assert all(file.is_file() or code < 0 for file, code in zip(files, codes, strict=True)), said(folder, size)
        return codes, [json.loads(file.read_text()) if file.is_file() else {} for file in files]

    def good(self, folder: Path, scenario: str) -> list[Seen]:
        codes, seen = self.play(folder, scenario)
        assert codes == [0] * self.size, said(folder, self.size)
        return seen

    def test_engines_hold_the_learners_weights_bit_for_bit(self, tmp_path: Path) -> None:
        learner, *engines = self.good(tmp_path, "plain")
        self.check_what_was_sent(learner)
        updates = learner["history"]
        for engine in engines:
            assert [state["version"] for state in engine["history"]] == [None, 0, 1, 2, 3]
            assert engine["history"][0]["weights"] != updates[0]["weights"]
            for theirs, ours in zip(engine["history"][1:], updates, strict=True):
                assert theirs["weights"] == ours["weights"]
                assert theirs["logprobs"] == ours["logprobs"]
        assert len({tuple(state["logprobs"]) for state in updates}) == 3, "an update that changes nothing shows nothing"

    def check_what_was_sent(self, learner: Seen) -> None:
        """Nothing frozen, nothing twice, nothing unchanged."""
        sizes = learner["sizes"]
        assert not any("visual" in name for name in sizes), "the tower is frozen"
        assert sum("embed_tokens" in name or "lm_head" in name for name in sizes) == 1, "the head is tied"
        padded = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
        everything = [sum(padded.values()), len(sizes), _buckets(list(padded.values()))]
        alone = [padded[learner["changed alone"]], 1, 1]
        assert [state["sent"] for state in learner["history"]] == [everything, [0, 0, 0], alone, everything]

    def test_engines_of_two_dtypes_are_refused(self, tmp_path: Path) -> None:
        codes, (learner, *_) = self.play(tmp_path, "two_dtypes", size=3)
        assert codes[0] == 1 and "is bfloat16 in engine 2" in learner["error"] and "float32" in learner["error"]

    def test_wrong_bytes_are_noticed_and_dropped_by_all(self, tmp_path: Path) -> None:
        learner, *engines = self.good(tmp_path, "corrupted")
        assert len(learner["errors"]) == 1
        assert f"bucket 1 of {learner['history'][0]['sent'][2]} of engine {self.size - 1}" in learner["errors"][0]
        for engine in engines:
            start_, dropped, updated = engine["history"]
            assert dropped == start_ and updated["version"] == 1
            assert updated["weights"] == learner["history"][0]["weights"]

    def test_an_engine_that_dies_in_the_middle_is_named_in_time(self, tmp_path: Path) -> None:
        codes, (learner, *engines) = self.play(tmp_path, "engine_dies")
        last = self.size - 1
        assert codes[0] == 1 and codes[last] == -9
        assert learner["kind"] == "PeerError" and f"engine {last} (rank {last}, process " in learner["error"]
        for engine in engines[:-1]:  # they hear that the learner has given up
            assert engine["after"] == engine["history"][0]


class MoreScenarios(Scenarios):
    """What does not depend on the number of engines."""

    def test_an_engine_in_bfloat16_gets_the_rounded_weights(self, tmp_path: Path) -> None:
        learner, *engines = self.good(tmp_path, "half")
        assert all(engine["history"][1]["weights"] == learner["rounded"] for engine in engines)
        padded = [-(-size // 2 // ALIGNMENT) * ALIGNMENT for size in learner["sizes"].values()]
        assert learner["history"][0]["sent"][0] == sum(padded)

    def test_of_an_adapter_run_only_the_adapter_is_sent(self, tmp_path: Path) -> None:
        learner, *engines = self.good(tmp_path, "adapter")
        assert all("lora_" in name for name in learner["sizes"])
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in learner["sizes"].values()]
        assert learner["history"][0]["sent"] == [sum(padded), len(padded), _buckets(padded)]
        assert all(engine["history"][1] | {"version": 0} == engine["history"][1] for engine in engines)
        assert all(engine["history"][1]["logprobs"] == learner["history"][0]["logprobs"] for engine in engines)
        assert all(engine["history"][1]["logprobs"] != engine["history"][0]["logprobs"] for engine in engines)

    def test_another_shape_is_named_on_both_sides(self, tmp_path: Path) -> None:
        codes, (learner, *_) = self.play(tmp_path, "other_shape")
        assert codes[0] == 1 and learner["kind"] == "SyncError"
        assert "down_proj.weight has the shape [" in learner["error"] and ", 5] in engine 1" in learner["error"]

    def test_a_missing_parameter_is_named(self, tmp_path: Path) -> None:
        codes, (learner, *_) = self.play(tmp_path, "missing")
        assert codes[0] == 1 and "is missing in engine 1" in learner["error"]

    def test_versions_never_fall(self, tmp_path: Path) -> None:
        learner, *_ = self.good(tmp_path, "falling")
        assert learner["errors"] == ["sync: version 4 comes after version 5; versions never fall"]

    def test_a_learner_that_dies_before_the_commit_leaves_the_old_weights(self, tmp_path: Path) -> None:
        codes, (_, *engines) = self.play(tmp_path, "learner_dies")
        assert codes[0] == -9 and set(codes[1:]) == {1}
        for engine in engines:
            assert engine["kind"] == "PeerError" and engine["error"].startswith("learner (rank 0, process ")
            assert engine["after"] == engine["history"][0]

    def test_an_engine_that_says_nothing_is_named_after_the_timeout(self, tmp_path: Path) -> None:
        codes, (learner, *_) = self.play(tmp_path, "absent")
        assert codes[0] == 1 and "did not answer within 2 s" in learner["error"]
        assert learner["error"].startswith("engine 1 (rank 1, ")


def _buckets(padded: list[int]) -> int:
    count, room = 0, 0
    for size in padded:
        if size > room:
            count, room = count + 1, max(BUCKET_BYTES, size)
        room -= size
    return count
