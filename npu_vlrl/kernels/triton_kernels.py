"""The Triton source of log-probability and entropy: one source for CUDA and for triton-ascend.

Needs Triton when it is imported; `triton_logprob` imports it when it is first called. Both kernels take tiles of logits
[ROWS, IDS] from products over the hidden width and reduce them at once. They need few features: loads, stores,
products, sums and maxima over a tile; no atomics, so that results repeat; no offset of a whole tensor in 32 bits.

Names: T rows, V vocabulary, H hidden width, S parts of the vocabulary; all tensors are contiguous.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)  # below every logit, and still finite when a maximum is subtracted from it


@triton.jit
def scaled_logits(
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    forbidden_ptr: tl.tensor,
    first_row: tl.tensor,
    first_id: tl.tensor,
    n_rows: tl.tensor,
    inverse_temperature: tl.tensor,
    n_ids: tl.constexpr,
    width: tl.constexpr,
    HAS_FORBIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A tile [ROWS, IDS] of scaled logits in float32, and a mask of its valid columns [1, IDS]."""
    rows, ids, columns = tl.arange(0, ROWS), tl.arange(0, IDS), tl.arange(0, WIDTH)
    hidden_ptr += tl.cast(first_row, tl.int64) * width
    weight_ptr += tl.cast(first_id, tl.int64) * width
    row_exists = (first_row + rows < n_rows)[:, None]
    id_exists = (first_id + ids < n_ids)[:, None]
    logits = tl.zeros((ROWS, IDS), dtype=tl.float32)
    for start in range(0, width, WIDTH):
        here = start + columns[None, :]
        hidden = tl.load(hidden_ptr + rows[:, None] * width + here, mask=row_exists & (here < width), other=0.0)
        weight = tl.load(weight_ptr + ids[:, None] * width + here, mask=id_exists & (here < width), other=0.0)
        logits = tl.dot(hidden.to(PRODUCT), tl.trans(weight.to(PRODUCT)), logits, input_precision="ieee")
    valid = first_id + ids < n_ids
    if HAS_FORBIDDEN:
        valid = valid & (tl.load(forbidden_ptr + first_id + ids, mask=valid, other=1) == 0)
    return logits * inverse_temperature, valid[None, :]


