"""Masters in float32 on a CUDA device: their bits, their memory, and a captured graph that reads the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from npu_vlrl.config import OptimConfig
from npu_vlrl.learner.optimizer import master, new_optimizer, step_or_skip, stepped

SIZES = [(512, 256), (300,), (), (64, 3, 2, 14, 14)]


def make(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(size, generator=generator, device="cuda") * 0.02 for size in SIZES]
    return {str(number): nn.Parameter(tensor.bfloat16().to(dtype)) for number, tensor in enumerate(made)}


def backward(weights: dict[str, nn.Parameter], seed: int) -> list[Tensor]:
    """Gives each weight a gradient of noise that bfloat16 holds, and returns them in float32."""
    generator = torch.Generator("cuda").manual_seed(seed)
    slopes = [torch.randn(size, generator=generator, device="cuda").bfloat16() for size in SIZES]
    products = [(p * slope.to(p.dtype)).sum() for p, slope in zip(weights.values(), slopes, strict=True)]
    torch.stack(products).sum().backward()
    return [slope.float() for slope in slopes]


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor.grad for tensor in stepped(optimizer) if tensor.grad is not None]


def test_masters_step_as_float32_weights_do() -> None:
    """Bit by bit, with three backward passes a step, on the same fused kernel; the weights are rounded in place."""
    narrow, wide = make(torch.bfloat16), make(torch.float32)
    places = [p.data_ptr() for p in narrow.values()]
    optimizer, reference = new_optimizer(narrow, OptimConfig()), new_optimizer(wide, OptimConfig())
    for step in range(4):
        for number in range(3):
            backward(narrow, 10 * step + number)
            backward(wide, 10 * step + number)
        assert all(p.grad is None for p in narrow.values())
        assert all(torch.equal(a, b) for a, b in zip(gradients(optimizer), gradients(reference), strict=True))
        assert step_or_skip(optimizer, 1.0, 1e-6) == step_or_skip(reference, 1.0, 1e-6)
    assert all(torch.equal(master(narrow[name]), wide[name]) for name in wide)
    assert all(torch.equal(narrow[name], wide[name].bfloat16()) for name in wide)
    assert [p.data_ptr() for p in narrow.values()] == places
    start = make(torch.float32)
    assert not any(torch.equal(wide[name], start[name]) for name in wide)


def test_small_steps_are_lost_without_masters() -> None:
    learning, old = (nn.Parameter(torch.full((64,), 0.02, device="cuda").bfloat16()) for _ in range(2))
    start = learning.detach().clone()
    optimizer = new_optimizer({"w": learning}, OptimConfig())
    directly = torch.optim.AdamW([old], lr=1e-6, weight_decay=0.0, fused=True)
    for _ in range(200):
        learning.sum().backward()
        step_or_skip(optimizer, 10.0, 1e-6)
        old.sum().backward()
        directly.step()
        directly.zero_grad()
    expected = start.float() - 200 * 1e-6
    assert torch.allclose(master(learning), expected, rtol=0, atol=1e-6)
    assert torch.equal(learning, expected.bfloat16()) and not torch.equal(learning, start)
    assert torch.equal(old, start)


@pytest.mark.parametrize("slope", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(slope: float) -> None:
    weights = make(torch.bfloat16)
    optimizer = new_optimizer(weights, OptimConfig())
    backward(weights, 1)
    step_or_skip(optimizer, 1.0, 1e-3)
    moments = [t for state in optimizer.state.values() for t in state.values()]
    held = [t for p in weights.values() for t in (p, master(p))] + moments
    before = [t.detach().clone() for t in held]
    (weights["0"] * slope).sum().backward()
    assert step_or_skip(optimizer, 1.0, 1e-3) is None
    assert all(map(torch.equal, held, before))
    backward(weights, 2)
    assert step_or_skip(optimizer, 1.0, 1e-3) is not None
    assert not any(map(torch.equal, held, before))


def test_a_captured_graph_reads_the_new_weights() -> None:
    """As that of the engine does, which shares them."""
    weights = make(torch.bfloat16)
    optimizer = new_optimizer(weights, OptimConfig())
    x = torch.randn(8, 256, device="cuda").bfloat16()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        _ = x @ weights["0"].T  # the matrix library takes its memory outside of the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = x @ weights["0"].T
    graph.replay()
    first = y.clone()
    backward(weights, 3)
    step_or_skip(optimizer, 1.0, 1e-2)
    graph.replay()
    assert torch.allclose(y, x @ weights["0"].detach().T, rtol=1e-2, atol=1e-2)
    assert float((y - first).abs().max()) > 0.05  # so the line above would see old weights


def test_gradients_in_bfloat16_exist_for_one_weight_at_a_time() -> None:
    """16 layers of 4096 x 4096, 32 MiB each in bfloat16, 512 MiB together."""
    size, count = 4096, 16
    layers = {str(n): nn.Parameter(torch.randn(size, size, device="cuda").bfloat16() / 64) for n in range(count)}
    optimizer = new_optimizer(layers, OptimConfig())

    def pass_through() -> None:
        hidden = torch.ones(2, size, device="cuda").bfloat16()
        for layer in layers.values():
            hidden = hidden @ layer
        hidden.float().sum().backward()

    pass_through()  # the matrix library takes its memory
    step_or_skip(optimizer, 1.0, 1e-6)
    parameters = size * size * count
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        pass_through()
        peak = torch.cuda.max_memory_allocated() - before
        assert 4 * parameters <= peak < 4 * parameters + 3 * 2 * size * size
    held = sum(g.numel() * g.element_size() for g in gradients(optimizer))
    assert held == 4 * parameters
