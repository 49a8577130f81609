"""Plain torch on the device of the stand-in, against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host_cann import counted


def on_both(run):
    """`run(device)` on the device and on the CPU."""
    return run("npu").cpu(), run("cpu")


CASES = {
    "broadcast": lambda d: torch.arange(6.0, device=d).view(2, 3) + torch.ones(3, device=d),
    "scalar on the host": lambda d: torch.arange(3, device=d) * torch.tensor(2.5),
    "type promotion": lambda d: torch.arange(3, device=d) / 2 + torch.ones(3, dtype=torch.float16, device=d),
    "views": lambda d: (
        torch.arange(24.0, device=d).view(2, 3, 4)[:, 1:, ::2].transpose(0, 2) @ torch.ones(2, 2, device=d)
    ),
    "in place through a view": lambda d: (x := torch.zeros(3, 4, device=d), x[1].add_(1), x[:, 2].mul_(5))[0],
    "comparison": lambda d: torch.arange(4, device=d) > 1,
    "where": lambda d: torch.where(torch.arange(4, device=d) > 1, 1.0, torch.arange(4.0, device=d)),
    "reduction": lambda d: torch.arange(12.0, device=d).view(3, 4).sum(1, keepdim=True),
    "two results": lambda d: torch.cat(torch.tensor([[3.0, 1.0, 2.0]], device=d).topk(2)[:1]),
    "list of tensors": lambda d: torch.cat([torch.ones(2, device=d), torch.zeros(1, device=d)]),
    "list of results": lambda d: torch.stack(torch.arange(6, device=d).chunk(3)[::-1]),
    "boolean index": lambda d: torch.arange(4.0, device=d)[torch.tensor([True, False, True, False], device=d)],
    "index on the host": lambda d: torch.arange(4.0, device=d)[torch.tensor([2, 0])],
    "index_put": lambda d: torch.zeros(4, device=d).index_put_(
        (torch.tensor([1, 3], device=d),), torch.ones(2, device=d)
    ),
    "scatter": lambda d: torch.zeros(4, device=d).scatter_(0, torch.tensor([1, 3], device=d), 2.0),
    "nothing": lambda d: torch.empty(0, 3, device=d).sum(0),
    "bfloat16": lambda d: (torch.arange(8, device=d).bfloat16() / 3).float(),
    "repeat_interleave": lambda d: torch.arange(3, device=d).repeat_interleave(torch.tensor([1, 0, 2], device=d)),
    "complex": lambda d: torch.view_as_real(
        torch.polar(torch.ones(3, device=d), torch.arange(3.0, device=d)).conj().resolve_conj()
    ),
    "to another type": lambda d: torch.arange(4, device=d).to(torch.float16).float(),
    "matmul of vectors": lambda d: torch.arange(3.0, device=d) @ torch.arange(3.0, device=d),
    "einsum": lambda d: torch.einsum("ij,kj->ik", torch.ones(2, 3, device=d), torch.ones(4, 3, device=d)),
    "conv3d": lambda d: torch.nn.functional.conv3d(
        torch.ones(1, 3, 2, 4, 4, device=d), torch.ones(5, 3, 2, 2, 2, device=d)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operators(name):
    mine, theirs = on_both(CASES[name])
    assert mine.dtype == theirs.dtype
    torch.testing.assert_close(mine, theirs)


def test_results_stay_on_the_device_of_their_tensors():
    x = torch.ones(3, device="npu:1")
    assert (x + x).device == torch.device("npu:1")
    assert torch.zeros(2, device="npu:1").device.index == 1
    assert x.to("npu:0").device.index == 0


def test_out_is_filled_and_resized():
    out = torch.empty(0, device="npu")
    a = torch.arange(6.0, device="npu").view(2, 3)
    assert torch.add(a, 1, out=out) is out
    assert out.shape == (2, 3)
    assert torch.equal(out.cpu(), a.cpu() + 1)
    part = torch.zeros(2, 6, device="npu")
    torch.mul(a, 2, out=part[:, ::2])  # into every other column
    assert torch.equal(part.cpu()[:, ::2], a.cpu() * 2)
    assert not part.cpu()[:, 1::2].any()
    torch.sub(a, a, out=a)
    assert not a.any()


def test_in_place_operators_give_their_argument_back():
    x = torch.ones(3, device="npu")
    assert x.add_(1) is x
    before = x.data_ptr()
    x.clamp_(max=1.5).neg_()
    assert x.data_ptr() == before
    assert x.tolist() == [-1.5] * 3
    values = [torch.ones(2, device="npu"), torch.ones(3, device="npu")]
    torch._foreach_mul_(values, 3.0)
    assert [v.tolist() for v in values] == [[3.0] * 2, [3.0] * 3]


def test_copies_between_host_and_devices():
    host = torch.arange(6.0).view(2, 3)
    far = host.npu()
    assert torch.equal(far.t().cpu(), host.t())
    assert torch.equal(far.to("npu:1").cpu(), host)
    target = torch.zeros(3, 2)
    target.t().copy_(far)
    assert torch.equal(target, host.t())
    assert torch.equal(torch.zeros(2, 3, device="npu").copy_(host[0]).cpu(), host[0].expand(2, 3))
    pinned = host.pin_memory()
    assert pinned.is_pinned()
    assert torch.equal(pinned.to("npu", non_blocking=True).cpu(), host)


def test_mixed_devices_are_refused():
    a, b = torch.ones(3, device="npu:0"), torch.ones(3, device="npu:1")
    with pytest.raises(RuntimeError, match=r"aten::add was given some on npu:0 and npu:1"):
        a + b
    with pytest.raises(RuntimeError, match=r"aten::add was given one on the cpu, of shape \[3\]"):
        a + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        a @ torch.ones(3)


def test_what_torch_npu_lacks_is_counted_as_a_fallback():
    x = torch.rand(4, device="npu")
    with counted() as count:
        found = torch.special.entr(x)
    assert [name for name in count if name.startswith("fallback::")], count
    torch.testing.assert_close(found.cpu(), torch.special.entr(x.cpu()))
    with counted() as count:
        (x + x).exp().sum()
    assert count == {"aten::add": 1, "aten::exp": 1, "aten::sum": 1}


def test_counters_nest():
    x = torch.ones(2, device="npu")
    with counted() as outer:
        x + x
        with counted() as inner:
            x * x
    assert inner == {"aten::mul": 1}
    assert outer == {"aten::add": 1, "aten::mul": 1}


# ---- random numbers ------------------------------------------------------------------------------------------------


def drawn(device="npu"):
    return torch.cat([
        torch.randn(3, device=device),
        torch.rand(2, device=device),
        torch.randperm(5, device=device),
        torch.multinomial(torch.ones(9, device=device), 2),
        torch.empty(2, device=device).exponential_(),
        torch.bernoulli(torch.full((4,), 0.5, device=device)),
    ]).cpu()  # fmt: skip


def test_seeds_and_states_repeat_what_was_drawn():
    torch.npu.manual_seed(7)
    first = drawn()
    state = torch.npu.get_rng_state()
    second = drawn()
    assert not torch.equal(first, second)
    torch.npu.set_rng_state(state)
    assert torch.equal(drawn(), second)
    torch.npu.manual_seed(7)
    assert torch.equal(drawn(), first)
    torch.manual_seed(8)  # seeds every device
    other = drawn()
    assert not torch.equal(other, first)
    torch.manual_seed(8)
    assert torch.equal(drawn(), other)


def test_generators_of_the_device():
    a, b = (torch.Generator("npu").manual_seed(3) for _ in range(2))
    x = torch.randn(4, device="npu", generator=a)
    before = torch.npu.get_rng_state()
    assert torch.equal(torch.randn(4, device="npu", generator=b).cpu(), x.cpu())
    assert not torch.equal(torch.randn(4, device="npu", generator=b).cpu(), x.cpu())
    assert torch.equal(torch.npu.get_rng_state(), before)  # the default generator took no part


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, g: torch.poisson(x, generator=g),
        lambda x, g: torch.normal(x, x, generator=g),
        lambda x, g: torch.randint(0, 9, (5,), generator=g, device="npu"),
    ],
)
def test_a_generator_reaches_every_kind_of_operator(draw):
    x = torch.full((5,), 50.0, device="npu")
    first, again, other = (draw(x, torch.Generator("npu").manual_seed(seed)).tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_a_generator_of_the_host_cannot_draw_on_the_device():
    with pytest.raises(RuntimeError, match="[Gg]enerator"):
        torch.randn(3, device="npu", generator=torch.Generator())


def test_dropout_is_drawn_from_the_device_generator():
    x, layer = torch.ones(64, device="npu", requires_grad=True), torch.nn.Dropout(0.5)
    torch.npu.manual_seed(3)
    out = layer(x)
    out.sum().backward()
    assert set(out.tolist()) == {0.0, 2.0}
    assert torch.equal(x.grad, out)
    torch.npu.manual_seed(3)
    assert torch.equal(layer(x), out)


def test_the_host_generator_is_left_alone():
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    drawn()
    assert torch.equal(torch.rand(3), want)


def test_normal_numbers_are_normal():
    x = torch.randn(20000, device="npu")
    assert abs(x.mean().item()) < 0.05
    assert abs(x.std().item() - 1) < 0.05


# ---- training ------------------------------------------------------------------------------------------------------


def trained(device, steps=5):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(11, 8),
        torch.nn.Linear(8, 16),
        torch.nn.GELU(),
        torch.nn.LayerNorm(16),
        torch.nn.Linear(16, 4),
    )
    model = copy.deepcopy(model).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens, labels = (
            torch.randint(0, 11, (5, 3), generator=generator),
            torch.randint(0, 4, (15,), generator=generator),
        )
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens.to(device)).flatten(0, 1), labels.to(device)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return [p.detach().cpu() for p in model.parameters()]


def test_a_trained_model_is_the_same_and_nothing_falls_back():
    with counted() as count:
        mine = trained("npu")
    for a, b in zip(mine, trained("cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not [name for name in count if name.startswith("fallback")]


def test_autocast_and_inference_mode():
    model = torch.nn.Linear(8, 8).npu()
    x = torch.randn(2, 8, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    with torch.inference_mode():
        assert (x * 2).is_inference()
    assert not (x * 2).is_inference()


@settings(max_examples=30)
@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_the_gradient_of_matmul(shape, seed, data):
    """torch_npu's own backward of matmul, for every rank of its arguments."""
    generator = torch.Generator().manual_seed(seed)
    inner, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    left = torch.randn(*shape[:-1], inner, generator=generator)
    ranks = {
        1: (inner,),
        2: (inner, columns),
        3: (*left.shape[:1], inner, columns) if left.dim() == 3 else (inner, columns),
    }
    right = torch.randn(*ranks[data.draw(st.sampled_from([1, 2, 3]))], generator=generator)
    grads = []
    for device in ("npu", "cpu"):
        leaves = [x.to(device).requires_grad_() for x in (left, right)]
        torch.matmul(*leaves).square().sum().backward()
        grads.append([leaf.grad.cpu() for leaf in leaves])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    offset=st.integers(0, 5),
)
def test_any_strided_view_is_seen_as_on_the_host(sizes, order, offset):
    dims = list(range(len(sizes)))
    order.shuffle(dims)
    total = offset
    for n in sizes:
        total += n * 40
    host = torch.arange(float(max(total, 300)))
    strides = [1 + 3 * d for d in dims]
    mine, theirs = (x.as_strided(sizes, strides, offset) for x in (host.npu(), host))
    assert torch.equal((mine + 1).cpu(), theirs + 1)
    assert torch.equal(mine.clone().cpu(), theirs)
