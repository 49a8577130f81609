"""Devices, memory and faults of the stand-in, as torch_npu shows them."""

from __future__ import annotations

import ctypes
import json

import pytest
import torch
import torch_npu

from tests.host_cann import memory
from tests.host_cann.children import run

MIB = 1 << 20
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, INVALID = 1, 2, 3, 107000


def free_mib(device=0):
    return torch.npu.mem_get_info(device)[0] // MIB


@pytest.fixture(autouse=True)
def nothing_cached():
    torch.npu.empty_cache()
    yield
    torch.npu.empty_cache()


def test_memory_is_counted_for_each_device():
    torch.ones(1, device="npu:0"), torch.ones(1, device="npu:1")  # what a device needs to start is not counted
    torch.npu.empty_cache()
    before = [free_mib(0), free_mib(1)]
    x = torch.empty(63 * MIB, dtype=torch.uint8, device="npu:1")  # in whole segments of 2 MiB
    assert [free_mib(0), free_mib(1)] == [before[0], before[1] - 64]
    del x
    torch.npu.empty_cache()
    assert [free_mib(0), free_mib(1)] == before


def test_out_of_memory_is_the_real_error_and_passes():
    total = torch.npu.mem_get_info()[1]
    held = torch.empty(total // 2, dtype=torch.uint8, device="npu")
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(total // 2 + MIB, dtype=torch.uint8, device="npu")
    del held
    torch.npu.empty_cache()
    assert torch.empty(total // 2 + MIB, dtype=torch.uint8, device="npu").numel() == total // 2 + MIB


def test_freed_memory_is_found_again_between_what_is_held():
    """Segments of 30 MiB in a row; the middle ones are freed, and one of twice the size fits where they were."""
    held = [torch.empty(30 * MIB, dtype=torch.uint8, device="npu") for _ in range(5)]
    where = held[1].data_ptr()
    del held[1:3]
    torch.npu.empty_cache()
    assert torch.empty(60 * MIB, dtype=torch.uint8, device="npu").data_ptr() == where


def test_addresses_tell_their_device():
    for device in range(2):
        x = torch.ones(4, device=f"npu:{device}")
        assert memory.device_of(x.data_ptr(), 16) == device
    assert memory.device_of(torch.ones(4).data_ptr(), 16) == -1


@pytest.mark.parametrize(
    ("kind", "source", "target", "message"),
    [
        (HOST_TO_DEVICE, "npu", "npu", "the source of 16 bytes"),
        (DEVICE_TO_HOST, "npu", "npu", "the target of 16 bytes"),
        (DEVICE_TO_DEVICE, "cpu", "npu", "not in device memory"),
        (DEVICE_TO_DEVICE, "npu", "cpu", "not in device memory"),
    ],
)
def test_copies_of_the_wrong_kind_are_refused(kind, source, target, message):
    a, b = torch.ones(4, device=source), torch.ones(4, device=target)
    library = memory._library[0]
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    copy = library.aclrtMemcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert copy(b.data_ptr(), 16, a.data_ptr(), 16, kind) == INVALID
    assert message in library.aclGetRecentErrMsg().decode()
    assert copy(b.data_ptr(), 8, a.data_ptr(), 16, kind) == INVALID  # more than there is room for


def test_memory_is_freed_once():
    library = memory._library[0]
    address = ctypes.c_void_p()
    assert library.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(100), 0) == 0
    assert address.value % 512 == 0
    assert library.aclrtFree(address) == 0
    assert library.aclrtFree(address) == INVALID


def test_streams_and_events():
    stream = torch.npu.Stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with torch.npu.stream(stream):
        start.record()
        x = torch.ones(3, device="npu") + 1
        end.record()
    x.record_stream(torch.npu.current_stream())
    torch.npu.current_stream().wait_stream(stream)
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert x.tolist() == [2.0] * 3


def test_the_chip_and_a_device_that_does_not_exist():
    assert torch.npu.get_device_name(0) == "Ascend910B2"
    assert torch.npu.device_count() == 2
    with pytest.raises((RuntimeError, AssertionError)):
        torch.npu.set_device(2)


def test_what_has_no_stand_in_is_named():
    with pytest.raises(RuntimeError, match="the legacy operator Swish has no stand-in"):
        torch_npu.npu_silu(torch.ones(3, device="npu"))


SEEN = """
import ctypes, json
from tests.host_cann import build
acl = build.load()["libascendcl.so"]
acl.aclGetRecentErrMsg.restype = acl.aclrtGetSocName.restype = ctypes.c_char_p
count, free, total = ctypes.c_uint32(), ctypes.c_size_t(), ctypes.c_size_t()
codes = [acl.aclInit(None), acl.aclrtGetDeviceCount(ctypes.byref(count)), acl.aclrtSetDevice(0)]
message = acl.aclGetRecentErrMsg().decode()
if not codes[2]: acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total))
print(json.dumps([codes, count.value, total.value >> 20, acl.aclrtGetSocName().decode(), message]))
"""


def seen(**variables):
    """What a process sees with these variables set: error codes, devices, MiB, chip, message."""
    (child,) = run(SEEN, **variables)
    assert child.code == 0, child.output
    return json.loads(child.output)


@pytest.mark.parametrize(
    ("devices", "visible", "count"),
    [("8", "5,2,7", 3), ("4", "1,9,2", 1), ("4", "0,0,1", 1), ("2", "1", 1)],
)
def test_visible_devices(devices, visible, count):
    assert seen(HOST_CANN_DEVICES=devices, ASCEND_RT_VISIBLE_DEVICES=visible)[1] == count


def test_the_environment_sets_memory_and_chip():
    assert seen(HOST_CANN_MEMORY_MIB="300", HOST_CANN_SOC="Ascend910_9391")[:4] == [[0, 0, 0], 2, 300, "Ascend910_9391"]


NO_DRIVER, NO_SUCH_DEVICE = 507899, 107001


@pytest.mark.parametrize(
    ("variables", "codes", "message"),
    [
        ({"HOST_CANN_DRIVER": "absent"}, [NO_DRIVER] * 3, "there is no driver"),
        ({"ASCEND_RT_VISIBLE_DEVICES": ""}, [0, 0, NO_SUCH_DEVICE], "this process sees 0 device"),
        ({"HOST_CANN_DEVICES": "0"}, [0, 0, NO_SUCH_DEVICE], "this process sees 0 device"),
    ],
)
def test_machines_without_a_device(variables, codes, message):
    found = seen(**variables)
    assert found[:2] == [codes, 0]
    assert message in found[4]


def test_torch_npu_says_why_there_is_no_device():
    text = """if True:
    import torch, torch_npu
    assert not torch.npu.is_available() and torch.npu.device_count() == 0
    try: torch.ones(2, device="npu")
    except RuntimeError as error: print(error)
    """
    (child,) = run(text, HOST_CANN_DRIVER="absent")
    assert child.code == 0, child.output
    assert "there is no driver" in child.output


SEGMENTS = """
import torch, torch_npu
MIB = 1 << 20
torch.npu.set_device(0)
def free(): return torch.npu.mem_get_info()[0] // MIB
before = free()
held = [torch.full((8 * MIB,), i, dtype=torch.uint8, device="npu") for i in range(4)]
assert before - free() >= 32, free()
assert [x[-1].item() for x in held] == [0, 1, 2, 3]
del held
torch.npu.empty_cache()
assert free() == before, (free(), before)
try:
    torch.empty(400 * MIB, dtype=torch.uint8, device="npu")
    raise SystemExit("no error")
except torch.OutOfMemoryError:
    pass
assert torch.ones(3, device="npu:1").sum().item() == 3
"""


def test_expandable_segments():
    (child,) = run(SEGMENTS, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True", HOST_CANN_MEMORY_MIB="256")
    assert child.code == 0, child.output
