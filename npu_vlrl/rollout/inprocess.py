"""The engine that samples from a policy of its own process.

In the learner's process it shares the learner's weights, so nothing can be stale; in an engine process it has a copy.
Prompts that are equal (the members of a group) are prefilled once and expanded; a later turn continues from the keys
and values of the turn before.
"""

from __future__ import annotations

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
from npu_vlrl.rollout.rounds import Outcome, Request, RoundEngine
from npu_vlrl.rollout.sampling import draw, processed_logprobs, uniforms
from npu_vlrl.types import Generation, ImageInput, StopReason


@dataclass(eq=False)
class _Turn:
    """A request while it is worked on."""

    request: Request
    cached: RowCache | None
    """What the session's turn before left behind, if this one continues it."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    outcome: Outcome | None = None

    def work(self) -> object:
        """Turns with equal work are prefilled together: same tokens, same pictures, nothing cached."""
        return self.request.prompt() if self.cached is None else self

    @property
    def n_cached(self) -> int:
        return len(self.cached.token_ids) if self.cached else 0


@dataclass
class _Rows:
    """What decoding needs to know of each row; all have the same length."""

    turns: list[_Turn]
    hidden_BH: Tensor
    """Hidden state that predicts the next token."""
    next_position_B: Tensor
    greedy_B: Tensor
    uniforms_BN: Tensor


class InProcessEngine(RoundEngine):
    """See `types.Engine`."""

    def __init__(self, policy: Policy, vision: VisionFeatures) -> None:
        super().__init__()
        self.policy = policy
        self.vision = vision
        self._caches: dict[int, RowCache] = {}
        """By session."""

    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        return self.sample(requests)

    def weights_changed(self, version: int) -> dict[str, float]:
        """Features and cached turns are worthless now."""
        self.weight_version = version
        self.vision.weights_changed()
        self._caches.clear()
        return {}

    def forget_features(self) -> None:
        self.vision.forget()

    def forget_session(self, number: int) -> None:
        self._caches.pop(number, None)

    def sample(self, requests: Sequence[Request]) -> list[Outcome]:
        """A round. What goes wrong in it is the outcome of every request that has none by then."""
        turns = [_Turn(request, self._usable_cache(request)) for request in requests]
        try:
            self._generate(turns)
        except Exception as error:
            for turn in turns:
                turn.outcome = turn.outcome or error
        return [turn.outcome for turn in turns if turn.outcome is not None]

    def _usable_cache(self, request: Request) -> RowCache | None:
        cached = self._caches.get(request.session)
        if cached is None:
            return None
        held = len(cached.token_ids)
        same_tokens = held < len(request.token_ids) and cached.token_ids == request.token_ids[:held]
        if same_tokens and cached.images == request.images[: len(cached.images)]:
            return cached
        del self._caches[request.session]
        return None

    @torch.no_grad()
    def _generate(self, turns: list[_Turn]) -> None:
        was_training = self.policy.model.training
        self.policy.model.eval()
        try:
            fresh = [turn for turn in turns if turn.cached is None]
            continued = [turn for turn in turns if turn.cached is not None]
            for batch in filter(None, (fresh, continued)):
                self._decode(*self._prefill(batch))
        finally:
            self.policy.model.train(was_training)

    def _prefill(self, turns: list[_Turn]) -> tuple[BatchCache, _Rows]:
        shared: dict[object, list[_Turn]] = defaultdict(list)
        for turn in turns:
            shared[turn.work()].append(turn)
        firsts = [members[0] for members in shared.values()]
        device = self.policy.device
        cache = BatchCache([turn.cached for turn in firsts], device)
        news = [len(turn.request.token_ids) - turn.n_cached for turn in firsts]
        ids = np.zeros((len(firsts), max(news)), dtype=np.int64)
        positions = np.zeros((3, len(firsts), max(news)), dtype=np.int64)
        images: list[ImageInput] = []
        next_positions = []
        for row, (turn, new) in enumerate(zip(firsts, news, strict=True)):
            request = turn.request
            all_positions = rotary_positions(
                request.token_ids, request.images, self.policy.special.image, self.policy.merge_size
            )
            ids[row, :new] = request.token_ids[turn.n_cached :]
            positions[:, row, :new] = all_positions[:, turn.n_cached :]
            next_positions.append(int(all_positions.max()) + 1)
            images += request.images[len(turn.cached.images) if turn.cached else 0 :]
        valid = torch.arange(max(news), device=device) < torch.tensor(news, device=device)[:, None]
        hidden = self.policy.hidden_cached(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions).to(device),
            self.vision.fixed(images),
            cache.mask_for(valid),
            cache.cache,
        )
        last = hidden[torch.arange(len(firsts), device=device), torch.tensor(news, device=device) - 1]
        self.counts.tokens_requested += sum(len(turn.request.token_ids) for turn in turns)
        self.counts.tokens_prefilled += sum(news)
        return self._expand(cache, last, next_positions, list(shared.values()))

    def _expand(
        self, cache: BatchCache, last_BH: Tensor, next_positions: list[int], shared: list[list[_Turn]]
    ) -> tuple[BatchCache, _Rows]:
        turns = [turn for members in shared for turn in members]
        params = [turn.request.sampling for turn in turns]
        owners = [row for row, members in enumerate(shared) for _ in members]
        device = last_BH.device
        rows = torch.tensor(owners, device=device)
        if len(turns) > len(shared):
            cache.select(rows)
        random = torch.zeros(len(turns), max(one.max_new_tokens for one in params))
        for row, one in enumerate(params):
            random[row, : one.max_new_tokens] = uniforms(one)
        return cache, _Rows(
            turns,
            last_BH[rows],
            torch.tensor(next_positions, device=device)[rows],
            torch.tensor([one.temperature == 0 for one in params], device=device),
            random.to(device),
        )

    def _decode(self, cache: BatchCache, rows: _Rows) -> None:
        step = 0
        while True:
            logits = rows.hidden_BH @ self.policy.head_weight.T
            params = [turn.request.sampling for turn in rows.turns]
            logprobs = processed_logprobs(logits, params, self.policy.forbidden_V)
            tokens = draw(logprobs, rows.uniforms_BN[:, step], rows.greedy_B)
            chosen = logprobs.gather(1, tokens[:, None])[:, 0]
            running = self._record(cache, rows, tokens.tolist(), chosen.tolist())
            step += 1
            if not running:
                return
            if len(running) < len(rows.turns):
                keep = torch.tensor(running, device=tokens.device)
                cache.select(keep)
                tokens = tokens[keep]
                rows = _Rows(
                    [rows.turns[i] for i in running],
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
        for index, (turn, token, logprob) in enumerate(zip(rows.turns, tokens, logprobs, strict=True)):
            request = turn.request
            if not math.isfinite(logprob):
                self._caches.pop(request.session, None)
                turn.outcome = ValueError(
                    f"token {len(turn.ids) + 1} of this turn has the log-probability {logprob}: the model's output is "
                    "not finite; check its weights, or use model.dtype=float32"
                )
                continue
            turn.ids.append(token)
            turn.logprobs.append(logprob)
            ended = token in self.policy.special.end_of_turn
            if not ended and len(turn.ids) < request.sampling.max_new_tokens:
                running.append(index)
                continue
            held = request.token_ids + tuple(turn.ids[:-1])
            self._caches[request.session] = cache.row(index, held, request.images)
            self.counts.turns += 1
            self.counts.tokens_decoded += len(turn.ids)
            turn.outcome = Generation(
                tuple(turn.ids),
                tuple(turn.logprobs),
                (self.weight_version,) * len(turn.ids),
                StopReason.END_OF_TURN if ended else StopReason.TURN_BUDGET,
            )
        return running
