"""The small operators that only sampling uses, on the stand-in, against plain definitions in float64."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.host_cann import counted, vllm_ascend
from tests.host_cann.children import run

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> None:
    bound = BOUNDS[found.dtype]
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=bound, atol=bound)


# ---- top k, top p --------------------------------------------------------------------------------------------------


def kept(logits: list[float], k: int | None, p: float | None) -> set[int]:
    """The places that stay: the k largest, then the fewest largest of these whose probabilities exceed p together."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:k]
    if p is None:
        return set(order)
    probabilities = torch.tensor([logits[i] for i in order], dtype=torch.float64).softmax(0).tolist()
    stays, total = set(), 0.0
    for place, probability in zip(order, probabilities, strict=True):
        stays.add(place)
        total += probability
        if total >= p:
            break
    return stays


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "p"), [([1, 3, 50], None), (None, [0.1, 0.55, 1.0]), ([5, 2, 40], [0.9, 0.001, 0.6])])
def test_top_k_top_p(kind, k, p):
    logits = torch.randperm(150, generator=torch.Generator().manual_seed(1)).view(3, 50) / 16  # no two are equal
    with counted() as count:
        found = torch_npu.npu_top_k_top_p(
            logits.to(kind).npu(),
            k=None if k is None else torch.tensor(k, dtype=torch.int32).npu(),
            p=None if p is None else torch.tensor(p, dtype=kind).npu(),
        ).cpu()
    assert count["aclnnApplyTopKTopP"] == 1
    for row in range(3):
        expected = kept(logits[row].tolist(), k and k[row], p and torch.tensor(p[row], dtype=kind).item())
        assert set(torch.isfinite(found[row]).nonzero().flatten().tolist()) == expected
        assert all(found[row, i] == logits[row, i] for i in expected)


def test_top_p_keeps_one_and_equal_logits_stay_together():
    found = torch_npu.npu_top_k_top_p(torch.zeros(1, 4).npu(), p=torch.zeros(1).npu()).cpu()
    assert found.isfinite().sum() == 1
    found = torch_npu.npu_top_k_top_p(torch.zeros(1, 4).npu(), k=torch.ones(1, dtype=torch.int32).npu()).cpu()
    assert found.isfinite().sum() == 4  # none is below the largest


# ---- rotary positions ----------------------------------------------------------------------------------------------


def rotated(x: Tensor, angles: Tensor, halves: bool = True) -> Tensor:
    """x [T, N, D] as complex numbers times exp(i angles); angles [T, half]. What lies beyond 2 x half stays."""
    turning, rest = x[..., : 2 * angles.shape[-1]], x[..., 2 * angles.shape[-1] :]
    pairs = turning.unflatten(-1, (2, -1)).transpose(-1, -2) if halves else turning.unflatten(-1, (-1, 2))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles)[:, None])
    return torch.cat([(turned.transpose(-1, -2) if halves else turned).flatten(-2), rest], -1)


def frequencies(half: int) -> Tensor:
    return 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)


