"""Device memory that several processes see: AscendCL's keys, and tensors that torch_npu sends by them."""

from __future__ import annotations

import ctypes
import json
import os
import pickle

import pytest
import torch
from torch.multiprocessing import reductions

from tests.host_cann import memory
from tests.host_cann.children import run

INVALID, KEY_BYTES, ANY_PROCESS, PEER_ACCESS = 107000, 65, 1, 1


class Shared:
    """8 KiB on device 0: the bytes 0, 1, 2, … The key is of what comes after the first 512 bytes."""

    def __init__(self, flags: int = ANY_PROCESS) -> None:
        self.library = memory.library()
        torch.npu.set_device(0)
        self.address, self.key = ctypes.c_void_p(), ctypes.create_string_buffer(KEY_BYTES)
        assert self.library.aclrtMalloc(ctypes.byref(self.address), ctypes.c_size_t(8192), 0) == 0
        self.bytes = memory.at(0, self.address.value, torch.uint8, [8192], [1])
        self.bytes.copy_(torch.arange(8192) % 251)
        assert self.export(self.address.value + 512, 7000, flags) == 0

    def export(self, address: int, size: int, flags: int = ANY_PROCESS, key_bytes: int = KEY_BYTES) -> int:
        export = self.library.aclrtIpcMemGetExportKey
        export.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64)
        return export(address, size, self.key, key_bytes, flags)

    def close(self) -> int:
        return self.library.aclrtIpcMemClose(self.key)

    def free(self) -> int:
        return self.library.aclrtFree(self.address)


@pytest.fixture
def shared():
    made = Shared()
    yield made
    made.close(), made.free()


def why() -> str:
    memory.library().aclGetRecentErrMsg.restype = ctypes.c_char_p
    return memory.library().aclGetRecentErrMsg().decode()


OPEN = """
import ctypes, json, os
from tests.host_cann import build
acl = build.load()["libascendcl.so"]
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
acl.aclrtSetDevice(int(os.environ.get("ON", "0")))
address, key = ctypes.c_void_p(), os.environ["KEY"].encode()
open_it = acl.aclrtIpcMemImportByKey
open_it.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64)
flags = int(os.environ.get("FLAGS", "1"))
code, found = open_it(ctypes.byref(address), key, flags), None
message = acl.aclGetRecentErrMsg().decode()
if not code:
    found = list(ctypes.string_at(address.value, 3))
    ctypes.memset(address.value + 1, 77, 1)
    again = open_it(ctypes.byref(ctypes.c_void_p()), key, flags)
    device = acl.host_cann_device_of(ctypes.c_void_p(address.value), ctypes.c_size_t(7000))
    closed = [acl.aclrtIpcMemClose(key), acl.aclrtIpcMemClose(key)]
    gone = ctypes.string_at(address.value, 3) == bytes(3)
    found = [found, again, device, closed, gone]
print(json.dumps([code, message, found]))
"""


def opened(key: bytes, **variables: str):
    """What another process gets for a key: code, message, and what it saw."""
    (child,) = run(OPEN, KEY=key.decode(), **variables)
    assert child.code == 0, child.output
    return json.loads(child.output)


def test_another_process_sees_the_same_bytes_and_closes_once(shared):
    code, _, found = opened(shared.key.value)
    assert code == 0
    assert found == [[512 % 251, 513 % 251, 514 % 251], INVALID, 0, [0, INVALID], True]
    assert shared.bytes[513] == 77 and shared.bytes[512] == 512 % 251  # what it wrote is here
    assert opened(shared.key.value)[0] == 0  # the key is still good


def test_memory_of_a_peer_needs_access_to_peers(shared):
    code, message, _ = opened(shared.key.value, ON="1", FLAGS="0")
    assert code == INVALID and "access to peers was not asked for" in message
    code, _, found = opened(shared.key.value, ON="1")
    assert code == 0 and found[2] == 1
    # the same device of the machine under another number is no peer
    assert opened(shared.key.value, FLAGS="0", ASCEND_RT_VISIBLE_DEVICES="0")[0] == 0
    assert "on another device" in opened(shared.key.value, FLAGS="0", ASCEND_RT_VISIBLE_DEVICES="1")[1]


def test_keys_that_open_nothing(shared):
    good = shared.key.value
    dead = good.replace(str(os.getpid()).encode(), b"4194303", 1)
    other = good[:-1] + (b"0" if good[-1:] != b"0" else b"1")
    for key, reason in ((b"abc", "this is no key"), (dead, "its process has ended"), (other, "it is not shared")):
        code, message, _ = opened(key)
        assert code == INVALID and reason in message, message
    address = ctypes.c_void_p()
    assert shared.library.aclrtIpcMemImportByKey(ctypes.byref(address), shared.key, ctypes.c_uint64(0)) == INVALID
    assert "cannot open what it shares itself" in why()


def test_what_is_closed_or_freed_is_refused():
    shared = Shared()
    assert shared.free() == INVALID and "aclrtIpcMemClose comes before aclrtFree" in why()
    assert shared.close() == 0 and shared.close() == INVALID
    assert "it is not shared, or not any more" in opened(shared.key.value)[1]
    assert shared.free() == 0
    assert shared.export(shared.address.value, 100) == INVALID and "not memory from aclrtMalloc" in why()


def test_what_cannot_be_exported(shared):
    start = shared.address.value
    for address, size, reason in (
        (start, 8193, "not memory from aclrtMalloc"),
        (start, 0, "not memory from aclrtMalloc"),
        (torch.ones(4).data_ptr(), 16, "not memory from aclrtMalloc"),
    ):
        assert shared.export(address, size) == INVALID and reason in why()
    assert shared.export(start, 16, key_bytes=64) == INVALID and "a key has 65 bytes" in why()


def test_only_named_processes_open_without_the_flag():
    shared = Shared(flags=0)
    assert "was not named by aclrtIpcMemSetImportPid" in opened(shared.key.value)[1]
    named = (ctypes.c_int32 * 1)(os.getpid())
    assert shared.library.aclrtIpcMemSetImportPid(shared.key, named, ctypes.c_size_t(1)) == 0
    assert "was not named" in opened(shared.key.value)[1]  # another one was
    assert shared.library.aclrtIpcMemSetImportPid(b"abc", named, ctypes.c_size_t(1)) == INVALID
    shared.close(), shared.free()


REBUILD = """
import os, pickle
from tests import host_cann
host_cann.start()
import torch
torch.npu.set_device(0)
with open(os.environ["SENT"], "rb") as file:
    rebuild, arguments = pickle.load(file)
tensor = rebuild(*arguments)
assert tensor.device == torch.device("npu:0") and tensor.shape == (50, 40), tensor
assert torch.equal(tensor.cpu(), torch.arange(2000.0).view(50, 40))
tensor[0, 0] = -1
"""


def test_a_tensor_goes_to_another_process(tmp_path):
    tensor = torch.arange(2000.0).view(50, 40).npu()
    (tmp_path / "sent").write_bytes(pickle.dumps(reductions.reduce_tensor(tensor)))
    (child,) = run(REBUILD, SENT=str(tmp_path / "sent"))
    assert child.code == 0, child.output
    assert tensor[0, 0].item() == -1
    (control,) = run(REBUILD, SENT=str(tmp_path / "sent"))  # the check notices other bytes
    assert control.code != 0 and "AssertionError" in control.output
