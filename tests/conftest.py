"""What holds for every test: no network, one thread, and property tests that repeat."""

from __future__ import annotations

import os
import signal

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")  # before anything imports transformers

import torch
from hypothesis import settings

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a script starts with `&`; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup; a training would ignore it, too, and live on
    signal.signal(signal.SIGHUP, lambda *_: None)  # what is started by exec has the default again

if os.environ.get("NPU_VLRL_PLATFORM") == "cpu":  # hides a torch_npu without CANN, before transformers is imported
    import npu_vlrl.hardware  # noqa: F401

settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("dev", deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