def table(length: int, rotary: int) -> Tensor:
    """[length, rotary]: cosines, then sines."""
    angles = torch.arange(length)[:, None] * frequencies(rotary // 2)
    return torch.cat([angles.cos(), angles.sin()], -1)


@pytest.mark.parametrize("kind", list(BOUNDS))
@pytest.mark.parametrize("halves", [True, False])
def test_mrope_with_one_position(kind, halves):
    positions = torch.tensor([7, 0, 63, 5, 5])
    q, k = draw(5, 4 * 96, seed=1).to(kind), draw(5, 2 * 96, seed=2).to(kind)
    with counted() as count:
        found = torch_npu.npu_mrope(
            positions.npu(),
            q.npu(),
            k.npu(),
            table(64, 64).to(kind).npu(),
            96,
            mrope_section=[0, 0, 0],
            rotary_mode="half" if halves else "interleave",
        )
    assert count["aclnnRopeWithSinCosCacheV2"] == 1
    angles = positions[:, None] * frequencies(32)
    for x, out in zip((q, k), found, strict=True):
        close(out, rotated(x.double().unflatten(-1, (-1, 96)), angles, halves).flatten(1))


@pytest.mark.parametrize(("section", "mode"), [([16, 24, 24], "default"), ([24, 20, 20], "interleave")])
def test_mrope_with_three_positions(section, mode):
    """Qwen2.5-VL's section, one after another, and Qwen3-VL's, in turns."""
    positions = torch.tensor([[3, 4, 4, 9], [3, 4, 5, 9], [3, 7, 8, 9]])
    q, k = draw(4, 2 * 128, seed=1), draw(4, 128, seed=2)
    found = torch_npu.npu_mrope(
        positions.npu(),
        q.npu(),
        k.npu(),
        table(16, 128).float().npu(),
        128,
        mrope_section=section,
        rotary_mode="half",
        cache_mode=mode,
    )
    if mode == "default":
        axes = [0] * section[0] + [1] * section[1] + [2] * section[2]
    else:
        axes = [i % 3 if i < 60 else 0 for i in range(64)]
    angles = torch.stack([positions[axis] * frequencies(64)[i] for i, axis in enumerate(axes)], -1)
    for x, out in zip((q, k), found, strict=True):
        expected = rotated(x.double().unflatten(-1, (-1, 128)), angles).flatten(1)
        close(out, expected)
        with pytest.raises(AssertionError):  # the control: one axis for all
            close(out, rotated(x.double().unflatten(-1, (-1, 128)), positions[0][:, None] * frequencies(64)).flatten(1))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_rotary_of_a_vision_tower_with_heads_of_80(kind):
    """As vllm-ascend calls it for images: queries and keys in one batch, [2, T, N, 80]; cos and sin [1, T, 1, 80]."""
    angles = torch.cat([torch.arange(6)[:, None] * frequencies(40)] * 2, -1)
    cos, sin = (part[None, :, None].to(kind).npu() for part in (angles.cos(), angles.sin()))
    x = draw(2, 6, 3, 80).to(kind)
    with counted() as count:
        found = torch_npu.npu_rotary_mul(x.npu(), cos, sin)
    assert count["aclnnRotaryPositionEmbedding"] == 1
    for one, out in zip(x, found, strict=True):
        close(out, rotated(one.double(), angles[:, :40]))


# ---- of ATB, through torch_npu's own code for it -------------------------------------------------------------------

ROPE = """
import torch, torch_npu
from tests.host_cann import counted
from tests.npu.test_host_cann_inference_ops import close, draw, frequencies, rotated, table
positions = torch.tensor([[9, 0, 3]])
kind = torch.bfloat16
for halves in (True, False):
    q, k = draw(3, 4 * 32, seed=1).to(kind), draw(3, 2 * 32, seed=2).to(kind)
    mine = q.npu(), k.npu()
    with counted() as count:
        torch_npu._npu_rotary_embedding(positions.npu(), *mine, 32, table(16, 32).to(kind).npu(), halves)
    assert count["AtbRope"] == 1
    for x, out in zip((q, k), mine, strict=True):
        heads = x.double().unflatten(-1, (-1, 32))
        close(out, rotated(heads, positions[0][:, None] * frequencies(16), halves).flatten(1))
other = q.npu()  # torch_npu keeps the first table of a process for ever
torch_npu._npu_rotary_embedding(positions.npu(), other, k.npu(), 32, torch.zeros(16, 32, dtype=kind).npu(), True)
close(other, rotated(q.double().unflatten(-1, (-1, 32)), positions[0][:, None] * frequencies(16)).flatten(1))
try:
    torch_npu._npu_rotary_embedding(positions[:, :2].npu(), *mine, 32, torch.zeros(1).npu(), True)
except RuntimeError as error:
    print("refused:", error)
else:
    raise SystemExit("no error")
"""


def test_rotary_embedding_of_atb():
    """In a process of its own, since torch_npu keeps the first table of cosines that it sees."""
    (child,) = run(ROPE)
    assert child.code == 0, child.output
    assert "refused: RopeOperation setup failed!" in child.output
    assert "AtbRope: query, key and cos have 3, 3 and 2 tokens" in child.output


def slots(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).npu()


def test_keys_and_values_go_to_their_slots():
    key, value = draw(4, 2, 16, seed=1).bfloat16(), draw(4, 2, 16, seed=2).bfloat16()
    caches = [torch.full((3, 4, 2, 16), float(i), dtype=torch.bfloat16).npu() for i in (1, 2)]
    with counted() as count:
        torch_npu._npu_reshape_and_cache(key.npu(), value.npu(), *caches, slots(11, 0, -1, 6))
    assert count["AtbReshapeAndCache"] == 1
    for new, cache, filling in ((key, caches[0], 1.0), (value, caches[1], 2.0)):
        expected = torch.full((3, 4, 2, 16), filling, dtype=torch.bfloat16)
        for token, (block, row) in {0: (2, 3), 1: (0, 0), 3: (1, 2)}.items():
            expected[block, row] = new[token]
        assert torch.equal(cache.cpu(), expected)


def test_a_product_is_added_to_float32():
    x, weight, total = draw(5, 3).half(), draw(5, 4, seed=1).half(), draw(3, 4, seed=2)
    mine = total.npu()
    torch_npu._npu_matmul_add_fp32(x.npu(), weight.npu(), mine)
    close(mine, total.double() + x.double().T @ weight.double())


# ---- Triton's ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
def test_queries_and_keys_of_qwen3_vl(interleaved):
    positions, section, d = torch.tensor([[3, 4, 4], [3, 4, 5], [3, 7, 8]]), [24, 20, 20], 128
    qkv, weights = draw(3, (4 + 2 * 2) * d, seed=1), [1 + 0.1 * draw(d, seed=i) for i in (2, 3)]
    with counted() as count:
        q, k, v, gate = vllm_ascend.split_qkv_rmsnorm_mrope(
            qkv.npu(),
            *(w.npu() for w in weights),
            table(16, d).float()[positions].npu(),
            *(4, 2, d, 1e-6, section, interleaved, d),
        )
    assert count["triton_split_qkv_rmsnorm_mrope"] == 1
    axes = [i % 3 if i < 60 else 0 for i in range(64)] if interleaved else [0] * 24 + [1] * 20 + [2] * 20
    angles = torch.stack([positions[axis] * frequencies(64)[i] for i, axis in enumerate(axes)], -1)
    parts = qkv.double().split([4 * d, 2 * d, 2 * d], -1)
    for x, weight, out in zip(parts[:2], weights, (q, k), strict=True):
        heads = x.unflatten(-1, (-1, d))
        heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        close(out, rotated(heads, angles).flatten(1))
    close(v, parts[2])
    assert gate.shape == (3, 0)


def test_slots_of_a_batch():
    """Three rows in the table, two requests in the batch; the rest of the slots is padding."""
    found, blocks = torch.full((8,), 77).npu(), torch.tensor([[5, 2], [3, 9], [1, 1]], dtype=torch.int32).npu()
    options = {"TOTAL_CP_WORLD_SIZE": 1, "TOTAL_CP_RANK": 0, "CP_KV_CACHE_INTERLEAVE_SIZE": 1, "BLOCK_SIZE": 1024}
    call = vllm_ascend.SlotMapping()[(3,)]
    arguments = (5, 7, slots(0, 3, 5, 9), torch.tensor([2, 3, 4, 0, 7]).npu(), blocks, 2, 4, found)
    call(*arguments, PAD_ID=-1, **options)
    assert found.tolist() == [5 * 4 + 2, 5 * 4 + 3, 2 * 4, 3 * 4, 9 * 4 + 3, -1, -1, 77]
    with pytest.raises(ValueError, match="split over devices"):
        call(*arguments, PAD_ID=-1, **(options | {"TOTAL_CP_WORLD_SIZE": 2}))


# ---- refusals ------------------------------------------------------------------------------------------------------

LOGITS, K, P = draw(2, 6), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0.5, 0.5])


