"""The definitions of the parts of layers, against loops and against what transformers computes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs
from transformers.models.qwen3 import modeling_qwen3 as of_text

from npu_vlrl.kernels import cuda, reference


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def test_rms_norm_by_hand() -> None:
    found = reference.rms_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([1.0, 10.0]), 0.5)
    size = math.sqrt(12.5 + 0.5)
    torch.testing.assert_close(found, torch.tensor([[3 / size, 40 / size], [0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    norm = theirs.Qwen2_5_VLRMSNorm(8, eps=1e-3).to(dtype)
    norm.weight.data = draw(8, dtype=dtype)
    x = draw(4, 8, dtype=dtype)
    assert torch.equal(reference.rms_norm(x, norm.weight, 1e-3), norm(x))


def test_rotary_by_hand() -> None:
    """Width 4: (x0, x2) and (x1, x3) are turned as points of a plane, by an angle of their own."""
    x = draw(1, 1, 3, 4)
    angles = torch.tensor([0.3, 1.1], dtype=torch.float64)
    twice = torch.cat([angles, angles])[None, None]
    found = reference.rotary(x, twice.cos(), twice.sin())
    points, turned = torch.complex(x[..., :2], x[..., 2:]), torch.complex(found[..., :2], found[..., 2:])
    torch.testing.assert_close(turned, points * torch.polar(torch.ones_like(angles), angles))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_is_that_of_transformers(dtype: torch.dtype) -> None:
    q, k, cos, sin = draw(2, 4, 3, 8, dtype=dtype), draw(2, 2, 3, 8, dtype=dtype), draw(2, 3, 8), -draw(2, 3, 8)
    text = of_text.apply_rotary_pos_emb(q, k, cos.to(dtype), sin.to(dtype))
    for x, expected in zip((q, k), text, strict=True):
        found = reference.rotary(x.transpose(1, 2), cos.to(dtype), sin.to(dtype))
        assert torch.equal(found.transpose(1, 2), expected)
    cos, sin = cos[0].float(), sin[0].float()
    vision = theirs.apply_rotary_pos_emb_vision(q[0].transpose(0, 1), k[0].transpose(0, 1), cos, sin)
    for x, expected in zip((q, k), vision, strict=True):
        assert torch.equal(reference.rotary(x[:1].transpose(1, 2), cos[None], sin[None])[0], expected)


def test_rotary_of_one_row_serves_all() -> None:
    x, cos, sin = draw(3, 2, 1, 4), draw(1, 2, 4), -draw(1, 2, 4)
    one_by_one = [reference.rotary(x[i : i + 1], cos, sin) for i in range(3)]
    assert torch.equal(reference.rotary(x, cos, sin), torch.cat(one_by_one))


@pytest.mark.parametrize(
    ("cos", "sin"),
    [((1, 3, 2), (1, 3, 2)), ((1, 2, 4), (1, 2, 4)), ((3, 3, 4), (3, 3, 4)), ((1, 3, 4), (2, 3, 4)), ((3, 4), (3, 4))],
    ids=["half of the width", "too short", "wrong rows", "unequal", "no rows"],
)
def test_rotary_refuses_what_does_not_cover_x(cos: tuple[int, ...], sin: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"rotary: cos \[.*must be \[B or 1, T, D\] for x .* = \[2, 3, 1, 4\]"):
        reference.rotary(draw(2, 3, 1, 4), draw(*cos), draw(*sin))


def test_rotary_refuses_an_odd_width() -> None:
    with pytest.raises(ValueError, match="with an even D"):
        reference.rotary(draw(1, 2, 1, 3), draw(1, 2, 3), draw(1, 2, 3))


def test_swiglu_by_hand() -> None:
    found = reference.swiglu(torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0]))
    torch.testing.assert_close(found, torch.tensor([3 / (1 + math.exp(-1)), -10 / (1 + math.exp(2))]))


@pytest.mark.parametrize("with_bias", [True, False])
def test_patch_embed_is_one_product_a_patch(with_bias: bool) -> None:
    patches, weight, bias = draw(5, 24), draw(4, 3, 2, 2, 2), draw(4) if with_bias else None
    found = reference.patch_embed(patches, weight, bias)
    for i in range(5):
        for h in range(4):
            by_hand = sum(float(a * b) for a, b in zip(patches[i], weight[h].flatten(), strict=True))
            assert float(found[i, h]) == pytest.approx(by_hand + (float(bias[h]) if bias is not None else 0))


def test_add_at_adds_in_order() -> None:
    x = torch.zeros(2, 3, 1)
    mask = torch.tensor([[False, True, False], [True, False, True]])
    rows = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    found = reference.add_at(x, mask, rows)
    assert found.flatten().tolist() == [0, 1, 0, 2, 0, 3] and not x.any()
    found[1, 2].sum().backward()
    assert rows.grad is not None and rows.grad.flatten().tolist() == [0, 0, 1]


def test_add_product_by_hand() -> None:
    total = torch.ones(2, 3)
    reference.add_product(total, torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0, 30.0]]))
    assert total.tolist() == [[11, 21, 31], [21, 41, 61]]


@pytest.mark.parametrize("width", [5, 8, 13])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("mlp", [reference.gated_mlp, cuda.gated_mlp])
def test_a_gated_mlp_by_its_formula(mlp: Callable[..., Tensor], with_bias: bool, width: int) -> None:
    """Also one that pads: the result and every gradient have the width they would have without."""
    x, gate, up, down = draw(3, 4), draw(width, 4), 2 * draw(width, 4), draw(4, width)
    biases = [draw(n) if with_bias else None for n in (width, width, 4)]
    leaves = [one.requires_grad_() for one in (x, gate, up, down, *biases) if one is not None]
    maps = zip((gate, up, down), biases, strict=True)
    found = mlp(x, *maps)
    a, b = (x @ w.T + (0 if bias is None else bias) for w, bias in zip((gate, up), biases, strict=False))
    expected = (a / (1 + (-a).exp()) * b) @ down.T + (0 if biases[2] is None else biases[2])
    torch.testing.assert_close(found, expected)
    weights = draw(3, 4)
    for ours, theirs_ in zip(
        torch.autograd.grad(found, leaves, weights), torch.autograd.grad(expected, leaves, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs_)


def test_masked_attention_by_hand() -> None:
    q, k, v = draw(2, 4, 3, 5), draw(2, 2, 6, 5), draw(2, 2, 6, 5)
    mask = torch.rand(2, 1, 3, 6, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[0, 0, 1] = False  # a query that sees nothing
    found = reference.masked_attention(q, k, v, mask, 0.7)
    assert found.shape == (2, 3, 4, 5) and found.isfinite().all()
    for b in range(2):
        for t in range(3):
            seen = mask[b, 0, t].nonzero()[:, 0]
            for h in range(4):
                weights = (k[b, h // 2, seen] @ q[b, h, t] * 0.7).exp()
                if len(seen):
                    torch.testing.assert_close(found[b, t, h], weights @ v[b, h // 2, seen] / weights.sum())
