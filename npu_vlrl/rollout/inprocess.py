"""The engine inside the learner's process: it samples from the learner's own weights, so nothing can be stale.

A round starts when every open session has asked for its turn. Prompts that are equal (the members of a group) are
prefilled once and expanded; a later turn continues from the keys and values of the turn before. The composition of a
round depends on the requests alone, never on timing, so a run repeats exactly.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from npu_vlrl.model.policy import Policy
from npu_vlrl.model.positions import rotary_positions
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.rollout.kv import BatchCache, RowCache
from npu_vlrl.rollout.sampling import draw, processed_logprobs, uniforms
from npu_vlrl.types import Generation, ImageInput, SamplingParams, Segment, StopReason


@dataclass
class EngineCounts:
    """Work done so far; what sharing saved is `requested - prefilled`."""

    tokens_requested: int = 0
    """Context tokens of all requests."""
    tokens_prefilled: int = 0
    """Context tokens that were really computed."""
    tokens_decoded: int = 0
    turns: int = 0


@dataclass(eq=False)
class _Request:
    session: InProcessSession
    token_ids: tuple[int, ...]
    images: tuple[ImageInput, ...]
    sampling: SamplingParams
    answer: asyncio.Future[Generation]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def work(self) -> object:
        """Requests with equal work are prefilled together: same tokens, same pictures, nothing cached."""
        if self.session.cached is not None:
            return self
        return self.token_ids, tuple(image.image.hash for image in self.images)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass
class _Rows:
    """What decoding needs to know of each row; all have the same length."""

    requests: list[_Request]
    hidden_BH: Tensor
    """Hidden state that predicts the next token."""
    next_position_B: Tensor
    greedy_B: Tensor
    uniforms_BN: Tensor


class InProcessSession:
    """See `types.EngineSession`."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.engine = engine
        self.cached: RowCache | None = None

    async def generate(self, context: Sequence[Segment], sampling: SamplingParams) -> Generation:
        token_ids = tuple(token for segment in context for token in segment.token_ids)
        images = tuple(image for segment in context for image in segment.images)
        if not token_ids or sampling.max_new_tokens < 1:
            raise ValueError("a generation needs a context and at least one new token")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.engine.submit(_Request(self, token_ids, images, sampling, future))
        return await future

    def close(self) -> None:
        self.cached = None
        self.engine.forget(self)