def top(logits=LOGITS, k=K, p=P):
    torch_npu.npu_top_k_top_p(logits.npu(), k=None if k is None else k.npu(), p=None if p is None else p.npu())


def mrope(section=(16, 24, 24), d=128, positions=((1, 2), (1, 2), (1, 2)), length=8, tokens=2, kind=torch.float32):
    x, cache = torch.zeros(tokens, d, dtype=kind).npu(), torch.zeros(length, d).npu()
    torch_npu.npu_mrope(torch.tensor(positions).npu(), x, x, cache, d, mrope_section=list(section))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top(logits=LOGITS[0]), r"not \[B, V\]"),
        (lambda: top(k=None, p=None), "neither p nor k"),
        (lambda: top(k=K.long()), "k must be int32"),
        (lambda: top(k=K[:1]), "k must be int32"),
        (lambda: top(k=K - 1), r"k must lie in 1\.\.6"),
        (lambda: top(k=K + 5), r"k must lie in 1\.\.6"),
        (lambda: top(p=P.half()), "p must have the type of logits"),
        (lambda: top(p=P + 1), r"p must lie in 0\.\.1"),
        (lambda: mrope(section=(20, 22, 22)), "is not one of"),
        (lambda: mrope(section=(8, 12, 12)), "half of rotary_dim"),
        (lambda: mrope(d=72, section=(0, 0, 0), positions=(1, 2)), "multiples of 16"),
        (lambda: mrope(length=2), r"positions must lie in 0\.\.1"),
        (lambda: mrope(tokens=3), "3 tokens, positions 2"),
        (lambda: mrope(kind=torch.half), "must be of one type"),
    ],
)
def test_refusals_name_what_is_wrong(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": torch.tensor([1, 2]).npu()}, "slot_indices must be int32"),
        ({"slots": slots(1)}, "[1] slots for 2 tokens"),
        ({"slots": slots(1, 12)}, "outside the 12 rows"),
        ({"slots": slots(4, 4)}, "two tokens have one slot"),
        ({"key_cache": torch.zeros(3, 4, 2, 8).half().npu()}, "key: no torch.bfloat16 here"),
        ({"key_cache": torch.zeros(3, 4, 2, 16).bfloat16().npu()}, "does not fit its cache"),
    ],
)
def test_atb_refuses_and_says_why(changes, message, capfd):
    cache = torch.zeros(3, 4, 2, 8).bfloat16().npu()
    new = torch.zeros(2, 2, 8).bfloat16().npu()
    given = {"key_cache": cache, "slots": slots(1, 2)} | changes
    with pytest.raises(RuntimeError, match="ReshapeAndCache setup failed!"):
        torch_npu._npu_reshape_and_cache(new, new, given["key_cache"], cache.clone(), given["slots"])
    assert message in capfd.readouterr().err


def test_an_operator_of_atb_without_a_stand_in_is_named(capfd):
    with pytest.raises(RuntimeError, match="GroupTopkOperation CreateOperation failed!"):
        torch_npu._npu_group_topk(draw(4, 4).npu(), 1, 2, 3)
    assert "GroupTopkParam has no stand-in" in capfd.readouterr().err


def test_the_module_acl_copies_and_says_what_it_cannot():
    from acl.rt import memcpy

    source, target = torch.arange(4).npu(), torch.zeros(4, dtype=torch.int64)
    assert memcpy(target.data_ptr(), 32, source.data_ptr(), 32, 2) == 0
    assert target.tolist() == [0, 1, 2, 3]
    assert memcpy(target.data_ptr(), 32, source.data_ptr(), 32, 1) == 107000  # that way it is not on a device
