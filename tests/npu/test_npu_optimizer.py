"""Masters in float32 on the device: the same weights as on the CPU, by one operator a tensor, nothing copied back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from npu_vlrl.config import OptimConfig
from npu_vlrl.learner.optimizer import master, new_optimizer, step_or_skip
from tests.host_cann import counted

SIZES = [(4, 6), (5,), ()]


def trained(device: str) -> tuple[list[Tensor], dict[str, int], dict[str, int]]:
    """Weights and masters after three steps of two passes each, and what ran in the last pass and step."""
    generator = torch.Generator().manual_seed(0)

    def draw(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=generator).bfloat16().to(device)

    weights = {str(number): nn.Parameter(draw(size)) for number, size in enumerate(SIZES)}
    places = [p.data_ptr() for p in weights.values()]
    optimizer = new_optimizer(weights, OptimConfig(weight_decay=0.1))
    for _ in range(3):
        for _ in range(2):
            loss = torch.stack([(p * draw(tuple(p.shape))).sum() for p in weights.values()]).sum()
            with counted() as passed:
                loss.backward()
            assert all(p.grad is None for p in weights.values())
        assert {t.grad.dtype for p in weights.values() if (t := master(p)).grad is not None} == {torch.float32}
        with counted() as stepped:
            step_or_skip(optimizer, 1.0, 0.01)
    assert [p.data_ptr() for p in weights.values()] == places
    assert all(torch.equal(p, master(p).bfloat16()) for p in weights.values())
    return [t.detach().cpu() for p in weights.values() for t in (p, master(p))], dict(passed), dict(stepped)


def test_masters_step_on_the_device_as_on_the_host() -> None:
    host, _, _ = trained("cpu")
    found, passed, stepped = trained("npu")
    for got, expected in zip(found, host, strict=True):
        torch.testing.assert_close(got.float(), expected.float(), atol=1e-6, rtol=2**-8)
    assert stepped["aclnnApplyAdamWV2"] == 3 and stepped["aten::_foreach_copy_"] == 1
    assert stepped["aten::_local_scalar_dense"] == 2  # whether the norm is finite, and the norm
    assert passed["aten::add_"] == 3 and "aten::_local_scalar_dense" not in passed
    assert not [name for name in (*passed, *stepped) if name.startswith("fallback::")]
