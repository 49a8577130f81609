"""The CUDA platform on a real GPU. Plain functions: they also run where pytest is not installed."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from npu_vlrl.hardware import HardwareError, collective, select
from npu_vlrl.hardware.cuda import CudaPlatform


def test_the_gpu_is_chosen_and_answers() -> None:
    os.environ.pop("NPU_VLRL_PLATFORM", None)
    gpu = select()
    assert gpu.name == "cuda" and gpu.missing() is None
    count = gpu.device_count()
    assert count == torch.cuda.device_count() >= 1
    gpu.set_device(0)
    assert gpu.device(0) == torch.device("cuda", 0) and gpu.device_name(0) in gpu.describe()
    assert set(gpu.versions()) == {"CUDA", "cuDNN", "NCCL", "NVIDIA driver"}
    try:
        gpu.set_device(count)
    except HardwareError as error:
        assert f"cuda device {count} is not there: {count} visible" in str(error)
    else:
        raise AssertionError("a device too many was accepted")


def test_memory_is_counted() -> None:
    gpu = CudaPlatform()
    gpu.set_device(0)
    torch.cuda.empty_cache()  # the block must not find room in what tests before left
    before = gpu.memory(0)
    block = torch.empty(256 << 20, dtype=torch.uint8, device=gpu.device())
    gpu.synchronize()
    after = gpu.memory(0)
    assert before.total == after.total == torch.cuda.get_device_properties(0).total_memory
    assert before.free - after.free >= 256 << 20
    assert gpu.peak_memory_bytes() >= block.nbytes


def test_random_numbers_repeat() -> None:
    gpu = CudaPlatform()
    state = gpu.rng_state()
    first = torch.rand(64, device=gpu.device())
    gpu.set_rng_state(state)
    assert torch.equal(torch.rand(64, device=gpu.device()), first)
    assert not torch.equal(torch.rand(64, device=gpu.device()), first)


def test_streams_are_ordered_by_events() -> None:
    gpu = CudaPlatform()
    second, first = gpu.stream(), torch.cuda.current_stream()
    big = torch.ones(4096, 4096, device=gpu.device())
    for _ in range(20):
        big = big @ big / 4096
    second.wait_event(first.record_event())
    with gpu.on(second):
        assert torch.cuda.current_stream() == second
        doubled = big * 2
    first.wait_event(second.record_event())
    assert doubled.sum().item() == 2 * 4096 * 4096


def test_physical_numbers_under_a_visible_devices_variable() -> None:
    last = torch.cuda.device_count() - 1
    code = (
        "from npu_vlrl.hardware import select; g = select(); g.set_device(0); "
        "print(g.device_count(), g.physical_id(0), g.device_name(0))"
    )
    for value, found in ((str(last), f"1 {last} {torch.cuda.get_device_name(last)}"),):
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": value, "NPU_VLRL_PLATFORM": "cuda"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == found
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NPU_VLRL_PLATFORM": "cuda"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "torch sees no CUDA device" in done.stderr


def test_two_processes_add_up_by_nccl_or_by_gloo_on_one_gpu() -> None:
    gpu = CudaPlatform()
    assert collective.backend(gpu) == ("cpu:gloo,cuda:nccl" if gpu.device_count() > 1 else "gloo")
    collective.check(gpu, timeout_s=120)
