"""`npu-vlrl init`: what it writes is valid, fits, runs, says why, and replaces nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_vlrl.common.registry import STARTERS, load
from npu_vlrl.config import load_config
from npu_vlrl.estimate.init_config import LARGEST_FIRST
from npu_vlrl.hardware import CpuPlatform, Memory
from tests.support.program import Outcome, program, records

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = {
    name: f"models/{file}.yaml"
    for name, file in zip(LARGEST_FIRST, ("qwen3_vl_8b", "qwen2_5_vl_7b", "qwen3_vl_4b", "qwen2_5_vl_3b"), strict=True)
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("task", ["geo3k", "rotation", "sokoban"])
def test_it_writes_what_the_ready_configurations_say(task: str, devices: int) -> None:
    """The same settings are in configs/, put together from a task, a model and devices."""
    model = LARGEST_FIRST[devices % 3]
    done = program("init", "--task", task, "--device", "910B2", "--devices", devices, "--model", f"models/{model}")
    assert done.code == 0, done
    parts = [f"tasks/{task}.yaml", FILES[model], f"devices/{ {1: 'one', 8: 'eight'}[devices] }.yaml"]
    assert load_config(f"{task}.yaml") == load_config([CONFIGS / part for part in parts])


def test_the_largest_known_model_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the memory takes a smaller one, with less room for keys and values; a fifth takes none."""

    def init(gigabytes: int) -> Outcome:
        size = gigabytes * 10**9
        monkeypatch.setattr(CpuPlatform, "memory", lambda self, index=0: Memory(size, size))
        return program("init", "--task", "sokoban", "--out", f"{gigabytes}.yaml", "--devices", "1")

    for gigabytes, model, cache in ((64, "Qwen3-VL-8B", 8192), (24, "Qwen3-VL-4B", 2048)):
        done = init(gigabytes)
        assert done.code == 0 and "the largest known model that fits" in done.out, done
        assert f"npu-vlrl train --config {gigabytes}.yaml" in done.out
        config = load_config(f"{gigabytes}.yaml")
        assert config.model.path == f"models/{model}-Instruct" and config.rollout.cache_mib == cache
    assert "no known model fits 1 x" in init(12).refused() and not Path("12.yaml").exists()


@pytest.mark.parametrize("task", sorted(STARTERS))
def test_every_key_that_is_written_is_what_was_meant(task: str) -> None:
    done = program("init", "--task", task)
    assert done.code == 0 and done.out.startswith(f"wrote {task}.yaml: a tiny random model, since 1 x ")
    text = Path(f"{task}.yaml").read_text()
    assert text.startswith(f"# npu-vlrl init --task {task}\n") and "# tasks in a step" in text
    config = load_config(f"{task}.yaml")
    assert config.model.path == "tiny:qwen2_5_vl" and config.run.dir == load(STARTERS, task).STARTER["run.dir"]
    assert config.workflow.max_turns == load(STARTERS, task).STARTER["workflow.max_turns"]


def test_what_it_writes_trains() -> None:
    assert program("init", "--task", "sokoban", "--out", "s.yaml").code == 0
    small = ("train.steps=1", "rollout.groups=2", "evaluation.tasks=1", "workflow.turn_tokens=4")
    done = program("train", "--config", "s.yaml", "--run-dir", "r", *small)
    assert done.code == 0, done
    assert [line["step"] for line in records(Path("r"), "metrics.jsonl") if "pg_loss" in line] == [0]


def test_nothing_is_replaced_and_mistakes_are_refused() -> None:
    Path("rotation.yaml").write_text("mine")
    assert "rotation.yaml" in program("init").refused() and Path("rotation.yaml").read_text() == "mine"
    assert "--task chess: choose one of geo3k" in program("init", "--task", "chess").refused()
    assert "--platform xpu: choose one of" in program("init", "--platform", "xpu", "--out", "a").refused()
    gone = program("init", "--platform", "npu", "--out", "a").refused()
    assert gone.startswith("--platform npu: ") and "say what it has, e.g. --device 910B2" in gone
    assert "--device: 'TPU' names no" in program("init", "--device", "TPU", "--out", "a").refused()
    assert "--devices must be at least 1" in program("init", "--devices", "0", "--out", "a").refused()
    assert "/no/model has no config.json" in program("init", "--model", "/no/model", "--out", "a").refused()
    assert "choose another file" in program("init", "--out", "/no/folder/a.yaml").refused()
    assert not Path("a").exists()
