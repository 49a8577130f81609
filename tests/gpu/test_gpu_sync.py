"""The scenarios of `sync/` over NCCL, on two GPUs."""

from __future__ import annotations

from tests.sync import scenarios


class TestOneEngineOverNccl(scenarios.OneEngine):
    environment = {"NPU_VLRL_PLATFORM": "cuda", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    # An engine whose learner is gone ends. Its weights cannot be read first: the device still waits in the collective.
    failing = ("engine_dies",)
    test_a_learner_that_dies_in_the_middle_leaves_no_version = None