class InProcessEngine:
    """See `types.Engine`. One event loop at a time may use it."""

    def __init__(self, policy: Policy, vision: VisionFeatures) -> None:
        self.policy = policy
        self.vision = vision
        self.weight_version = 0
        self.counts = EngineCounts()
        self._sessions: set[InProcessSession] = set()
        self._waiting: dict[InProcessSession, _Request] = {}

    def session(self) -> InProcessSession:
        session = InProcessSession(self)
        self._sessions.add(session)
        return session

    def weights_changed(self, version: int) -> None:
        """Tells that the shared weights are now those of `version`: features and cached turns are worthless."""
        self.weight_version = version
        self.vision.weights_changed()
        for session in self._sessions:
            session.cached = None

    def submit(self, request: _Request) -> None:
        assert request.session in self._sessions, "the session is closed"
        assert request.session not in self._waiting, "the session waits for its turn already"
        self._waiting[request.session] = request
        self._start_when_full()

    def forget(self, session: InProcessSession) -> None:
        self._sessions.discard(session)
        self._waiting.pop(session, None)
        self._start_when_full()

    def _start_when_full(self) -> None:
        if self._waiting and len(self._waiting) == len(self._sessions):
            # later, not now: sessions opened in the same breath still join the round
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        if not self._waiting or len(self._waiting) != len(self._sessions):
            return
        requests = list(self._waiting.values())
        self._waiting.clear()
        try:
            self._generate(requests)
        except Exception as error:
            for request in requests:
                request.fail(error)

    @torch.no_grad()
    def _generate(self, requests: list[_Request]) -> None:
        was_training = self.policy.model.training
        self.policy.model.eval()
        try:
            for request in requests:
                self._drop_useless_cache(request)
            fresh = [r for r in requests if r.session.cached is None]
            continued = [r for r in requests if r.session.cached is not None]
            for batch in filter(None, (fresh, continued)):
                self._decode(*self._prefill(batch))
        finally:
            self.policy.model.train(was_training)

    def _drop_useless_cache(self, request: _Request) -> None:
        cached = request.session.cached
        if cached is None:
            return
        held = len(cached.token_ids)
        same_tokens = held < len(request.token_ids) and cached.token_ids == request.token_ids[:held]
        if not same_tokens or cached.images != request.images[: len(cached.images)]:
            request.session.cached = None

    def _prefill(self, requests: list[_Request]) -> tuple[BatchCache, _Rows]:
        shared: dict[object, list[_Request]] = defaultdict(list)
        for request in requests:
            shared[request.work()].append(request)
        firsts = [members[0] for members in shared.values()]
        device = self.policy.device
        cache = BatchCache([r.session.cached for r in firsts], device)
        starts = [len(r.session.cached.token_ids) if r.session.cached else 0 for r in firsts]
        news = [len(r.token_ids) - start for r, start in zip(firsts, starts, strict=True)]
        ids = np.zeros((len(firsts), max(news)), dtype=np.int64)
        positions = np.zeros((3, len(firsts), max(news)), dtype=np.int64)
        images: list[ImageInput] = []
        next_positions = []
        for row, (request, start, new) in enumerate(zip(firsts, starts, news, strict=True)):
            all_positions = rotary_positions(
                request.token_ids, request.images, self.policy.special.image, self.policy.merge_size
            )
            ids[row, :new] = request.token_ids[start:]
            positions[:, row, :new] = all_positions[:, start:]
            next_positions.append(int(all_positions.max()) + 1)
            images += request.images[len(request.session.cached.images) if request.session.cached else 0 :]
        valid = torch.arange(max(news), device=device) < torch.tensor(news, device=device)[:, None]
        hidden = self.policy.hidden_cached(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions).to(device),
            self.vision.fixed(images),
            cache.mask_for(valid),
            cache.cache,
        )
        last = hidden[torch.arange(len(firsts), device=device), torch.tensor(news, device=device) - 1]
        self.counts.tokens_requested += sum(len(r.token_ids) for r in requests)
        self.counts.tokens_prefilled += sum(news)
        return self._expand(cache, last, next_positions, list(shared.values()))

    def _expand(
        self, cache: BatchCache, last_BH: Tensor, next_positions: list[int], shared: list[list[_Request]]
    ) -> tuple[BatchCache, _Rows]:
        requests = [request for members in shared for request in members]
        owners = [row for row, members in enumerate(shared) for _ in members]
        device = last_BH.device
        rows = torch.tensor(owners, device=device)
        if len(requests) > len(shared):
            cache.select(rows)
        longest = max(r.sampling.max_new_tokens for r in requests)
        random = torch.zeros(len(requests), longest)
        for row, request in enumerate(requests):
            random[row, : request.sampling.max_new_tokens] = uniforms(request.sampling)
        return cache, _Rows(
            requests,
            last_BH[rows],
            torch.tensor(next_positions, device=device)[rows],
            torch.tensor([r.sampling.temperature == 0 for r in requests], device=device),
            random.to(device),
        )

    def _decode(self, cache: BatchCache, rows: _Rows) -> None:
        step = 0
        while True:
            logits = rows.hidden_BH @ self.policy.head_weight.T
            logprobs = processed_logprobs(logits, [r.sampling for r in rows.requests], self.policy.forbidden_V)
            tokens = draw(logprobs, rows.uniforms_BN[:, step], rows.greedy_B)
            chosen = logprobs.gather(1, tokens[:, None])[:, 0]
            running = self._record(cache, rows, tokens.tolist(), chosen.tolist())
            step += 1
            if not running:
                return
            if len(running) < len(rows.requests):
                keep = torch.tensor(running, device=tokens.device)
                cache.select(keep)
                tokens = tokens[keep]
                rows = _Rows(
                    [rows.requests[i] for i in running],
                    rows.hidden_BH,
                    rows.next_position_B[keep],
                    rows.greedy_B[keep],
                    rows.uniforms_BN[keep],
                )
            valid = torch.ones(len(running), 1, dtype=torch.bool, device=tokens.device)
            hidden = self.policy.hidden_cached(
                tokens[:, None],
                rows.next_position_B[None, :, None].expand(3, -1, 1),
                (),
                cache.mask_for(valid),
                cache.cache,
            )
            rows.hidden_BH = hidden[:, -1]
            rows.next_position_B = rows.next_position_B + 1

    def _record(self, cache: BatchCache, rows: _Rows, tokens: list[int], logprobs: list[float]) -> list[int]:
        """Adds one token to every row, answers the finished ones, and returns the indices of the others."""
        running = []
        for index, (request, token, logprob) in enumerate(zip(rows.requests, tokens, logprobs, strict=True)):
            if not math.isfinite(logprob):
                request.session.cached = None
                request.fail(
                    ValueError(
                        f"token {len(request.ids) + 1} of this turn has the log-probability {logprob}: the model's "
                        "output is not finite; check its weights, or use model.dtype=float32"
                    )
                )
                continue
            request.ids.append(token)
            request.logprobs.append(logprob)
            ended = token in self.policy.special.end_of_turn
            if not ended and len(request.ids) < request.sampling.max_new_tokens:
                running.append(index)
                continue
            held = request.token_ids + tuple(request.ids[:-1])
            request.session.cached = cache.row(index, held, request.images)
            self.counts.turns += 1
            self.counts.tokens_decoded += len(request.ids)
            if not request.answer.done():
                request.answer.set_result(
                    Generation(
                        tuple(request.ids),
                        tuple(request.logprobs),
                        (self.weight_version,) * len(request.ids),
                        StopReason.END_OF_TURN if ended else StopReason.TURN_BUDGET,
                    )
                )
        return running
