"""Attention for inference of torch_npu on the stand-in, against attention written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch_npu

from tests.host_cann import counted

N, K, D = 4, 2, 16
HIDE = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
QUERIES, KEYS = (3, 1, 4), (5, 1, 9)
"""Of each packed sequence."""
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Half a unit in the last place of numbers up to 2 or 4, and what the softmax's float32 adds."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape))).to(dtype)


def plain(q, k, v, visible=None, scale=0.25):
    """Result [S, N, D] and log-sum-exp [S, N, 1] of one sequence in float64, element by element of the formula."""
    q, k, v = (x.double() for x in (q, k, v))
    out, lse = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64), torch.zeros(*q.shape[:2], 1)
    for i in range(len(q)):
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            seen = range(len(k)) if visible is None else [j for j in range(len(k)) if visible[i, j]]
            weights = [math.exp(scale * float(q[i, head] @ k[j, shared])) for j in seen]
            out[i, head] = sum(w * v[j, shared] for w, j in zip(weights, seen, strict=True)) / sum(weights)
            lse[i, head] = math.log(sum(weights))
    return out, lse


def causal(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(columns) <= torch.arange(rows)[:, None] + columns - rows


def ends(lengths) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


def infer(q, k, v, layout="TND", **options: Any):
    moved = {name: x.npu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    out, lse = torch_npu.npu_fused_infer_attention_score(
        q.npu(),
        k.npu(),
        v.npu(),
        **{"input_layout": layout, "num_heads": N, "num_key_value_heads": K, "scale": 0.25} | moved,
    )
    return out.cpu(), lse.cpu()


def close(found, expected, dtype=torch.bfloat16):
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=TOLERANCES[dtype])


def packed(dtype=torch.bfloat16):
    return (
        draw(sum(QUERIES), N, D, dtype=dtype),
        draw(sum(KEYS), K, D, seed=1, dtype=dtype),
        draw(sum(KEYS), K, D, seed=2, dtype=dtype),
    )


def expected_of_packed(q, k, v, is_causal: bool):
    parts = zip(q.split(QUERIES), k.split(KEYS), v.split(KEYS), strict=True)
    found = [plain(*part, causal(len(part[0]), len(part[1])) if is_causal else None) for part in parts]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_sequences(is_causal, dtype):
    q, k, v = packed(dtype)
    options = {"atten_mask": HIDE, "sparse_mode": 3} if is_causal else {}
    lengths = {"actual_seq_lengths": ends(QUERIES), "actual_seq_lengths_kv": ends(KEYS)}
    with counted() as count:
        out, lse = infer(q, k, v, softmax_lse_flag=True, **lengths, **options)
    assert sum(times for name, times in count.items() if name.startswith("aclnnFusedInferAttentionScore")) == 1
    expected, expected_lse = expected_of_packed(q, k, v, is_causal)
    assert out.dtype == dtype and lse.shape == (sum(QUERIES), N, 1) and lse.dtype == torch.float32
    close(out, expected, dtype)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    wrong, _ = expected_of_packed(q, k, v, not is_causal)
    assert (out.double() - wrong).abs().max() > 0.1


def test_windows_of_a_vision_tower_with_heads_of_80_and_an_empty_one():
    q, k, v = (draw(10, N, 80, seed=seed) for seed in range(3))
    out, _ = infer(q, k, v, num_key_value_heads=N, actual_seq_lengths=[4, 4, 10], actual_seq_lengths_kv=[4, 4, 10])
    close(out, torch.cat([plain(q[at], k[at], v[at])[0] for at in (slice(0, 4), slice(4, 10))]))


def in_blocks(x, lengths, size, order):
    """[blocks, size, K * D] and its table; what no sequence uses is not a number."""
    cache = torch.full((len(order), size, K * D), math.nan, dtype=x.dtype)
    table = torch.zeros(len(lengths), max(-(-n // size) for n in lengths), dtype=torch.int32)
    free = iter(order)
    for row, part in enumerate(x.split(lengths)):
        for number, piece in enumerate(part.flatten(1).split(size)):
            table[row, number] = block = next(free)
            cache[block, : len(piece)] = piece
    return cache, table


@pytest.mark.parametrize("queries", [QUERIES, (1, 1, 1)], ids=["prefill", "decode"])
def test_packed_queries_over_blocks_of_a_cache(queries):
    lengths, size, order = (20, 1, 33), 16, (5, 3, 0, 7, 1, 6, 2, 4)
    queries = tuple(map(min, queries, lengths))
    q, k, v = draw(sum(queries), N, D), draw(sum(lengths), K, D, seed=1), draw(sum(lengths), K, D, seed=2)
    (keys, table), (values, _) = in_blocks(k, lengths, size, order), in_blocks(v, lengths, size, order)
    options = {"atten_mask": HIDE, "sparse_mode": 3, "block_size": size, "actual_seq_lengths": ends(queries)}

    def run(table):
        return infer(q, keys, values, block_table=table, actual_seq_lengths_kv=list(lengths), **options)[0]

    parts = zip(q.split(queries), k.split(lengths), v.split(lengths), strict=True)
    close(run(table), torch.cat([plain(*part, causal(len(part[0]), len(part[1])))[0] for part in parts]))
    other = table.clone()
    other[0, 0], other[2, 0] = table[2, 0], table[0, 0]
    assert not torch.equal(run(other), run(table))


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "BSH"])
@pytest.mark.parametrize("mask_dims", [2, 3, 4])
def test_one_query_with_a_mask(layout, mask_dims):
    q, k, v = draw(3, 1, N, D), draw(3, 7, K, D, seed=1), draw(3, 7, K, D, seed=2)
    beyond = torch.arange(7) >= torch.tensor([2, 7, 5])[:, None]
    mask = beyond.view(3, *[1] * (mask_dims - 2), 7)
    k, v = k.clone(), v.clone()
    k[beyond] = v[beyond] = 1e3  # it would show

    def laid_out(x):
        return {"BSND": x, "BNSD": x.transpose(1, 2).contiguous(), "BSH": x.flatten(2)}[layout]

    out, lse = infer(*map(laid_out, (q, k, v)), layout, atten_mask=mask, softmax_lse_flag=True)
    found = [plain(q[row], k[row], v[row], ~beyond[row][None]) for row in range(3)]
    close(out, laid_out(torch.stack([one for one, _ in found])))
    assert lse.shape == (3, N, 1, 1)
    torch.testing.assert_close(lse, torch.stack([one.transpose(0, 1) for _, one in found]), rtol=1e-5, atol=1e-5)


def test_lengths_of_keys_say_the_same_as_a_mask():
    q, k, v = draw(3, 1, N, D), draw(3, 7, K, D, seed=1), draw(3, 7, K, D, seed=2)
    mask = torch.arange(7) >= torch.tensor([2, 7, 5])[:, None]
    by_lengths = infer(q, k, v, "BSND", actual_seq_lengths_kv=[2, 7, 5])[0]
    assert torch.equal(by_lengths, infer(q, k, v, "BSND", atten_mask=mask)[0])
    together = infer(q, k, v, "BSND", atten_mask=mask[:, None], actual_seq_lengths_kv=[6])[0]
    assert not torch.equal(by_lengths, together)
    close(together[1], plain(q[1], k[1][:6], v[1][:6])[0])


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_several_queries_of_a_batch(mode):
    q, k, v = draw(2, 3, N, D), draw(2, 5, K, D, seed=1), draw(2, 5, K, D, seed=2)
    own = torch.rand(2, 1, 3, 5, generator=torch.Generator().manual_seed(1)) > 0.6
    own[..., 0] = False
    out, _ = infer(q, k, v, "BSND", sparse_mode=mode, atten_mask=own if mode < 2 else HIDE)
    left = torch.ones(3, 5, dtype=torch.bool).tril()
    seen = [~own[row, 0] if mode < 2 else left if mode == 2 else causal(3, 5) for row in range(2)]
    close(out, torch.stack([plain(q[row], k[row], v[row], seen[row])[0] for row in range(2)]))


def test_what_lies_beyond_the_lengths_of_queries_is_not_a_number():
    q, k, v = draw(2, 3, N, D), draw(2, 5, K, D, seed=1), draw(2, 5, K, D, seed=2)
    lengths = {"actual_seq_lengths": [2, 3], "actual_seq_lengths_kv": [4, 5]}
    out, _ = infer(q, k, v, "BSND", sparse_mode=3, atten_mask=HIDE, **lengths)
    close(out[0, :2], plain(q[0, :2], k[0, :4], v[0, :4], causal(2, 4))[0])
    close(out[1], plain(q[1], k[1], v[1], causal(3, 5))[0])
    assert out[0, 2].isnan().all()


def test_a_query_that_sees_nothing_gets_zeros_where_that_is_asked_for():
    q, k, v = draw(1, 3, N, D), draw(1, 5, K, D, seed=1), draw(1, 5, K, D, seed=2)
    mask = torch.zeros(1, 3, 5, dtype=torch.bool)
    mask[0, 1] = True
    out, _ = infer(q, k, v, "BSND", atten_mask=mask, inner_precise=2)
    assert out[0, 1].eq(0).all()
    close(out[0, ::2], plain(q[0, ::2], k[0], v[0])[0])
    with pytest.raises(RuntimeError, match="hides every key"):
        infer(q, k, v, "BSND", atten_mask=mask)


def test_the_second_version_and_outputs_that_are_given():
    q, k, v = packed()
    options = {"input_layout": "TND", "sparse_mode": 3, "atten_mask": HIDE.npu(), "num_key_value_heads": K}
    out = torch.empty_like(q).npu()
    torch_npu.npu_fused_infer_attention_score.out(
        q.npu(),
        k.npu(),
        v.npu(),
        actual_seq_lengths=ends(QUERIES),
        actual_seq_lengths_kv=ends(KEYS),
        num_heads=N,
        scale=0.25,
        **options,
        out=[out, torch.empty(1).npu()],
    )
    second = torch_npu.npu_fused_infer_attention_score_v2(
        q.npu(),
        k.npu(),
        v.npu(),
        actual_seq_qlen=ends(QUERIES),
        actual_seq_kvlen=ends(KEYS),
        num_query_heads=N,
        softmax_scale=0.25,
        **options,
    )[0]
    assert torch.equal(out, second)
    close(second.cpu(), expected_of_packed(q, k, v, True)[0])


TND = {"actual_seq_lengths": ends(QUERIES), "actual_seq_lengths_kv": ends(KEYS)}
CAUSAL = TND | {"atten_mask": HIDE, "sparse_mode": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actual_seq_lengths": None}, "needs actual_seq_lengths"),
        ({"actual_seq_lengths": [3, 8]}, "2 actual_seq_lengths, 3 actual_seq_lengths_kv"),
        ({"actual_seq_lengths": [3, 2, 8]}, "must not decrease"),
        ({"actual_seq_lengths": [3, 4, 7]}, "ends at 7, but there are 8 tokens"),
        ({"actual_seq_lengths_kv": [5, 6, 14]}, "ends at 14, but there are 15 tokens"),
        ({"actual_seq_lengths_kv": [5, 5, 15]}, "sequence 1 has 1 queries and only 0 keys"),
        ({"atten_mask": None}, "sparse_mode 3 needs one"),
        ({"sparse_mode": 0}, "sparse_mode 0 takes no atten_mask"),
        ({"sparse_mode": 2}, "no other"),
        ({"sparse_mode": 4}, "sparse_mode 4 has no reference"),
        ({"atten_mask": HIDE.float()}, "bool, int8 or uint8"),
        ({"atten_mask": 1 - HIDE}, "must be triu"),
        ({"atten_mask": HIDE[:1024, :1024].contiguous()}, r"compressed atten_mask \[2048, 2048\]"),
        ({"inner_precise": 1}, "inner_precise 1"),
        ({"num_heads": 2}, "the query has 4 heads"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"num_key_value_heads": 4}, "the key has 2 heads"),
        ({"actual_seq_lengths": [8] * 4097, "actual_seq_lengths_kv": [15] * 4097}, "4097 sequences"),
        ({"input_layout": "NTD"}, "has no reference"),
        ({"pse_shift": torch.zeros(1, N, 8, 16, dtype=torch.bfloat16)}, "no reference for pse"),
        ({"quant_scale1": torch.ones(1)}, "no reference for quant_scale1"),
    ],
)
def test_packed_calls_that_the_document_rules_out(change, message):
    with pytest.raises(RuntimeError, match=message):
        infer(*packed(), **CAUSAL | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.float(), "must all be float16 or bfloat16, not torch.float32"),
        (lambda x: x[..., :8].contiguous(), "D = 8 is not a multiple of 16"),
        (lambda x: x.repeat(1, 1, 17), "D = 272 is not a multiple of 16 of at most 256"),
    ],
)
def test_packed_types_and_widths_that_the_document_rules_out(change, message):
    with pytest.raises(RuntimeError, match=message):
        infer(*map(change, packed()), **CAUSAL)


def test_a_query_that_is_not_contiguous_is_copied_and_a_mask_is_refused():
    q, k, v = (x.npu() for x in packed())
    sparse = q.transpose(0, 1).contiguous().transpose(0, 1)
    with counted() as count:
        out, _ = infer(sparse, k, v, **TND)
    assert count["copied::query"] == 1 and not count["copied::value"]
    assert torch.equal(out, infer(q, k, v, **TND)[0])
    mask = HIDE.repeat_interleave(2, 1).npu()[:, ::2]
    with pytest.raises(RuntimeError, match="atten_mask is not contiguous"):
        infer(q, k, v, **CAUSAL | {"atten_mask": mask})


def test_a_cache_in_blocks_that_is_not_contiguous_is_refused():
    cache = draw(4, 16, 2 * K * D).npu()[..., : K * D]
    options = {"block_size": 16, "block_table": torch.tensor([[1]], dtype=torch.int32)}
    with pytest.raises(RuntimeError, match="key is not contiguous"):
        infer(draw(1, N, D), cache, cache, actual_seq_lengths=[1], actual_seq_lengths_kv=[3], **options)


ONE = {"atten_mask": torch.zeros(3, 1, 1, 7, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atten_mask": torch.zeros(3, 1, 1, 8, dtype=torch.bool)}, r"atten_mask \[3, 1, 1, 8\] is none of"),
        ({"atten_mask": torch.full((3, 7), 2, dtype=torch.int8)}, "values other than 0 and 1"),
        ({"atten_mask": torch.ones(3, 7, dtype=torch.bool)}, "hides every key"),
        ({"inner_precise": 2}, r"inner_precise 2 is not in 0..1"),
        ({"actual_seq_lengths_kv": [2, 3]}, "actual_seq_lengths_kv has 2 elements"),
        ({"actual_seq_lengths_kv": [8]}, r"not in 0..7"),
    ],
)
def test_calls_of_one_query_that_the_document_rules_out(change, message):
    q, k = draw(3, 1, N, D), draw(3, 7, K, D)
    with pytest.raises(RuntimeError, match=message):
        infer(q, k, k, "BSND", **ONE | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 32}, "block_size is 32, but the blocks have 16 places"),
        ({"actual_seq_lengths_kv": None}, "needs actual_seq_lengths_kv"),
        ({"actual_seq_lengths_kv": [33, 16]}, "3 blocks are needed, block_table has 2"),
        ({"block_table": torch.tensor([[0, 1]], dtype=torch.int32)}, "block_table has 1 rows for 2 sequences"),
        ({"block_table": torch.tensor([[0, 1], [2, 3]])}, "must be int32"),
        ({"block_table": torch.tensor([[0, 4], [2, 3]], dtype=torch.int32)}, "names a block that the cache of 4 lacks"),
    ],
)
def test_blocks_that_the_document_rules_out(change, message):
    options = {
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [20, 16],
        "block_size": 16,
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
    }
    cache = draw(4, 16, K * D)
    with pytest.raises(RuntimeError, match=message):
        infer(draw(2, N, D), cache, cache, **options | change)
    infer(draw(2, N, D), cache, cache, **options)


@pytest.mark.parametrize("size", [144, 24])
def test_sizes_of_blocks_that_the_document_rules_out(size):
    cache = draw(2, size, K * D)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"block_size {size}"):
        infer(
            draw(1, N, D),
            cache,
            cache,
            block_size=size,
            block_table=table,
            actual_seq_lengths=[1],
            actual_seq_lengths_kv=[3],
        )
