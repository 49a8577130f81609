"""Extension of vLLM's workers: new weights from memory shared with the engine's process, and the mode of the logprobs.

vLLM's workers import this module by name before they make a model, and so does the engine where it is the worker. On a
CPU, vLLM's products run on copies of the weights that no update reaches; the import turns that off.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from npu_vlrl.engines.vllm.buckets import Handle, opened, settled
from npu_vlrl.sync.plan import Fact, Place, Plan

with suppress(ModuleNotFoundError):  # there are no workers where vLLM is not installed
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        operators: Any = importlib.import_module("vllm._custom_ops")
        operators._supports_onednn = False


class WeightTaker:
    """Methods that vLLM adds to its class of workers, on every device."""

    model_runner: Any

    def set_logprobs_mode(self, mode: str) -> None:
        """Sets the mode of the logprobs: vllm-ascend's own sampler ignores the option and uses vLLM's default."""
        sampler = self.model_runner.sampler
        filters = getattr(sampler, "topk_topp_sampler", sampler)  # it computes them, where there is one
        for part in (sampler, filters):
            if not hasattr(part, "logprobs_mode"):
                raise RuntimeError(f"vLLM's {type(part).__name__} has no logprobs_mode; set rollout.engine=inprocess")
            part.logprobs_mode = mode

    def take_weights(self, places: Sequence[tuple[list[Any], int, int]], handles: Sequence[Handle]) -> None:
        """Copies this worker's share of the tensors into the model. Places are a fact, a bucket and an offset each."""
        buckets = [opened(handle) for handle in handles]
        of_buckets = (Place(Fact.from_json(fact), bucket, offset) for fact, bucket, offset in places)
        plan = Plan(tuple(of_buckets), tuple(map(len, buckets)))
        self.model_runner.get_model().load_weights(plan.tensors(buckets))
        for device in {bucket.device for bucket in buckets}:
            settled(device)  # the buckets may be written again after this
