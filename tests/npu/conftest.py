"""Tests on the real torch_npu, over the stand-in for CANN. Where torch_npu is not installed they are not collected."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob = ["*"]
else:
    from tests import host_cann

    host_cann.start()
