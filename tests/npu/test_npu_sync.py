"""The scenarios of `sync/` over the real ProcessGroupHCCL: each process on a device of its own."""

from __future__ import annotations

from tests import host_cann
from tests.sync import scenarios
from tests.sync.actor import TIMEOUT_S

# a collective that waits for a dead process gives up by itself some time after we have
SETTINGS = {"NPU_VLRL_PLATFORM": "npu", "HCCL_EXEC_TIMEOUT": str(int(3 * TIMEOUT_S))}


class TestOneEngineOverHccl(scenarios.OneEngine):
    environment = host_cann.environment(devices=3) | SETTINGS


class TestTwoEnginesOverHccl(scenarios.TwoEngines):
    environment = host_cann.environment(devices=3) | SETTINGS
