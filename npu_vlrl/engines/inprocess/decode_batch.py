"""State of rows that are decoded together. All inputs and outputs of a decode step are tensors with fixed addresses.

So a step can be captured once as a graph and replayed, and the host need not read the drawn tokens after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from npu_vlrl.engines.inprocess.kv_cache import KeyValues
from npu_vlrl.engines.inprocess.sampling import Filters, draw, processed_logprobs, uniforms
from npu_vlrl.hardware.base import GraphCapture
from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.model.policy import Policy
from npu_vlrl.model.routing import Routing
from npu_vlrl.types import SamplingParams

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of a captured decode step: one of these, or a multiple of the last. Surplus rows are idle."""


class Batch:
    """A batch of `rows` rows with `room` tokens each, of which a turn draws up to `new_tokens`.

    The rows in use come first. A finished row is still computed but does not change.
    """

    def __init__(
        self,
        policy: Policy,
        rows: int,
        room: int,
        new_tokens: int,
        capture: GraphCapture | None,
        record_routes: bool = False,
    ) -> None:
        """Allocates the state. Without a `capture` each step is launched without a graph. `record_routes`: see
        `InProcessEngine`.
        """
        self.policy = policy
        self.capture = capture
        rows = _size(rows) if capture else rows
        self.rows, self.room, self.new_tokens = rows, room, new_tokens
        self.kv = KeyValues(policy, rows, room)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=policy.device)

        self.tokens_B = zeros(rows)
        """The last drawn token of each row, which has not passed the model yet."""
        self.positions_B = zeros(rows)
        """Rotary position of the last token of each row."""
        self.lengths_B = zeros(rows, dtype=torch.int32)
        """Number of tokens of each row in the KV cache."""
        self.drawn_B = zeros(rows)
        self.limits_B = zeros(rows)
        self.running_B = zeros(rows, dtype=torch.bool)
        self.greedy_B = zeros(rows, dtype=torch.bool)
        self.temperature_B1 = zeros(rows, 1, dtype=torch.float32)
        self.top_k_B1 = zeros(rows, 1)
        self.top_p_B1 = zeros(rows, 1, dtype=torch.float32)
        self.uniforms_BN = zeros(rows, new_tokens, dtype=torch.float32)
        # one column more than a turn can have, to which finished rows write
        self.ids_BN = zeros(rows, new_tokens + 1)
        self.logprobs_BN = zeros(rows, new_tokens + 1, dtype=torch.float32)
        routes_shape = policy.routes_shape if record_routes else None
        self.routes_BNLk = routes_shape and zeros(rows, new_tokens + 1, *routes_shape, dtype=torch.int16)
        """The routes of the drawn tokens that were computed; of the last one they are not known yet."""
        self._rows_B = torch.arange(rows, device=policy.device)
        self._ends = torch.tensor(policy.special.end_of_turn, device=policy.device)
        self._alone = CacheRows.of(self.lengths_B, [1] * rows, room, room)
        self._filtered = (False, False)
        self._recorded: dict[tuple[int, bool, bool], Callable[[], None]] = {}

    def begin(self, params: Sequence[SamplingParams], lengths: Sequence[int], positions: Sequence[int]) -> None:
        """Puts turns into the first rows, with `lengths` cached tokens; `positions` are those of the next tokens."""
        count, device = len(params), self.policy.device
        filters = Filters.of(params, device)
        self._filtered = (filters.top_k_B1 is not None, filters.top_p_B1 is not None)
        random = torch.zeros(count, self.new_tokens)
        for row, one in enumerate(params):
            random[row, : one.max_new_tokens] = uniforms(one)
        for state, values in (
            (self.positions_B, torch.tensor(positions) - 1),
            (self.lengths_B, torch.tensor(lengths)),
            (self.limits_B, torch.tensor([one.max_new_tokens for one in params])),
            (self.greedy_B, torch.tensor([one.temperature == 0 for one in params])),
            (self.temperature_B1, filters.temperature_B1),
            (self.uniforms_BN, random),
        ):
            state[:count] = values.to(device)
        for state, found, nothing in ((self.top_k_B1, filters.top_k_B1, 0), (self.top_p_B1, filters.top_p_B1, 1)):
            state[:count] = nothing if found is None else found
        self.drawn_B.zero_()
        self.running_B[:count] = True
        self.running_B[count:] = False

    def step(self, count: int, longest: int) -> None:
        """Computes the last token of the first `count` rows, which then have up to `longest`, and draws the next."""
        if self.capture is None:
            self._step(count, longest)
            return
        size = _size(count)
        key = (size, *self._filtered)
        if key not in self._recorded:
            # while no row runs, a step changes no result, so the capture may repeat it
            running = self.running_B.clone()
            self.running_B.zero_()
            self._recorded[key] = self.capture(lambda: self._step(size, self.room))
            self.running_B.copy_(running)
        self._recorded[key]()

    def _step(self, count: int, longest: int) -> None:
        lengths_B = self.lengths_B[:count] + 1
        starts = self._alone.starts_q[: count + 1], self._alone.starts_k[: count + 1]
        rows = CacheRows(lengths_B, *starts, self._alone.cu_q[: count + 1], longest)
        routing = None if self.routes_BNLk is None else Routing()
        hidden_BH = self.policy.hidden_continued(
            self.tokens_B[:count], self.positions_B[:count].expand(3, -1), self.kv.kept(rows), (), routing
        )
        if routing is not None and self.routes_BNLk is not None:
            self.routes_BNLk[self._rows_B[:count], self.drawn_B[:count] - 1] = routing.recorded()
        self.lengths_B[:count] += self.running_B[:count]
        self.draw(hidden_BH)

    def draw(self, hidden_BH: Tensor) -> None:
        """Draws the next token of the first rows from the hidden states that predict them."""
        rows = slice(len(hidden_BH))
        running_B, drawn_B = self.running_B[rows], self.drawn_B[rows]
        with_top_k, with_top_p = self._filtered
        filters = Filters(
            self.temperature_B1[rows],
            self.top_k_B1[rows] if with_top_k else None,
            self.top_p_B1[rows] if with_top_p else None,
        )
        logprobs_BV = processed_logprobs(hidden_BH @ self.policy.head_weight.T, filters, self.policy.forbidden_V)
        numbers_B = self.uniforms_BN[rows].gather(1, drawn_B[:, None].clamp(max=self.new_tokens - 1))[:, 0]
        tokens_B = draw(logprobs_BV, numbers_B, self.greedy_B[rows])
        chosen_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
        self.ids_BN[rows].scatter_(1, drawn_B[:, None], tokens_B[:, None])
        self.logprobs_BN[rows].scatter_(1, drawn_B[:, None], chosen_B[:, None])
        drawn_B += running_B
        self.positions_B[rows] += running_B
        self.tokens_B[rows] = torch.where(running_B, tokens_B, self.tokens_B[rows])
        ended_B = (tokens_B[:, None] == self._ends).any(1) | ~chosen_B.isfinite()
        running_B &= ~ended_B & (drawn_B < self.limits_B[rows])

    def move(self, row: int, target: int) -> None:
        """Moves the turn of one row to another row."""
        self.kv.move(row, target)
        for state in (
            self.tokens_B,
            self.positions_B,
            self.lengths_B,
            self.drawn_B,
            self.limits_B,
            self.running_B,
            self.greedy_B,
            self.temperature_B1,
            self.top_k_B1,
            self.top_p_B1,
            self.uniforms_BN,
            self.ids_BN,
            self.logprobs_BN,
        ):
            state[target] = state[row]
        if self.routes_BNLk is not None:
            self.routes_BNLk[target] = self.routes_BNLk[row]
        self.running_B[row] = False


def _size(rows: int) -> int:
    return next((size for size in SIZES if size >= rows), -(-rows // SIZES[-1]) * SIZES[-1])
