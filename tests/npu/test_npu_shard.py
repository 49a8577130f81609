"""FSDP2 by torch_npu over the real ProcessGroupHCCL, on two devices of the stand-in: the steps of one CPU process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import host_cann
from tests.support.ranks import finish, said, start
from tests.support.shards import differences, kept, train

torch.set_num_threads(1)

CASES = ("whole", "lora")


def test_two_devices_take_the_steps_of_one_process_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = host_cann.environment() | {"NPU_VLRL_PLATFORM": "npu"}
    codes = finish(start(2, ["-m", "tests.support.shards", tmp_path, *CASES], tmp_path, environment))
    assert codes == [0, 0], said(tmp_path, 2)
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    for case in CASES:
        first, second = (kept(tmp_path, case, rank) for rank in range(2))
        assert first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])
        expected = train(case, None)
        assert differences(expected, first, 1e-3, 0.5) == []
        halved = [{**line, "grad_norm": line["grad_norm"] / 2} for line in first[0]]
        assert len(differences(expected, (halved, first[1]), 1e-3, 0.5)) == 3  # the comparison can fail
