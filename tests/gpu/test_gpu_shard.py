"""A learner divided over two GPUs takes the steps of one on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npu_vlrl import kernels
from tests.support.ranks import finish, said, start
from tests.support.shards import differences, kept, train

EXACT = ("whole", "deep", "frozen", "offload", "lora")
ROUNDED = ("bfloat16", "narrow lora")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("shards")
    words = ["-m", "tests.support.shards", folder, *EXACT, *ROUNDED]
    codes = finish(start(2, words, folder, {"NPU_VLRL_PLATFORM": "cuda"}), 400)
    assert codes == [0, 0], said(folder, 2)
    kernels.use("cuda")
    yield folder
    kernels.use("reference")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("case", EXACT + ROUNDED)
def test_two_gpus_take_the_steps_of_one(both: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cuda")
    first, second = (kept(both, case, rank) for rank in range(2))
    assert first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    expected = train(case, None, torch.device("cuda", 0))
    if case in EXACT:
        assert differences(expected, first, 1e-3, 0.5, 0.0, 0.02) == []
    else:  # sums of 16 bits depend on what is summed together
        assert differences(expected, first, 5e-2, 1.0, 2**-7, 0.1) == []
    halved = [{**line, "grad_norm": line["grad_norm"] / 2} for line in first[0]]
    assert len(differences(expected, (halved, first[1]), 5e-2, 1.0, 2**-7, 0.1)) == 3  # the comparison can fail
