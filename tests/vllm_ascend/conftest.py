"""These tests need vllm-ascend: `bash launch/test.sh --vllm-ascend`. CANN is the stand-in (tests/host_cann)."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("vllm_ascend") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests import host_cann

    os.environ["NPU_VLRL_PLATFORM"] = "npu"
    os.environ["VLLM_ASCEND_ENABLE_NZ"] = "0"  # as the launch scripts do
    # also for processes of vLLM's own, such as the one that inspects a class of models for the first time
    os.environ.update(host_cann.environment(memory_mib=host_cann.ROOMY_MIB))
    host_cann.start()

    from npu_vlrl import kernels
    from npu_vlrl.engines.vllm.engine import import_vllm

    import_vllm()
    kernels.use("npu")
