"""Engine that samples with vLLM: tokens in, tokens out.

vLLM has weights of its own. After an update the trained weights are copied into them in place, and vLLM's caches of the
old ones are dropped: the KV cache of prompts, and features of images. In the learner's process they are copied from the
learner's; in an engine process they arrive in buckets, see `sync/weights.py`. There vLLM runs in worker processes of
its own, which open the buckets by handles (`engines/vllm/buckets.py`). An adapter is not part of the weights: vLLM
computes it beside them, as the learner does, and reads each new one from a folder (`engines/vllm/adapter.py`).

`engines/vllm/prompt.py` makes the inputs. The prompt ids that vLLM reports are compared with those of the request.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from npu_vlrl.config import ConfigError
from npu_vlrl.config.extras import remedy
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.engines.base import EngineError, Outcome, Request
from npu_vlrl.engines.local import LocalEngine
from npu_vlrl.engines.vllm.adapter import AdapterFolder
from npu_vlrl.engines.vllm.buckets import handle_of, shared_bucket
from npu_vlrl.engines.vllm.prompt import collapsed, resized_image, size_limits
from npu_vlrl.model.policy import Policy
from npu_vlrl.sync.buckets import WeightTarget, staged
from npu_vlrl.sync.plan import Fact, Plan, make_plan
from npu_vlrl.types import Generation, SamplingParams, StopReason

NEVER = -1e9
"""Bias of the logits of forbidden ids, with which their probability is exactly zero."""

TEMPERATURES = 0.01, 2.0
"""Range of temperatures that vLLM applies exactly, beside 0: it refuses higher ones, and silently raises lower ones."""

CPU_TURNS = 32
"""Turns that vLLM decodes together on a CPU. They must fit without chunked prefill, for which vLLM cannot seed there:
`CPU Generator does not use offset`."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process; its workers may have others
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a process with threads must not be forked
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it knows no seeds and no processed logprobs, so it would never be asked
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers on a CPU would each want a memory node of their own
}


AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable of torchrun's rendezvous store, which child processes inherit."""

WORK_BYTES = 2**32
"""Memory in bytes for vLLM beside weights and cache: activations, captured graphs, the library itself."""

LOGPROBS = "processed_logprobs"
"""Mode in which vLLM's logprobs are those of the sampled distribution: after temperature, filters and the bias."""

WORKER_EXTENSION = "npu_vlrl.engines.vllm.worker.WeightTaker"

BUCKET_BYTES = 2**28
"""Size of the buckets through which the learner's weights are copied to workers in the same machine."""


