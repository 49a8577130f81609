"""Weights by files, between two real processes: an engine has all of a version, or knows that it has none."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.ranks import finish, fork, said


def test_a_version_is_whole_and_damage_is_noticed(tmp_path: Path) -> None:
    assert finish(fork(2, ["-m", "tests.sync.disk_actor", tmp_path], tmp_path)) == [0, 0], said(tmp_path, 2)
    learner, engine = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    outcomes, ours, files = zip(*learner, strict=True)
    versions, theirs = zip(*engine, strict=True)
    assert versions == (1, 2, None, 4, None)

    # all that is trained, then what changed; a bucket is a multiple of 512 bytes, a tensor begins at one
    padded = {"a": 8704, "b": 512, "c": 16384}
    assert outcomes[0] == [3, sum(padded.values())]
    assert outcomes[1] == [1, padded["c"]]
    assert outcomes[3] == [3, sum(padded.values())]  # of what was dropped nothing counts
    assert "are not those that were sent: bucket 0 of 1 of engine 1" in outcomes[2]
    assert "cannot read the weights in" in outcomes[4] and "run.dir that all machines see" in outcomes[4]

    trained = [{name: values[name] for name in "abc"} for values in theirs]
    sent = [{name: values[name] for name in "abc"} for values in ours]
    assert [trained[step] == sent[step] for step in range(5)] == [True, True, False, True, False]
    assert theirs[0]["frozen"] != ours[0]["frozen"]
    assert files == tuple([f"{version}.safetensors"] for version in range(1, 6))
