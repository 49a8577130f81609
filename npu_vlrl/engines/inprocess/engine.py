"""In-process engine, which samples from a policy of its own process.

In the learner's process it shares the learner's weights, so nothing can be stale; in an engine process it has a copy.
Equal prompts (the members of a group) are prefilled once and copied; a later turn continues from the KV cache of the
turn before. Where the device can capture graphs, a decode step is captured for each batch size and replayed, and the
host reads the drawn tokens every few steps only; it then also checks whether to interrupt the round.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from npu_vlrl.engines.base import EngineCounts, Outcome, Request
from npu_vlrl.engines.inprocess.decode_batch import Batch
from npu_vlrl.engines.inprocess.kv_cache import CachedTurn, KeyValues
from npu_vlrl.engines.local import LocalEngine
from npu_vlrl.hardware.base import GraphCapture
from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.routing import Routing
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.sync.buckets import WeightTarget, in_place
from npu_vlrl.types import Generation, ImageInput, StopReason

PREFILL_TOKENS = 16384
"""Largest number of prompt tokens in one forward pass, which bounds the memory of their hidden states."""

UNSEEN_STEPS = 8
"""Number of replayed decode steps between two checks for finished rows; finished rows are computed until then."""


@dataclass(eq=False)
class _Turn:
    """State of a request in a round."""

    request: Request
    cached: CachedTurn | None
    """Cache of the session's turn before, if this turn continues it."""
    outcome: Outcome | None = None
    next_position: int = 0
    """Rotary position of the first new token."""
    routes: np.ndarray | None = None
    """int16 [tokens, L, k]: of the context behind what was cached, where routes are recorded."""

    def work(self) -> object:
        """Key of the prefill: turns with the same tokens and images, and nothing cached, are prefilled once."""
        return self.request.prompt() if self.cached is None else self

    @property
    def n_context(self) -> int:
        return len(self.request.token_ids)

    @property
    def n_cached(self) -> int:
        return len(self.cached.token_ids) if self.cached else 0

    @property
    def room(self) -> int:
        return self.n_context + self.request.sampling.max_new_tokens


