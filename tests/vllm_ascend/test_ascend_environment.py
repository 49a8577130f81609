"""What the project relies on in vllm-ascend, and what it says where the environment does not suit."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from vllm_ascend.device_allocator.camem import CaMemAllocator
from vllm_ascend.envs import env_variables
from vllm_ascend.platform import NPUPlatform
from vllm_ascend.worker.worker import NPUWorker

from npu_vlrl.cli import main
from npu_vlrl.engines.vllm.worker import WeightTaker
from npu_vlrl.hardware import npu
from npu_vlrl.hardware.npu import NpuPlatform
from tests.support.ranks import ROOT


def test_vllm_runs_on_its_platform() -> None:
    assert NPUPlatform.ray_device_key == NpuPlatform.ray_resource
    assert NPUPlatform.device_control_env_var == NpuPlatform.visible_devices_variable


def test_what_is_added_to_its_worker_hides_nothing() -> None:
    ours = {name for name in vars(WeightTaker) if not name.startswith("_")}
    assert ours == {"set_logprobs_mode", "take_weights"}
    assert not [name for name in ours if hasattr(NPUWorker, name)]
    assert hasattr(NPUWorker, "get_model")  # the check can fail


def test_it_does_not_sleep_with_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the engine refuses that by name before models load."""
    name, settings = "PYTORCH_NPU_ALLOC_CONF", NpuPlatform.launch_environment["PYTORCH_NPU_ALLOC_CONF"].value
    monkeypatch.setenv(name, settings)
    with pytest.raises(AssertionError, match="Expandable segments"):
        CaMemAllocator()
    assert f"{name}={settings}" in "".join(NpuPlatform()._sleep_problems())
    monkeypatch.setenv(name, "")
    CaMemAllocator()
    assert not list(NpuPlatform()._sleep_problems())


def test_it_wakes_no_weights_in_a_private_format(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env_variables[npu.PRIVATE_FORMAT]() == int(NpuPlatform.launch_environment[npu.PRIVATE_FORMAT].value)
    assert "weight_nz_mode" in inspect.getsource(NPUWorker.wake_up)
    monkeypatch.delenv(npu.PRIVATE_FORMAT)
    assert env_variables[npu.PRIVATE_FORMAT]() == 1
    assert "VLLM_ASCEND_ENABLE_NZ=1; set it to 0 before the command" in "".join(NpuPlatform()._sleep_problems())


def test_an_environment_that_cannot_sample_with_vllm_says_so_before_models_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there: dict[str, str | None] = {"vllm-ascend": None, "vllm": None}
    really = npu._installed
    monkeypatch.setattr(npu, "_installed", lambda package: there[package] if package in there else really(package))
    words = ["--config", str(ROOT / "configs" / "photo_tiny.yaml"), "--run-dir", str(tmp_path), "rollout.engine=vllm"]

    def refused() -> str:
        assert main(["train", *words]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert refused() == (
        "npu-vlrl: rollout.engine=vllm needs vllm and vllm-ascend in this environment; run launch/install_npu.sh, or "
        "set rollout.engine=inprocess"
    )
    there |= {"vllm": "0.32.0+empty", "vllm-ascend": "0.23.0rc1"}
    assert refused() == (
        "npu-vlrl: rollout.engine=vllm finds vllm 0.32.0+empty beside vllm-ascend 0.23.0rc1, and both must be of one "
        "release; install vllm 0.23.0 (launch/install_npu.sh builds it for no device), or set rollout.engine=inprocess"
    )
    there["vllm"] = "0.23.0+empty"
    assert refused() == (
        "npu-vlrl: rollout.engine=vllm computes in 16 bits on NPUs, whose attention for inference takes no float32; "
        "set model.dtype=bfloat16, or rollout.engine=inprocess"
    )
