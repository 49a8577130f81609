"""Collectives of torch_npu between processes on the stand-in."""

from __future__ import annotations

import os
import signal

import pytest

from tests.host_cann.children import run

START = """
import os, torch, torch_npu, torch.distributed as dist
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
def on_device(values, kind=torch.float32): return torch.tensor(values, dtype=kind, device="npu")
def same(got, want): assert got.tolist() == want, (rank, got.tolist(), want)
"""

ALL = """
mine = on_device([rank + 1.0] * 3)
all_ranks = range(1, ranks + 1)
x = mine.clone(); dist.all_reduce(x); same(x, [float(sum(all_ranks))] * 3)
x = mine.clone(); dist.all_reduce(x, op=dist.ReduceOp.MAX); same(x, [float(ranks)] * 3)
x = mine.clone(); dist.all_reduce(x, op=dist.ReduceOp.MIN); same(x, [1.0] * 3)
x = mine.clone(); dist.all_reduce(x, op=dist.ReduceOp.PRODUCT); same(x, [float(__import__("math").prod(all_ranks))] * 3)
for kind in (torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16):
    x = mine.to(kind); dist.all_reduce(x); same(x, [sum(all_ranks)] * 3)
x = on_device([0.1 + rank], torch.bfloat16); dist.all_reduce(x)  # rounded to the nearest after each addition
want = torch.tensor(0.1).bfloat16()
for other in range(1, ranks): want = want + torch.tensor(0.1 + other).bfloat16()
same(x, [want.item()])
for root in range(ranks):
    x = mine.clone(); dist.broadcast(x, root); same(x, [root + 1.0] * 3)
    x = mine.clone(); dist.reduce(x, root); rank != root or same(x, [float(sum(all_ranks))] * 3)
for kind in (torch.uint8, torch.bool, torch.float64, torch.int16):
    x = on_device([rank == 0] * 3, kind); dist.broadcast(x, 0); same(x, [True] * 3)
big = torch.full((700_000,), float(rank), device="npu"); dist.broadcast(big, ranks - 1)  # several chunks
assert big.unique().tolist() == [ranks - 1.0]
out = torch.empty(3 * ranks, device="npu"); dist.all_gather_into_tensor(out, mine)
same(out, [float(r) for r in all_ranks for _ in range(3)])
out = [torch.empty(3, device="npu") for _ in range(ranks)]; dist.all_gather(out, mine)
same(torch.stack(out)[:, 0], list(all_ranks))
numbers = torch.arange(2.0 * ranks, device="npu")
out = torch.empty(2, device="npu"); dist.reduce_scatter_tensor(out, numbers * (rank + 1))
same(out, [2.0 * rank * sum(all_ranks), (2.0 * rank + 1) * sum(all_ranks)])
x = torch.empty(1, device="npu")
dist.scatter(x, [on_device([float(r)]) for r in range(ranks)] if rank == 0 else None, src=0); same(x, [float(rank)])
out = torch.empty(ranks, device="npu"); dist.all_to_all_single(out, numbers[:ranks] + 10 * rank)
same(out, [10.0 * r + rank for r in range(ranks)])
give, take = [r + 1 for r in range(ranks)], [rank + 1] * ranks  # rank r gets r + 1 elements from each
out = torch.empty(sum(take), device="npu")
dist.all_to_all_single(out, torch.full((sum(give),), float(rank), device="npu"), take, give)
same(out, [float(r) for r in range(ranks) for _ in range(rank + 1)])
after, before = (rank + 1) % ranks, (rank - 1) % ranks
x = torch.empty(200_000, device="npu")
if rank % 2 == 0: dist.send(torch.full((200_000,), float(rank), device="npu"), after); dist.recv(x, before)
else: dist.recv(x, before); dist.send(torch.full((200_000,), float(rank), device="npu"), after)
assert x.unique().tolist() == [float(before)]
x = torch.empty(3, device="npu")
operations = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, x, before)]
for work in dist.batch_isend_irecv(operations): work.wait()
same(x, [before + 1.0] * 3)
things = [{"from": 0}] if rank == 0 else [None]; dist.broadcast_object_list(things, 0); assert things == [{"from": 0}]
try: same(x, [-1.0] * 3)
except AssertionError: pass
else: raise SystemExit("`same` cannot fail")
group = dist.new_group([0, 1])
if rank < 2: x = mine.clone(); dist.all_reduce(x, group=group); same(x, [3.0] * 3)
dist.barrier()
dist.destroy_process_group()
"""

MODEL = """
import copy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).npu()
plain = copy.deepcopy(model)
replicated = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), device_ids=[rank])
mesh = init_device_mesh("npu", (2,))
fully_shard(model[0], mesh=mesh); fully_shard(model, mesh=mesh)
models = (plain, model, replicated)
optimisers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
data = torch.randn(6, 8, generator=torch.Generator().manual_seed(5)).npu()
for _ in range(3):
    for m, o in zip(models, optimisers):
        m(data if m is plain else data[rank * 3 : rank * 3 + 3]).pow(2).mean().backward(); o.step(); o.zero_grad()
for a, b, c in zip(plain.parameters(), model.parameters(), replicated.parameters()):
    torch.testing.assert_close(b.full_tensor().cpu(), a.cpu(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(c.cpu(), a.cpu(), rtol=1e-5, atol=1e-6)
print("done: model", flush=True)
"""

