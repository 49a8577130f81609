"""The kernels compiled for Ascend910B2, by its own compiler, with the arguments and tile sizes they are launched with.

What passes fits the chip's buffers and uses only what the compiler knows. It proves nothing about results or speed.
"""

from __future__ import annotations

import re
from importlib.metadata import distributions, version

import pytest

from tests.triton.compile_ascend import Outcome, in_a_child

UNIFIED_BUFFER_BITS = 192 * 1024 * 8  # of a vector core
ACCUMULATOR_BITS = 128 * 1024 * 8  # of a matrix core
MOST_PROGRAMS = 65535  # in one launch

QWEN_3B = {"ids": 151936, "width": 2048}
QWEN_7B = {"ids": 152064, "width": 3584}


def test_this_environment_has_one_triton() -> None:
    """Both packages put their files into one folder, and what was installed later wins."""
    assert version("triton-ascend") == "3.2.0"
    others = [one.version for one in distributions() if one.metadata["Name"] == "triton"]
    assert not others, f"triton {others[0]} is installed too; requirements-triton.txt says how to remove it"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_both_kernels_compile(dtype: str) -> None:
    sizes = [{"rows": 2048, "dtype": dtype, **model} for model in (QWEN_3B, QWEN_7B)]
    for kernels in in_a_child(*({**one, "forbidden": forbidden} for one in sizes for forbidden in (True, False))):
        assert [one.kernel for one in kernels] == ["row_statistics", "logit_gradients"]
        for one in kernels:
            assert one.accepted, one.errors
            assert (one.cores, one.products) == ("mix", 1)  # one product on the matrix cores, the rest beside it


def test_sizes_that_divide_nothing_compile() -> None:
    (found,) = in_a_child({"dtype": "bfloat16", "rows": 17, "ids": 1009, "width": 129, "forbidden": True})
    assert [(one.accepted, one.errors) for one in found] == [(True, "")] * 2


def overflow(one: Outcome, buffer: str) -> tuple[int, int]:
    """The bits that are required and those that are available."""
    found = re.search(rf"{buffer} overflow, requires (\d+) bits while (\d+) bits available", one.errors)
    assert found is not None, one
    return int(found[1]), int(found[2])


def test_a_tile_that_does_not_fit_is_rejected() -> None:
    sizes = {"dtype": "bfloat16", "rows": 2048, "forbidden": True, **QWEN_3B}
    wide, huge = in_a_child({**sizes, "tiles": [128, 256, 128]}, {**sizes, "tiles": [512, 1024, 64]})
    for one in wide:
        assert not one.accepted
        required, there = overflow(one, "ub")
        assert required > there == UNIFIED_BUFFER_BITS
    required, there = overflow(huge[1], "cc")
    assert required == 512 * 1024 * 32 and there == ACCUMULATOR_BITS  # one tile of float32 logits


def test_no_launch_has_more_programs_than_the_chip_allows() -> None:
    cases = [{"dtype": "bfloat16", "rows": rows, "ids": 1009, "width": 64} for rows in (1, 300, 1_000_000)]
    for kernels in in_a_child(*cases):
        assert all(one.grid[0] * one.grid[1] <= MOST_PROGRAMS for one in kernels), kernels