class InProcessEngine(LocalEngine):
    """See `types.Engine`."""

    def __init__(
        self,
        policy: Policy,
        vision: VisionFeatures,
        cache_bytes: int = 2**34,
        new_capture: Callable[[], GraphCapture | None] = lambda: None,
        record_routes: bool = True,
    ) -> None:
        """`cache_bytes` bounds the KV cache of the rows that are decoded, and separately the KV cache that is kept
        between turns. Turns beyond it wait for the next wave, or are prefilled again. `new_capture`: see
        `hardware.Platform.graph_capture`. `record_routes`: a mixture of experts reports the experts that it chose, see
        `Generation.routes`.
        """
        super().__init__()
        self.policy = policy
        self.vision = vision
        self.cache_bytes = cache_bytes
        self.new_capture = new_capture
        self.record_routes = record_routes and policy.routes_shape is not None
        self._batch: Batch | None = None
        self._caches: dict[int, CachedTurn] = {}
        """Cached turns by session."""

    def weights_changed(self, version: int) -> dict[str, float]:
        """Evicts cached turns, and features unless the tower is frozen."""
        self.weight_version = version
        self.vision.weights_changed()
        self._caches.clear()
        return {}

    def forget_features(self) -> None:
        self.vision.forget()

    def forget_session(self, number: int) -> None:
        self._caches.pop(number, None)

    def sample_probe(self, requests: Sequence[Request]) -> list[Outcome]:
        with self.vision.uncounted():
            return super().sample_probe(requests)

    def holder(self) -> WeightTarget:
        return in_place(dict(self.policy.model.named_parameters()))

    def counted(self) -> EngineCounts:
        return replace(self.counts, images_referenced=self.vision.referenced, images_encoded=self.vision.encoded)

    def sample(self, requests: Sequence[Request]) -> list[Outcome]:
        """Samples a round. An error in it is the outcome of every request that has none by then."""
        turns = [_Turn(request, self._usable_cache(request)) for request in requests]
        try:
            self._generate(turns)
        except Exception as error:
            self._batch = None
            for turn in turns:
                turn.outcome = turn.outcome or error
        return [turn.outcome for turn in turns if turn.outcome is not None]

    def _usable_cache(self, request: Request) -> CachedTurn | None:
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
            for number, wave in enumerate(self._waves(turns)):
                if number and self.interrupted():  # the first wave draws a token in any case, so each round progresses
                    for turn in wave:
                        turn.outcome = Generation((), (), (), StopReason.INTERRUPTED)
                    continue
                batch = self._batch_for(wave)
                rows = self._prefill(batch, wave)
                self._decode(batch, rows)
        finally:
            self.policy.model.train(was_training)

    def _waves(self, turns: list[_Turn]) -> Iterator[list[_Turn]]:
        """Splits turns into waves that are decoded together: as many as fit into `cache_bytes`."""
        room = max(turn.room for turn in turns)
        rows = max(1, self.cache_bytes // (room * KeyValues.bytes_per_token(self.policy)))
        for start in range(0, len(turns), rows):
            yield turns[start : start + rows]

    def _batch_for(self, turns: list[_Turn]) -> Batch:
        """The batch of the last wave where it is large enough, since captured graphs hold its addresses.

        Otherwise a batch that is large enough for both, if memory allows, so that alternating shapes share it.
        """
        rows, room = len(turns), max(turn.room for turn in turns)
        new_tokens = max(turn.request.sampling.max_new_tokens for turn in turns)
        known = self._batch
        if known is not None and known.rows >= rows and known.room >= room and known.new_tokens >= new_tokens:
            return known
        if known is not None:
            new_tokens = max(new_tokens, known.new_tokens)
            most_rows, most_room = max(rows, known.rows), max(room, known.room)
            if most_rows * most_room * KeyValues.bytes_per_token(self.policy) <= self.cache_bytes:
                rows, room = most_rows, most_room
        self._batch = known = None  # frees the memory first
        self._batch = Batch(
            self.policy, rows, -(-room // 128) * 128, new_tokens, self.new_capture(), self.record_routes
        )
        return self._batch

    # --- prefill ---

    def _prefill(self, batch: Batch, turns: list[_Turn]) -> list[_Turn]:
        """Prefills each distinct context once and draws the first tokens; returns the turns in the order of rows."""
        shared: dict[object, list[_Turn]] = defaultdict(list)
        for turn in turns:
            shared[turn.work()].append(turn)
        firsts = [members[0] for members in shared.values()]
        rows, owners = list(firsts), list(range(len(firsts)))
        hidden = torch.cat([self._compute(batch, firsts, chunk) for chunk in _chunks(firsts)])
        for row, members in enumerate(shared.values()):
            batch.kv.repeat(row, members[0].n_context, range(len(rows), len(rows) + len(members) - 1))
            rows += members[1:]
            owners += [row] * (len(members) - 1)
        for turn, owner in zip(rows, owners, strict=True):
            turn.next_position, turn.routes = firsts[owner].next_position, firsts[owner].routes
        batch.begin(
            [turn.request.sampling for turn in rows],
            [turn.n_context for turn in rows],
            [turn.next_position for turn in rows],
        )
        batch.draw(hidden[torch.tensor(owners, device=hidden.device)])
        self.counts.tokens_requested += sum(turn.n_context for turn in turns)
        self.counts.tokens_prefilled += sum(turn.n_context - turn.n_cached for turn in firsts)
        return rows

    def _compute(self, batch: Batch, firsts: list[_Turn], chunk: range) -> Tensor:
        """Prefills the rows of `chunk`; returns the hidden states at the ends of their contexts."""
        turns, device = [firsts[row] for row in chunk], self.policy.device
        ids, positions = [], []
        images: list[ImageInput] = []
        for row, turn in zip(chunk, turns, strict=True):
            request = turn.request
            places = self.policy.positions(request.token_ids, request.images)
            turn.next_position = int(places.max()) + 1
            ids.append(np.asarray(request.token_ids[turn.n_cached :]))
            positions.append(places[:, turn.n_cached :])
            images += request.images[len(turn.cached.images) if turn.cached else 0 :]
            if turn.cached is not None:
                batch.kv.load(row, turn.cached)
        lengths = [turn.n_context for turn in turns]
        lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
        rows = CacheRows.of(lengths_B, list(map(len, ids)), batch.room, max(lengths), lengths)
        routing = Routing() if self.record_routes else None
        hidden_TH = self.policy.hidden_continued(
            torch.from_numpy(np.concatenate(ids)).to(device),
            torch.from_numpy(np.concatenate(positions, 1)).to(device),
            batch.kv.kept(rows, chunk.start),
            self.vision.fixed(images),
            routing,
        )
        if routing is not None:
            ends = np.cumsum(list(map(len, ids)))[:-1]
            for turn, routes in zip(turns, np.split(routing.recorded().cpu().numpy(), ends), strict=True):
                turn.routes = routes
        return hidden_TH[rows.starts_q[1:] - 1]

    # --- decoding ---

    def _decode(self, batch: Batch, rows: list[_Turn]) -> None:
        """Decodes until no turn runs; finished turns leave the batch, and all do when the round is interrupted."""
        done = 1
        while rows := self._settle(batch, rows):
            if self.interrupted():
                self._finish(batch, rows, range(len(rows)), interrupted=True)
                return
            left = max(turn.request.sampling.max_new_tokens for turn in rows) - done
            for _ in range(min(UNSEEN_STEPS, left) if batch.capture else 1):
                batch.step(len(rows), min(batch.room, max(turn.n_context for turn in rows) + done))
                done += 1

    def _settle(self, batch: Batch, rows: list[_Turn]) -> list[_Turn]:
        """Answers the finished turns; returns those that still run, in the order of rows."""
        running = batch.running_B[: len(rows)].tolist()
        ended = [row for row, runs in enumerate(running) if not runs]
        self._finish(batch, rows, ended)
        left = sum(running)
        holes = [row for row in ended if row < left]
        late = [row for row, runs in enumerate(running) if runs and row >= left]
        for hole, row in zip(holes, late, strict=True):
            batch.move(row, hole)
            rows[hole] = rows[row]
        return rows[:left]

    def _finish(self, batch: Batch, rows: list[_Turn], which: Sequence[int], interrupted: bool = False) -> None:
        """Answers the turns of the rows `which` with their drawn tokens."""
        if not which:
            return
        at = torch.tensor(which, device=self.policy.device)
        found = (x[at].tolist() for x in (batch.drawn_B, batch.ids_BN, batch.logprobs_BN))
        drawn_routes = [None] * len(which) if batch.routes_BNLk is None else batch.routes_BNLk[at].cpu().numpy()
        for row, routes, count, ids, logprobs in zip(which, drawn_routes, *found, strict=True):
            turn = rows[row]
            if turn.routes is not None and routes is not None:
                turn.routes = np.concatenate([turn.routes, routes[: count - 1]])
            self._answer(batch, row, turn, tuple(ids[:count]), tuple(logprobs[:count]), interrupted)

    def _answer(
        self,
        batch: Batch,
        row: int,
        turn: _Turn,
        ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        interrupted: bool,
    ) -> None:
        request = turn.request
        self._caches.pop(request.session, None)
        if not math.isfinite(logprobs[-1]):
            self._batch = None  # its KV cache may contain NaN
            turn.outcome = ValueError(
                f"token {len(ids)} of this turn has the log-probability {logprobs[-1]}: the model's output is not "
                "finite; check its weights, or use model.dtype=float32"
            )
            return
        kept = sum(cache.n_bytes for cache in self._caches.values())
        held = request.token_ids + ids[:-1]
        if kept + len(held) * KeyValues.bytes_per_token(self.policy) <= self.cache_bytes:
            self._caches[request.session] = batch.kv.save(row, held, request.images)
        self.counts.turns += not interrupted
        self.counts.tokens_decoded += len(ids)
        stop = StopReason.INTERRUPTED if interrupted else StopReason.TURN_BUDGET
        if ids[-1] in self.policy.special.end_of_turn:
            stop = StopReason.END_OF_TURN
        turn.outcome = Generation(ids, logprobs, (self.weight_version,) * len(ids), stop, turn.routes)


def _chunks(turns: Sequence[_Turn]) -> Iterator[range]:
    """Splits turns into runs of up to `PREFILL_TOKENS` new tokens; a longer turn is alone."""
    start = tokens = 0
    for index, turn in enumerate(turns):
        new = turn.n_context - turn.n_cached
        if index > start and tokens + new > PREFILL_TOKENS:
            yield range(start, index)
            start, tokens = index, 0
        tokens += new
    yield range(start, len(turns))