FAULTS = """
def refused(call, *words):
    try: call(); torch.npu.synchronize()
    except Exception as error: text = str(error)
    else: raise SystemExit("no error for " + words[0])
    for word in words: assert word in text, (word, text)
size = torch.ones(4 + rank, device="npu")
refused(lambda: dist.all_reduce(size), "rank 0 is in HcclAllReduce of 4 fp32, sum, rank 1 in HcclAllReduce of 5 fp32")
kind = torch.ones(4, device="npu", dtype=torch.float32 if rank else torch.bfloat16)
refused(lambda: dist.all_reduce(kind), "of 4 bfp16", "of 4 fp32")
x = torch.ones(4, device="npu")
refused(lambda: dist.broadcast(x, rank), "root 0", "root 1")
refused(lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.MIN), "max", "min")
refused(lambda: dist.broadcast(x, 0) if rank else dist.all_reduce(x), "HcclAllReduce of 4", "HcclBroadcast of 4")
refused(lambda: dist.all_reduce(x.double()), "Unsupported data type")  # by torch_npu
if rank == 0: dist.send(x, 1)
else: refused(lambda: dist.recv(torch.ones(5, device="npu"), 0), "rank 0 sends 4 fp32, rank 1 receives 5 fp32")
print("done: faults", flush=True)
"""

KILLED = """
import signal, time
dist.all_reduce(torch.ones(2, device="npu"))
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
os.environ["HCCL_EXEC_TIMEOUT"] = "2"
start = time.monotonic()
x = torch.ones(2, device="npu")
refused(lambda: dist.all_reduce(x), "error code is 9", "no answer from the other ranks within 2 s")
assert 1.9 < time.monotonic() - start < 30
print("done: killed", flush=True)
os._exit(0)
"""


def memory_files():
    return {name for name in os.listdir("/dev/shm") if "hccl" in name}


@pytest.fixture(scope="module")
def pair():
    """Two ranks that do all of the above and end with the death of one."""
    return run(START + MODEL + FAULTS + KILLED, 2)


def test_collectives_of_three():
    for child in run(START + ALL, 3, HOST_CANN_DEVICES="3"):
        assert child.code == 0, child.output
    assert not memory_files()


def test_sharded_and_replicated_training_equal_plain_training(pair):
    assert all("done: model" in child.output for child in pair), pair


def test_ranks_that_disagree_are_told_how(pair):
    assert all("done: faults" in child.output for child in pair), pair


def test_a_killed_peer_is_a_timeout_and_leaves_nothing_behind(pair):
    survivor, killed = pair
    assert killed.code == -signal.SIGKILL, killed.output
    assert survivor.code == 0, survivor.output
    assert "done: killed" in survivor.output
    assert not memory_files()


LIBRARY = """
import ctypes, time
from tests.host_cann import build
libraries = build.load()
hccl, acl = libraries["libhccl.so"], libraries["libascendcl.so"]
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
acl.aclrtSetDevice(0)
def refused(code, want, word):
    assert code == want and word in acl.aclGetRecentErrMsg().decode(), (code, acl.aclGetRecentErrMsg())
"""

ALONE = """
info, made = ctypes.create_string_buffer(4108), ctypes.c_void_p()
assert hccl.HcclGetRootInfo(info) == 0
start = time.monotonic()
refused(hccl.HcclCommInitRootInfo(2, info, 0, ctypes.byref(made)), 9, "within 1 s")  # HCCL_E_TIMEOUT
assert time.monotonic() - start > 0.9
refused(hccl.HcclCommInitRootInfo(17, info, 0, ctypes.byref(made)), 1, "at most 16 ranks")  # HCCL_E_PARA
info.value = b"/proc/1/fd/999"
refused(hccl.HcclCommInitRootInfo(2, info, 0, ctypes.byref(made)), 8, "has ended")  # HCCL_E_SYSCALL
"""

TYPES = """
info, comm = ctypes.create_string_buffer(4108), ctypes.c_void_p()
assert hccl.HcclGetRootInfo(info) == 0 and hccl.HcclCommInitRootInfo(1, info, 0, ctypes.byref(comm)) == 0
device = ctypes.c_void_p()
assert acl.aclrtMalloc(ctypes.byref(device), ctypes.c_size_t(64), 0) == 0
host = ctypes.create_string_buffer(64)
FP64, FP8, FP32, SUM, AVG = 10, 15, 4, 0, 4
def reduce(buffer, kind, op): return hccl.HcclAllReduce(buffer, buffer, ctypes.c_uint64(4), kind, op, comm, None)
assert reduce(device, FP32, SUM) == 0
refused(reduce(device, FP64, SUM), 5, "does not reduce fp64")  # HCCL_E_NOT_SUPPORT
refused(reduce(device, FP8, SUM), 5, "data type 15")
refused(reduce(device, FP32, AVG), 5, "reduction 4")
refused(reduce(host, FP32, SUM), 1, "not in device memory")
refused(hccl.HcclSend(device, ctypes.c_uint64(4), FP32, 1, comm, None), 1, "rank 1 of 1 does not exist")
"""


@pytest.mark.parametrize("text", [ALONE, TYPES])
def test_calls_that_the_library_refuses(text):
    (child,) = run(LIBRARY + text, HCCL_CONNECT_TIMEOUT="1")
    assert child.code == 0, child.output


def test_a_failing_child_is_noticed():
    assert [child.code for child in run("raise SystemExit(3)", 2)] == [3, 3]
