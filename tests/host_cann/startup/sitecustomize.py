"""Python runs this file when it starts, because `tests.host_cann.environment()` puts its folder on PYTHONPATH."""

import os

if os.environ.get("NPU_VLRL_HOST_CANN") == "1":
    from tests import host_cann

    host_cann.prepare()
