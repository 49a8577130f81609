"""The NPU platform on the real torch_npu: each reason why it cannot be used, and what it answers where it can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npu_vlrl import kernels
from npu_vlrl.hardware import HardwareError, select
from npu_vlrl.hardware.base import GraphCapture
from npu_vlrl.hardware.npu import NpuPlatform
from npu_vlrl.kernels.graph_capture import can_capture
from tests.host_cann import environment
from tests.support.captures import failing, frozen, right

ROOT = Path(__file__).parents[2]

REPORT = (
    "from npu_vlrl.hardware import PLATFORMS, select; print(PLATFORMS['npu']().missing()); print(select().describe())"
)


def python(code: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that has no stand-in unless `variables` bring it."""
    bare = {
        k: v for k, v in os.environ.items() if not k.startswith(("ASCEND", "HOST_CANN", "NPU_VLRL", "TORCH_DEVICE"))
    }
    env = {**bare, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, check=False)


def said(variables: dict[str, str]) -> list[str]:
    """[why there is no NPU, or None; the platform that was chosen]"""
    done = python(REPORT, variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torch_npu_without_cann() -> None:
    why, chosen = said({})
    assert why.startswith("there is no Ascend driver or device (no /dev/davinci") and chosen.startswith("CPU, ")


def test_npu_vlrl_before_torch_saves_the_import_of_torch() -> None:
    assert python("import npu_vlrl, torch; print(torch.ones(2).sum().item())", {}).stdout == "2.0\n"
    refused = python("import torch, npu_vlrl", {})
    assert refused.returncode == 1 and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in refused.stderr


@pytest.mark.parametrize("first", ["model.load", "cli, npu_vlrl.train_loop, npu_vlrl.sync.weights"])
def test_modules_import_without_cann(first: str) -> None:
    """transformers would import torch_npu, and fail with it."""
    done = python(f"import npu_vlrl.{first}; print('fine')", {})
    assert done.stdout == "fine\n", done.stderr


def test_cann_without_a_device() -> None:
    why, chosen = said(environment(devices=0))
    assert why.startswith("there is no Ascend driver or device") and chosen.startswith("CPU, ")


def test_cann_without_a_driver() -> None:
    why, chosen = said({**environment(), "HOST_CANN_DRIVER": "absent"})
    assert why.startswith("there is no Ascend driver or device") and chosen.startswith("CPU, ")


def test_a_pair_that_does_not_fit_is_not_even_imported(tmp_path: Path) -> None:
    folder = tmp_path / "torch_npu-2.11.0rc1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.11.0rc1\n")
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    done = python("import sys\n" + REPORT + "\nprint(sys.modules['torch_npu'])", variables)
    why, chosen, module = done.stdout.splitlines()
    assert why.startswith(f"torch_npu 2.11.0rc1 needs torch 2.11.0, and torch {torch.__version__.partition('+')[0]}")
    assert chosen.startswith("CPU, ") and module == "None"


@pytest.mark.parametrize(
    ("visible", "why", "count"),
    [
        ("1", "None", 1),
        ("", "ASCEND_RT_VISIBLE_DEVICES is empty, which hides every NPU", 0),
        ("7", "ASCEND_RT_VISIBLE_DEVICES=7 names 1 NPUs, but only 0 of them can be found", 0),
        ("0,7", "ASCEND_RT_VISIBLE_DEVICES=0,7 names 2 NPUs, but only 1 of them can be found", 0),
        ("x", "ASCEND_RT_VISIBLE_DEVICES=x is not a list of device numbers", 0),
    ],
)
def test_visible_devices(visible: str, why: str, count: int) -> None:
    found, chosen = said({**environment(devices=2), "ASCEND_RT_VISIBLE_DEVICES": visible})
    assert found.startswith(why)
    assert chosen.startswith(f"{count} x Ascend" if count else "CPU, ")


def test_logical_and_physical_numbers() -> None:
    code = (
        "import torch; from npu_vlrl.hardware import select; p = select(); p.set_device(1)\n"
        "print(p.device_count(), p.physical_id(0), p.physical_id(1), torch.npu.current_device(), p.device(1))"
    )
    done = python(code, {**environment(devices=8), "ASCEND_RT_VISIBLE_DEVICES": "2,5"})
    assert done.stdout == "2 2 5 1 npu:1\n", done.stderr


def test_what_shell_scripts_read_is_nothing_but_that() -> None:
    variables = {**environment(devices=2), "NPU_VLRL_PLATFORM": "npu"}
    code = (
        "from npu_vlrl.hardware.__main__ import main; main(['environment'])\n"
        "from npu_vlrl.hardware import select; print(select().device_count())"
    )
    *lines, count = python(code, variables).stdout.splitlines()
    assert [line.split("=")[0] for line in lines] == [f"export {name}" for name in NpuPlatform.launch_environment]
    assert count == "2"


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> NpuPlatform:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "npu")
    platform = select()
    assert isinstance(platform, NpuPlatform)
    platform.set_device(0)
    return platform


def test_devices(npu: NpuPlatform) -> None:
    assert (npu.device_count(), npu.device(1), npu.device_name(1)) == (2, torch.device("npu", 1), "Ascend910B2")
    peak = npu.peak()
    assert peak is not None and peak.flops == 24 * 8192 * 1.8e9
    assert torch.ones(3, device=npu.device(1)).sum().item() == 3
    with pytest.raises(HardwareError, match=r"npu device 2 is not there: 2 visible; .*ASCEND_RT_VISIBLE_DEVICES"):
        npu.set_device(2)


