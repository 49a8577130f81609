"""These tests need triton-ascend, in an environment of its own: `bash launch/test.sh --triton`."""

from __future__ import annotations

import os

from npu_vlrl.kernels.triton_logprob import available

collect_ignore_glob: list[str] = []
if available("ascend"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
else:
    collect_ignore_glob.append("test_*.py")