@triton.jit(do_not_specialize=["n_rows", "tiles"])
def row_statistics(
    hidden_ptr: tl.tensor,  # [T, H]
    weight_ptr: tl.tensor,  # [V, H]
    targets_ptr: tl.tensor,  # [T] int32
    forbidden_ptr: tl.tensor,  # [V] int8, read where HAS_FORBIDDEN
    maximum_ptr: tl.tensor,  # [S, T] float32, as are the next three
    sum_ptr: tl.tensor,
    moment_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    n_rows: tl.tensor,
    tiles: tl.tensor,
    inverse_temperature: tl.tensor,
    n_ids: tl.constexpr,
    width: tl.constexpr,
    HAS_FORBIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> None:
    """Statistics of the logits; a program computes ROWS rows over one part of the vocabulary, of `tiles` tiles.

    With z a row's valid logits in that part and m their maximum, writes m, Σ exp(z - m), Σ exp(z - m)·(z - m), and the
    target's z, or 0 where the target is elsewhere.
    """
    first_row, part = tl.program_id(0) * ROWS, tl.program_id(1)
    rows = first_row + tl.arange(0, ROWS)
    row_exists = rows < n_rows
    targets = tl.load(targets_ptr + rows, mask=row_exists, other=-1)
    maximum = tl.zeros((ROWS,), dtype=tl.float32) + LOWEST
    total = tl.zeros((ROWS,), dtype=tl.float32)
    moment = tl.zeros((ROWS,), dtype=tl.float32)
    chosen = tl.zeros((ROWS,), dtype=tl.float32)
    for tile in range(tiles):
        first_id = (part * tiles + tile) * IDS
        logits, valid = scaled_logits(
            hidden_ptr,
            weight_ptr,
            forbidden_ptr,
            first_row,
            first_id,
            n_rows,
            inverse_temperature,
            n_ids,
            width,
            HAS_FORBIDDEN,
            ROWS,
            IDS,
            WIDTH,
            PRODUCT,
        )
        hit = targets[:, None] == (first_id + tl.arange(0, IDS))[None, :]
        chosen += tl.sum(tl.where(hit, logits, 0.0), 1)
        above = tl.maximum(maximum, tl.max(tl.where(valid, logits, LOWEST), 1))
        distance = tl.where(valid, logits - above[:, None], LOWEST)
        weights = tl.exp(distance)
        fade = tl.exp(maximum - above)
        moment = fade * (moment + total * (maximum - above)) + tl.sum(weights * distance, 1)
        total = fade * total + tl.sum(weights, 1)
        maximum = above
    here = tl.cast(part, tl.int64) * n_rows
    tl.store(maximum_ptr + here + rows, maximum, mask=row_exists)
    tl.store(sum_ptr + here + rows, total, mask=row_exists)
    tl.store(moment_ptr + here + rows, moment, mask=row_exists)
    tl.store(chosen_ptr + here + rows, chosen, mask=row_exists)


@triton.jit(do_not_specialize=["n_rows", "first_id"])
def logit_gradients(
    hidden_ptr: tl.tensor,  # [T, H]
    weight_ptr: tl.tensor,  # [V, H]
    targets_ptr: tl.tensor,  # [T] int32
    forbidden_ptr: tl.tensor,  # [V] int8, read where HAS_FORBIDDEN
    normaliser_ptr: tl.tensor,  # [T] float32, as are the next three
    entropy_ptr: tl.tensor,
    grad_logprob_ptr: tl.tensor,
    grad_entropy_ptr: tl.tensor,
    gradient_ptr: tl.tensor,  # [T, chunk], in the dtype of the inputs
    n_rows: tl.tensor,
    first_id: tl.tensor,
    chunk: tl.tensor,
    inverse_temperature: tl.tensor,
    n_ids: tl.constexpr,
    width: tl.constexpr,
    HAS_FORBIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> None:
    """Gradient of hidden @ weight.T, for the ids first_id .. first_id + chunk; a program computes one tile.

    With z the scaled logits, d logprob/dz_j = [j = target] - p_j and d entropy/dz_j = -p_j (log p_j + entropy).
    """
    first_row, offset = tl.program_id(0) * ROWS, tl.program_id(1) * IDS
    rows, ids = first_row + tl.arange(0, ROWS), offset + tl.arange(0, IDS)
    row_exists = rows < n_rows
    logits, valid = scaled_logits(
        hidden_ptr,
        weight_ptr,
        forbidden_ptr,
        first_row,
        first_id + offset,
        n_rows,
        inverse_temperature,
        n_ids,
        width,
        HAS_FORBIDDEN,
        ROWS,
        IDS,
        WIDTH,
        PRODUCT,
    )
    targets = tl.load(targets_ptr + rows, mask=row_exists, other=-1)
    normaliser = tl.load(normaliser_ptr + rows, mask=row_exists, other=0.0)
    entropy = tl.load(entropy_ptr + rows, mask=row_exists, other=0.0)
    grad_logprob = tl.load(grad_logprob_ptr + rows, mask=row_exists, other=0.0)
    grad_entropy = tl.load(grad_entropy_ptr + rows, mask=row_exists, other=0.0)
    logprobs = tl.where(valid, logits - normaliser[:, None], LOWEST)
    slopes = grad_logprob[:, None] + grad_entropy[:, None] * (logprobs + entropy[:, None])
    hit = targets[:, None] == (first_id + ids)[None, :]
    gradient = tl.where(hit, grad_logprob[:, None], 0.0) - tl.exp(logprobs) * slopes
    gradient_ptr += tl.cast(first_row, tl.int64) * chunk
    tl.store(
        gradient_ptr + tl.arange(0, ROWS)[:, None] * chunk + ids[None, :],
        (gradient * inverse_temperature).to(gradient_ptr.dtype.element_ty),
        mask=row_exists[:, None] & (ids < chunk)[None, :],
    )