def test_a_device_in_error_is_named(npu: NpuPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> None:
        raise RuntimeError("SetDevice: error code is 507899\n[ERROR] more of it")

    monkeypatch.setattr(torch.npu, "set_device", broken)
    with pytest.raises(HardwareError) as error:
        npu.set_device(1)
    assert str(error.value) == (
        "npu device 1 (physical 1) does not answer: SetDevice: error code is 507899; look at its state with npu-smi "
        "info, and reset it or leave it out with ASCEND_RT_VISIBLE_DEVICES"
    )


def test_memory_is_counted(npu: NpuPlatform) -> None:
    before = npu.memory()
    block = torch.ones(64 << 20, dtype=torch.uint8, device=npu.device())
    npu.synchronize()
    after = npu.memory()
    assert before.total == after.total and before.free - after.free >= 64 << 20
    assert npu.peak_memory_bytes() >= block.nbytes


def test_what_is_shared_is_not_of_segments_that_grow() -> None:
    """The real allocator takes both settings."""
    code = (
        "import torch; from npu_vlrl.hardware import select; p = select(); p.set_device(0)\n"
        "from npu_vlrl.engines.vllm.buckets import shared_bucket\n"
        "told, tell = [], torch.npu.memory._set_allocator_settings\n"
        "torch.npu.memory._set_allocator_settings = lambda text: (told.append(text), tell(text))\n"
        "print(len(shared_bucket(64, p.device())), *told)\n"
        "print(next(p._sleep_problems(), None))"
    )
    variables = {**environment(), "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    done = python(code, variables)
    assert done.stdout.splitlines() == [
        "64 expandable_segments:False expandable_segments:True",
        "rollout.sleep: vLLM cannot give memory back with PYTORCH_NPU_ALLOC_CONF=expandable_segments:True; set "
        "PYTORCH_NPU_ALLOC_CONF= (empty) before the command",
    ], done.stderr
    empty = python(code, {**variables, "PYTORCH_NPU_ALLOC_CONF": "", "VLLM_ASCEND_ENABLE_NZ": "0"})  # the remedy
    assert empty.stdout == "64\nNone\n", empty.stderr


def test_memory_of_a_small_device() -> None:
    code = (
        "import torch; from npu_vlrl.hardware import select; p = select(); print(p.memory().total >> 20)\n"
        "try: torch.empty(512 << 20, dtype=torch.uint8, device=p.device())\n"
        "except torch.OutOfMemoryError as error: print('NPU out of memory' in str(error))"
    )
    assert python(code, environment(devices=1, memory_mib=256)).stdout == "256\nTrue\n"


def test_memory_is_that_of_the_device_asked_about(npu: NpuPlatform) -> None:
    before = npu.memory(0).free, npu.memory(1).free
    held = torch.empty(64 << 20, dtype=torch.uint8, device="npu:1")
    assert npu.memory(0).free == before[0] and npu.memory(1).free <= before[1] - held.nbytes
    assert torch.npu.current_device() == 0
    del held
    torch.npu.empty_cache()


def test_random_numbers_repeat(npu: NpuPlatform) -> None:
    state = npu.rng_state()
    assert state.dtype == torch.uint8 and state.ndim == 1
    torch.npu.manual_seed(5)
    assert not torch.equal(npu.rng_state(), state)
    npu.set_rng_state(state)
    assert torch.equal(npu.rng_state(), state)


def test_streams(npu: NpuPlatform) -> None:
    second, first = npu.stream(), torch.accelerator.current_stream()
    numbers = torch.arange(5.0, device=npu.device())
    second.wait_event(first.record_event())
    with npu.on(second):
        assert torch.npu.current_stream() == second
        doubled = numbers * 2
    assert torch.npu.current_stream() != second
    first.wait_event(second.record_event())
    assert doubled.tolist() == [0, 2, 4, 6, 8]


def test_versions(npu: NpuPlatform) -> None:
    versions = npu.versions()
    assert list(versions) == ["CANN", "Ascend driver"]
    assert all(versions.values())


def test_nothing_is_recorded_where_cann_cannot(npu: NpuPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has no graphs: every step is launched anew, and the device works on after the attempt."""
    assert npu.graph_capture() is None
    assert (torch.arange(4, device=npu.device()) * 2).sum().item() == 12
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    monkeypatch.setattr(NpuPlatform, "api", lambda _: pytest.fail("asked, although this queue forbids graphs"))
    assert npu.graph_capture() is None


@pytest.mark.parametrize(("capture", "used"), [(right, True), (frozen, False), (failing, False)])
def test_the_attention_of_decoding_is_tried_before_it_is_recorded(
    npu: NpuPlatform, capture: GraphCapture, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What op-plugin says of its fused attention and graphs differs between versions. The operator is the real one."""
    monkeypatch.setattr(npu, "graph_capture", lambda: capture)
    called: list[str] = []
    name = "npu_fused_infer_attention_score"
    fused = getattr(torch.ops.npu, name)
    monkeypatch.setattr(torch.ops.npu, name, lambda *a, **k: called.append("it") or fused(*a, **k))
    kernels.use("npu")
    try:
        assert can_capture(npu, npu.device(), torch.bfloat16) is used
    finally:
        kernels.use("reference")
    assert called or capture is failing
