"""The compiled part of vllm-ascend (`vllm_ascend_C`) on the stand-in: its allocator for sleep, a norm, adapters."""

from __future__ import annotations

import importlib.util

import pytest

from tests.host_cann.children import run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm_ascend") is None, reason="vllm-ascend is not in this environment"
)

START = """
from tests import host_cann
host_cann.start()
import torch, torch_npu
from tests.host_cann import counted
import vllm_ascend.vllm_ascend_C
torch.npu.set_device(0)
draw = lambda *shape, seed=0: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
"""

SLEEP = (
    START
    + """
from vllm_ascend.device_allocator.camem import CaMemAllocator, camem_available
assert camem_available
MIB = 1 << 20
free = lambda: torch.npu.mem_get_info()[0] // MIB
allocator = CaMemAllocator.get_instance()
with allocator.use_memory_pool(tag="weights"):
    weights = torch.arange(30 * MIB // 4, device="npu", dtype=torch.int32)
with allocator.use_memory_pool(tag="kv_cache"):
    cache = torch.ones(20 * MIB, dtype=torch.uint8, device="npu")
other = torch.full((MIB,), 5, dtype=torch.uint8, device="npu")
torch.npu.empty_cache()
expected, awake, address = weights.cpu(), free(), weights.data_ptr()
allocator.sleep(offload_tags=("weights",))
asleep = free()
assert asleep - awake >= 50, (awake, asleep)
allocator.wake_up(tags=["weights"])
assert 28 <= asleep - free() <= 34, (asleep, free())
assert weights.data_ptr() == address and torch.equal(weights.cpu(), expected)
allocator.wake_up(tags=["kv_cache"])
assert free() == awake, (free(), awake)
assert cache.sum().item() == 0  # discarded, as its tag was not offloaded
assert other.sum().item() == 5 * MIB
allocator.sleep(offload_tags=())  # the control: nothing is kept
allocator.wake_up()
assert not torch.equal(weights.cpu(), expected)
print("slept")
"""
)


def test_the_allocator_for_sleep_gives_memory_back_and_keeps_what_it_is_told_to() -> None:
    (child,) = run(SLEEP)
    assert "slept" in child.output and child.code == 0, child.output


OPERATORS = (
    START
    + """
def close(found, expected):
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=2e-2, atol=2e-2)

a, b, gamma, beta = (draw(*shape, seed=i).bfloat16() for i, shape in enumerate([(3, 8), (3, 8), (8,), (8,)]))
with counted() as count:
    y, rstd, x = torch.ops._C_ascend.npu_add_rms_norm_bias(a.npu(), b.npu(), gamma.npu(), beta.npu(), 1e-6)
assert count["aclnnAddRmsNormBias"] == 1
total = (a.double() + b.double())
close(x, total)
close(y, total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.double() + beta.double())

x, down, up = draw(5, 32).bfloat16(), draw(2, 1, 8, 32, seed=1).bfloat16(), draw(2, 1, 24, 8, seed=2).bfloat16()
base, which = draw(5, 64, seed=3).bfloat16(), [1, -1, 0, 1, 1]
narrow = torch.zeros(5, 8).npu()
indices = torch.tensor(which).npu()
from vllm_ascend.lora.lora_ops import bgmv_expand_slice, bgmv_shrink, sgmv_expand_slice, sgmv_shrink
wide = base.npu()
with counted() as count:
    bgmv_shrink(x.npu(), down.npu(), narrow, indices, 0.5)
    bgmv_expand_slice(narrow, up.npu(), wide, indices, 16, 24)
assert count["AdapterShrink"] == count["AdapterExpand"] == 1
expected = base.double()
for row, adapter in enumerate(which):
    if adapter >= 0:
        expected[row, 16:40] += up[adapter, 0].double() @ (down[adapter, 0].double() @ x[row].double() * 0.5)
close(wide, expected)
try:
    close(wide, base)  # the control: without adapters
except AssertionError:
    pass
else:
    raise SystemExit("the check cannot fail")

lengths, owners = torch.tensor([2, 3]).npu(), torch.tensor([1, 0]).npu()
narrow, wide = torch.zeros(5, 8).npu(), base.npu()
sgmv_shrink(x.npu(), down.npu(), narrow, None, lengths, owners, 2, 3, 5, 1.0)
sgmv_expand_slice(narrow, up.npu(), wide, None, lengths, owners, 2, 3, 5, 0, 24)
expected = base.double()
for row, adapter in enumerate([1, 1, 0, 0, 0]):
    expected[row, :24] += up[adapter, 0].double() @ (down[adapter, 0].double() @ x[row].double())
close(wide, expected)
try:
    bgmv_shrink(x.float().npu(), down.npu(), narrow, indices, 0.5)
except RuntimeError as error:
    assert "only support half and bf16" in str(error), error
    print("agreed")
"""
)


def test_its_operators_agree_with_plain_definitions_and_keep_their_own_checks() -> None:
    (child,) = run(OPERATORS)
    assert "agreed" in child.output and child.code == 0, child.output
