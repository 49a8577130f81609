"""`npu-vlrl estimate`: what it says, what it refuses, and that the ready configurations fit the devices they name."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from npu_vlrl.config import load_config
from npu_vlrl.estimate.report import estimate, named_device
from npu_vlrl.estimate.workload import largest_episode
from npu_vlrl.hardware import HardwareError, published
from tests.support.program import program

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
READY = ("--config", CONFIGS / "tasks/geo3k.yaml", "--config", CONFIGS / "models/qwen2_5_vl_3b.yaml")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")


def names(folder: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / folder).glob("*.yaml"))


@pytest.mark.parametrize(("model", "devices"), list(product(names("models"), names("devices"))))
def test_ready_configurations_fit(model: str, devices: str) -> None:
    assert names("tasks") == ["geo3k", "rotation", "sokoban"] and len(names("models")) == 4
    for task in names("tasks"):
        parts = [CONFIGS / f"{kind}/{name}.yaml" for kind, name in zip(KINDS, (task, model, devices), strict=True)]
        config = load_config(parts)
        assert config.model.dtype == "bfloat16" and config.train.steps == 200
        found = estimate(config, named_device("910B2"), 1 if devices == "one" else 8, (640, 480))
        for device in ("910B2", "910B3", "910C", "A100-80GB", "H100", "H200"):
            assert replace(found, device=named_device(device)).fits, f"{task}, {model}, {devices} on {device}"


KINDS = ("tasks", "models", "devices")


def test_the_report_names_what_takes_memory_and_time() -> None:
    done = program("estimate", *READY, "--config", CONFIGS / "devices/one.yaml", "--device", "910B2")
    assert done.code == 0, done
    for word in ("weights", "moments", "layers", "gradients", "keys and values", "together", "sampling", "update"):
        assert f"  {word}" in done.out
    assert "devices: 1 x Ascend910B2, 64 GB, 354 TFLOP/s, 1.60 TB/s" in done.out and "\nfits: " in done.out


def test_what_does_not_fit_is_told_with_remedies() -> None:
    whole = [*READY, "model.freeze_vision=false", "model.gradient_checkpointing=false", "--device", "910B2"]
    done = program("estimate", *whole)
    assert done.code == 1 and "does not fit: a process needs" in done.out
    assert "moments: model.lora.rank=16, or train.shard=true" in done.out
    assert program("estimate", *whole, "--device", "H200", "optim.micro_batch_tokens=2048").code == 0


def test_mistakes_are_refused(tmp_path: Path) -> None:
    unknown = program("estimate", *READY, "--device", "TPU").refused()
    assert unknown.startswith("--device: 'TPU' names no of the devices") and "H200" in unknown
    assert "names 3 of the devices" in program("estimate", *READY, "--device", "A100").refused()
    assert "--image 5: write width and height" in program("estimate", *READY, "--image", "5").refused()
    assert (
        "--picture is now --image; write --image 64x48" in program("estimate", *READY, "--picture", "64x48").refused()
    )
    assert "--turns must be at least 1" in program("estimate", *READY, "--turns", "0").refused()
    missing = program("estimate", *READY, "model.path=/no/model").refused()
    assert "/no/model has no config.json" in missing and "Qwen3-VL-8B-Instruct" in missing
    short = program("estimate", *READY, "workflow.context_tokens=1100").refused()
    assert "workflow.context_tokens=1100 has no room for 32 tokens of text" in short
    alone = program("estimate", *READY, "train.learners=4", "--devices", "4", "--device", "H200").refused()
    assert "train.learners=4 needs more processes" in alone


def test_engines_of_their_own_are_told_apart() -> None:
    done = program("estimate", *READY, "train.learners=2", "--devices", "4", "--device", "H200")
    assert done.code == 0, done
    assert "GB on each learner" in done.out and "GB on each engine" in done.out and "new weights" in done.out
    engine = done.out.split("GB on each engine")[1]
    assert "moments" not in engine and "weights that travel" in engine


def test_without_a_known_device_there_is_no_verdict() -> None:
    done = program("estimate", "--config", CONFIGS / "geo3k_tiny.yaml")
    assert done.code == 0 and "name another with --device" in done.out and "seconds of a step" not in done.out


@pytest.mark.parametrize(
    ("context", "tokens", "turns"),
    [(512, 256 + 3 * 16 + 2 * 32, 3), (256, 256, 3), (200, 200, 3), (110, 110, 2), (48, 48, 1)],
)
def test_a_small_context_holds_less_text(context: int, tokens: int, turns: int) -> None:
    """A turn takes 16 tokens and a reply 32; a text of 256 that does not fit is what the turns leave, at least 32."""
    words = ["model.path=tiny:qwen3", f"workflow.context_tokens={context}", "workflow.max_turns=3"]
    words += ["workflow.turn_tokens=16", "workflow.tools=[]"]
    episode = largest_episode(load_config(CONFIGS / "photo_tiny.yaml", words), None, (640, 480), None, None)
    assert (episode.tokens, episode.turns) == (tokens, turns)


def test_a_ready_configuration_with_a_small_context_is_estimated() -> None:
    done = program("estimate", "--config", CONFIGS / "photo_tiny.yaml", "--device", "H200")
    assert done.code == 0 and "episodes of 160 tokens" in done.out


def test_more_of_anything_takes_longer() -> None:
    config = load_config([CONFIGS / "tasks/rotation.yaml", CONFIGS / "models/qwen2_5_vl_3b.yaml"])
    device = named_device("H200")
    usual = estimate(config, device, 1, (640, 480)).seconds
    fewer = estimate(config, device, 1, (640, 480), turns=1).seconds
    shorter = estimate(config, device, 1, (640, 480), sampled=64).seconds
    smaller = estimate(config, device, 1, (112, 112)).seconds
    assert fewer["sampling"] < usual["sampling"] and shorter["sampling"] < usual["sampling"]
    assert fewer["update"] < usual["update"] and smaller["reading"] < usual["reading"]


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *(("910b2", 64e9), ("910B4", 32e9), ("910B4-1", 64e9), ("9382", 64e9), ("Ascend 910C", 64e9)),
        *(("h100", 80e9), ("NVIDIA H200", 141e9)),
    ],
)
def test_devices_are_found_by_what_people_call_them(name: str, memory: float) -> None:
    assert published(name)[1].memory == memory
    for wrong in ("", "910", "xyz"):
        with pytest.raises(HardwareError, match="of the devices that are known; choose one of Ascend910B1"):
            published(wrong)