class VllmEngine(LocalEngine):
    """See `types.Engine`."""

    def __init__(
        self,
        policy: Policy,
        processor: ImageProcessor | None,
        folder: Path,
        *,
        device: torch.device,
        context_tokens: int,
        cache_bytes: int,
        capture: bool,
        seed: int,
        workers: int = 0,
        sleeps: bool = False,
        device_bytes: int | None = None,
    ) -> None:
        """`policy` is the learner's, read from `folder`, or on the device `meta` where another process has the weights.

        `device` is this process's. `cache_bytes` is the size of the KV cache. With `capture` vLLM compiles and captures
        decode steps, where the device can. `workers` is the number of processes over which vLLM splits the model; 0
        keeps it in this one. `sleeps` lets it release memory in `sleep`. `device_bytes` is all memory of one device,
        None where vLLM needs no share of it.
        Raises ConfigError where vLLM is not installed, and the errors of vLLM for unsupported settings.
        """
        super().__init__()
        self.policy = policy
        self.processor = processor
        self.context_tokens = context_tokens
        self._forbidden = dict.fromkeys(policy.forbidden, NEVER)
        self._device = device
        self._workers = workers
        self._sleeps = sleeps
        self._asleep = False
        self._ids = itertools.count()
        self._adapter = AdapterFolder(policy) if policy.has_adapter else None
        self._lora: Any = None
        """Request for the newest adapter; None before the first one, since an untrained adapter changes nothing."""
        self._vllm = import_vllm()
        if workers:  # they meet at a store of their own, and torch would look for it in torchrun's
            os.environ.pop(AGENT_STORE, None)
        whole = {"max_num_seqs": CPU_TURNS, "max_num_batched_tokens": CPU_TURNS * context_tokens}
        split = {
            "tensor_parallel_size": workers,
            "distributed_executor_backend": "mp",
        }
        self._llm = self._vllm.LLM(
            str(folder),
            **(whole if device.type == "cpu" else {}),
            **(split if workers else {}),
            **(self._adapter.options if self._adapter else {}),
            **({"enable_sleep_mode": True} if sleeps else {}),
            **({"gpu_memory_utilization": self._share(cache_bytes, device_bytes)} if device_bytes else {}),
            dtype=str(policy.head_weight.dtype).removeprefix("torch."),
            seed=seed,
            max_model_len=context_tokens,
            kv_cache_memory_bytes=cache_bytes,
            enforce_eager=not capture,
            logprobs_mode=LOGPROBS,
            worker_extension_cls=WORKER_EXTENSION,
            generation_config="vllm",  # not the folder's, whose settings are not ours
            mm_processor_kwargs={"size": size_limits(processor)} if processor else None,
            limit_mm_per_prompt={"video": 0} if processor else None,
        )
        self._llm.collective_rpc("set_logprobs_mode", args=(LOGPROBS,))

    def _share(self, cache_bytes: int, device_bytes: int) -> float:
        """Share of a device's memory that vLLM needs. vLLM starts only where it is free; vllm-ascend uses the rest of
        it as cache."""
        weights: int = sum(tensor.numel() * tensor.element_size() for tensor in self.policy.model.parameters())
        return min(1.0, (cache_bytes + weights / max(self._workers, 1) + WORK_BYTES) / device_bytes)

    def sample(self, requests: Sequence[Request]) -> list[Outcome]:
        """Samples a round. Raises EngineError when vLLM fails, or reads a prompt differently from the learner."""
        outcomes: dict[int, Outcome] = {}
        resized: dict[str, PIL.Image.Image] = {}
        prompts, params, asked = [], [], []
        for number, request in enumerate(requests):
            try:
                param, prompt = self._params(request), self._prompt(request, resized)
            except ValueError as error:
                outcomes[number] = error
                continue
            params.append(param)
            prompts.append(prompt)
            asked.append(number)
        for number, turn in zip(asked, self._generate(prompts, params), strict=True):
            outcomes[number] = self._outcome(requests[number], turn)
        return [outcomes[number] for number in range(len(requests))]

    def weights_changed(self, version: int) -> dict[str, float]:
        """Copies the weights of a learner in this process, and drops all caches of the old weights."""
        began = time.monotonic()
        self._wake("weights")  # writes to sleeping weights are lost, or crash the device
        moved = 0 if self.policy.device.type == "meta" else self._copy_trained()
        self._wake("kv_cache")  # last, since loading takes memory too
        self._asleep = False
        self._forget_prompts()
        if not self.policy.vision_is_frozen:
            self._llm.llm_engine.reset_encoder_cache()
        self.weight_version = version
        return {"sync/bytes": moved, "sync/seconds": time.monotonic() - began}

    def sleep(self) -> None:
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)  # keeps the weights on the host, since frozen ones are not sent again
            self._asleep = True

    def _wake(self, tag: str) -> None:
        if self._asleep:
            self._llm.wake_up(tags=[tag])

    def holder(self) -> WeightTarget:
        facts = [Fact.of(name, tensor) for name, tensor in self.policy.model.named_parameters()]
        return staged(facts, lambda size: shared_bucket(size, self._device), self._take)

    def forget_features(self) -> None:
        self._forget_prompts()  # they were computed with the features
        self._llm.llm_engine.reset_encoder_cache()

    def forget_session(self, number: int) -> None:
        """Does nothing: vLLM caches prompts, not sessions, and evicts the least recently used ones."""

    def close(self) -> None:
        """Shuts vLLM down, which releases its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        if self._adapter:
            self._adapter.close()

    def _take(self, plan: Plan, buckets: Sequence[Tensor]) -> None:
        """Lets the workers copy their shares from the buckets, and waits for them."""
        if self._adapter:
            self._renew(plan.tensors(buckets))
            return
        places = [(place.fact.to_json(), place.bucket, place.offset) for place in plan.places]
        self._llm.collective_rpc("take_weights", args=(places, [handle_of(bucket) for bucket in buckets]))

    def _renew(self, adapter: Iterable[tuple[str, Tensor]]) -> None:
        assert self._adapter is not None
        self._lora = self._adapter.renewed(adapter)
        self._llm.llm_engine.add_lora(self._lora)  # now, not with the first prompt: the folder is written again

    def _copy_trained(self) -> int:
        """Copies the trained weights of the learner in this process; returns their bytes."""
        trained = {name: parameter.detach() for name, parameter in self.policy.trainable().items()}
        if self._adapter:
            self._renew(trained.items())
        elif self._workers:
            plan = make_plan([Fact.of(name, tensor) for name, tensor in trained.items()], BUCKET_BYTES)
            buckets = [shared_bucket(size, self._device) for size in plan.bucket_sizes]
            for number, bucket in enumerate(buckets):
                views = plan.views(number, bucket)
                torch._foreach_copy_(list(views.values()), [trained[name] for name in views])
            self._take(plan, buckets)
        else:
            self._llm.apply_model(lambda model: model.load_weights(iter(trained.items())))
        return sum(tensor.numel() * tensor.element_size() for tensor in trained.values())

    def _generate(self, prompts: list[dict[str, Any]], params: list[Any]) -> list[_Turn]:
        """Samples a turn for each prompt. Once `interrupted()`, unfinished turns are returned as they are."""
        engine = self._llm.llm_engine
        turns = {str(next(self._ids)): _Turn() for _ in prompts}
        try:
            for name, prompt, param in zip(turns, self._llm._preprocess_cmpl(prompts), params, strict=True):
                engine.add_request(name, prompt, param, lora_request=self._lora)
            while engine.has_unfinished_requests() and not self.interrupted():
                for output in engine.step():
                    turns[output.request_id].add(output)
            engine.abort_request([name for name, turn in turns.items() if turn.finish_reason is None])
        except Exception as error:
            with suppress(Exception):  # vLLM may be unable to, and the first error is the reason
                engine.abort_request(list(turns))
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error
        return list(turns.values())

    def _forget_prompts(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not drop its cached prompts: call this between rounds only")

    def _params(self, request: Request) -> Any:
        sampling = request.sampling
        coldest, hottest = TEMPERATURES
        if sampling.temperature and not coldest <= sampling.temperature <= hottest:
            raise ValueError(
                f"vLLM samples at temperatures from {coldest} to {hottest}, and greedily at 0, but not at "
                f"{sampling.temperature}"
            )
        return self._vllm.SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            logprobs=0,  # of the drawn token alone
            logit_bias=self._forbidden,
            stop_token_ids=list(self.policy.special.end_of_turn),
            ignore_eos=True,  # those above are all
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    def _prompt(self, request: Request, resized: dict[str, PIL.Image.Image]) -> dict[str, Any]:
        if len(request.token_ids) >= self.context_tokens:
            raise ValueError(
                f"a context of {len(request.token_ids)} tokens leaves no room for a new one in {self.context_tokens}; "
                "raise workflow.context_tokens"
            )
        prompt: dict[str, Any] = {"prompt_token_ids": collapsed(request, self.policy.special.image)}
        if request.images:
            if self.processor is None:
                raise ValueError("the model folder has no image processor, but a context has images; use a VL model")
            names = [image.image.hash for image in request.images]
            for name, image in zip(names, request.images, strict=True):
                if name not in resized:
                    resized[name] = resized_image(self.processor, image.image)
            prompt["multi_modal_data"] = {"image": [resized[name] for name in names]}
            prompt["multi_modal_uuids"] = {"image": names}
        return prompt

    def _outcome(self, request: Request, turn: _Turn) -> Outcome:
        read = turn.prompt_ids
        if read is None:  # interrupted before vLLM had computed a token
            return Generation((), (), (), StopReason.INTERRUPTED)
        if read != request.token_ids:
            raise EngineError(
                f"vLLM read a context of {len(request.token_ids)} tokens and {len(request.images)} images as one of "
                f"{len(read)} tokens: its image processor and ours differ; set rollout.engine=inprocess"
            )
        if not all(map(math.isfinite, turn.logprobs)):
            return ValueError("vLLM drew a token whose log-probability is not finite: check the model's weights")
        self.counts.turns += 1
        self.counts.tokens_requested += len(read)
        self.counts.tokens_prefilled += len(read) - turn.n_cached
        self.counts.tokens_decoded += len(turn.ids)
        versions = (self.weight_version,) * len(turn.ids)
        return Generation(tuple(turn.ids), tuple(turn.logprobs), versions, _reason(turn, request.sampling))


@dataclass
class _Turn:
    """Output of vLLM for a request so far."""

    prompt_ids: tuple[int, ...] | None = None
    """Ids of the prompt, as vLLM read them."""
    n_cached: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, output: Any) -> None:
        (drawn,) = output.outputs
        self.prompt_ids = tuple(output.prompt_token_ids)
        self.n_cached = output.num_cached_tokens or 0
        self.ids += drawn.token_ids
        self.logprobs += [of[token].logprob for token, of in zip(drawn.token_ids, drawn.logprobs, strict=True)]
        self.finish_reason = drawn.finish_reason


def _reason(turn: _Turn, sampling: SamplingParams) -> StopReason:
    match turn.finish_reason:
        case None:
            return StopReason.INTERRUPTED
        case "stop":
            return StopReason.END_OF_TURN
        case "length" if len(turn.ids) == sampling.max_new_tokens:
            return StopReason.TURN_BUDGET
        case "length":
            return StopReason.CONTEXT_FULL
        case reason:
            raise EngineError(f"vLLM ended a turn by {reason!r}")


def import_vllm() -> Any:
    """Imports vLLM with its environment variables set. Raises ConfigError where it is not installed."""
    os.environ.update(ENVIRONMENT)
    try:
        vllm: Any = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollout.engine=vllm needs vLLM ({error}): {remedy('vllm')}, or set rollout.engine=inprocess"
        ) from error
    importlib.import_module(WORKER_EXTENSION.rpartition(".")[0])  # for a worker in this process
    return vllm
