"""Writes a first configuration for a task that fits the present devices: `npu-vlrl init`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from npu_vlrl.common.registry import STARTERS, load
from npu_vlrl.config import Config, ConfigError, load_config
from npu_vlrl.estimate.report import Device, estimate, named_device
from npu_vlrl.hardware import PLATFORMS, Platform, select
from npu_vlrl.tasks.starting import Values

LARGEST_FIRST = ("Qwen3-VL-8B-Instruct", "Qwen2.5-VL-7B-Instruct", "Qwen3-VL-4B-Instruct", "Qwen2.5-VL-3B-Instruct")
"""Models proposed where none is named: the first that fits."""
IMAGE_SIZE = (640, 480)

_REAL: Values = {"model.dtype": "bfloat16", "model.freeze_vision": True, "model.gradient_checkpointing": True}
_ONE: Values = {
    "model.lora.rank": 32,
    "model.lora.alpha": 64.0,
    "rollout.cache_mib": 8192,
    "optim.lr": 1e-5,
    "optim.micro_batch_tokens": 8192,
}
_SEVERAL: Values = {
    "train.learners": "all",
    "train.shard": True,
    "rollout.cache_mib": 8192,
    "optim.lr": 1e-6,
    "optim.micro_batch_tokens": 8192,
}
_TINY: Values = {
    "model.path": "tiny:qwen2_5_vl",
    "model.max_pixels": 50176,
    "train.steps": 4,
    "train.threads": 1,
    "rollout.groups": 4,
    "rollout.group_size": 2,
    "workflow.turn_tokens": 48,
    "workflow.context_tokens": 2048,
    "optim.lr": 1e-4,
    "evaluation.every": 0,
    "evaluation.tasks": 8,
}
"""Settings on a CPU: the whole path with a model that learns nothing."""

COMMENTS = {
    "run.dir": "metrics, trajectories, checkpoints and the trained model",
    "run.checkpoint_every": "steps; after a stop the run goes on with run.if_exists=resume",
    "train.learners": "each process samples and learns",
    "train.shard": "weights, gradients and moments are divided over the processes",
    "model.path": "a Hugging Face folder",
    "model.freeze_vision": "the vision tower stays as it is, and its features are computed once an image",
    "model.gradient_checkpointing": "computes activations again, and needs a fraction of their memory",
    "model.lora.rank": "adapters are trained, and the model stays as it is",
    "model.max_pixels": "larger images are made smaller: 784 pixels of Qwen2.5-VL are a token, 1024 of Qwen3-VL",
    "data.train.path": "rows in verl's schema, see docs/data.md",
    "data.train.generator": "new rooms, without end",
    "workflow.max_turns": "turns of the policy in an episode; a tool call is a turn",
    "workflow.turn_discount": "a right answer in a later turn earns less",
    "workflow.turn_tokens": "sampled in a turn at most",
    "workflow.context_tokens": "of a whole episode, images included",
    "workflow.tool_call_reward": "another look has a price",
    "reward.rule": "or path/to/file.py:function of your own",
    "rollout.groups": "tasks in a step",
    "rollout.group_size": "trajectories of each, which are compared with each other",
    "rollout.cache_mib": "keys and values; between turns they are there up to twice more",
    "optim.micro_batch_tokens": "in one forward pass; fewer take less memory",
    "evaluation.every": "steps",
    "evaluation.tasks": "0 takes all of a file",
    "algorithm.kl_coef": "above 0 it is held near the model that it began as",
}


@dataclass(frozen=True)
class Starter:
    config: Config
    devices: int
    chosen: str
    """Purpose of the configuration and reason for its model, as one sentence."""


def machine(platform: str | None, device: str | None, devices: int | None) -> tuple[Device, int]:
    """Device to write for, and number of devices. What is not given is taken from this machine.

    Raises ConfigError for a platform that cannot be used here, unless `device` names the device of the run.
    """
    if device is not None:
        return named_device(device), devices or 1
    found = _usable(platform)
    memory = found.memory()
    if devices is None:
        devices = found.device_count() if memory else 1
    return Device(found.device_name(), found.peak(), None if memory is None else float(memory.total)), devices


def _usable(name: str | None) -> Platform:
    if name is None:
        return select()
    if name not in PLATFORMS:
        raise ConfigError(f"--platform {name}: choose one of {', '.join(PLATFORMS)}")
    platform = PLATFORMS[name]()
    if missing := platform.missing():
        raise ConfigError(
            f"--platform {name}: {missing}; for another machine say what it has, e.g. --device 910B2 --devices 8"
        )
    return platform


def starter(task: str, device: Device, devices: int, model: str | None, target: Path) -> Starter:
    """Writes a configuration of a task to a new file; without a `model`, for the largest known one that fits.

    Raises ConfigError when nothing fits, and for an unknown task or model; FileExistsError and other OSErrors for a
    file that is there or cannot be written.
    """
    if task not in STARTERS:
        raise ConfigError(f"--task {task}: choose one of {', '.join(STARTERS)}")
    values, chosen = _fitting(task, device, devices, model)
    text = "\n".join([f"# npu-vlrl init --task {task}", f"# {chosen}", *_lines(values), ""])
    with target.open("x", encoding="utf-8") as file:
        file.write(text)
    return Starter(load_config(target), devices, chosen)


def _fitting(task: str, device: Device, devices: int, model: str | None) -> tuple[Values, str]:
    """Settings that fit, and the reason for the model."""
    where, wanted = f"{devices} x {device.name}", load(STARTERS, task).STARTER
    if device.memory is None and model is None:
        return _TINY | wanted | _TINY, f"a tiny random model, since {where} has no memory of its own"
    values = wanted | _REAL | (_ONE if devices == 1 else _SEVERAL)
    if model is not None:
        chosen = {"model.path": model} | values
        fits = estimate(_config(chosen), device, devices, IMAGE_SIZE).fits
        verdict = {True: "fits", False: "does not fit; see `npu-vlrl estimate`", None: "of unknown memory"}[fits]
        return chosen, f"{model} on {where}, which {verdict}"
    smaller: Values = {"rollout.cache_mib": 2048}
    for name, caches in product(LARGEST_FIRST, ({}, smaller)):
        chosen = {"model.path": f"models/{name}"} | values | caches
        if estimate(_config(chosen), device, devices, IMAGE_SIZE).fits:
            return chosen, f"{name} on {where}: the largest known model that fits"
    raise ConfigError(
        f"no known model fits {where}; give more --devices, or a smaller --model, e.g. --model tiny:qwen2_5_vl"
    )


def _nested(values: Values) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *above, leaf = key.split(".")
        place = nested
        for name in above:
            place = place.setdefault(name, {})
        place[leaf] = value
    return nested


def _config(values: Values) -> Config:
    return Config.model_validate(_nested(values))


def _lines(values: Values) -> Iterator[str]:
    """Lines of YAML, section by section, with the comments of their keys."""
    nested = _nested(values)
    order = ("run", "train", "model", "data", "environment", "workflow", "reward", "rollout", "algorithm", "optim")
    for section in sorted(nested, key=lambda name: order.index(name) if name in order else len(order)):
        yield f"{section}:"
        yield from _section(nested[section], section, 1)


def _section(values: Mapping[Any, Any], path: str, depth: int) -> Iterator[str]:
    for name, value in values.items():
        key, margin = f"{path}.{name}", "  " * depth
        nested = isinstance(value, dict) and key != "environment.options"
        if comment := COMMENTS.get(key):
            yield f"{margin}# {comment}"
        if nested:
            yield f"{margin}{name}:"
            yield from _section(value, key, depth + 1)
        else:
            yield f"{margin}{name}: {_plain(value)}"


def _plain(value: Any) -> str:
    """Formats a value on one line of YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_plain(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return f"{value:.1e}" if isinstance(value, float) and abs(value) < 1e-3 and value else str(value)


def next_steps(task: str, made: Starter, target: Path, device: str | None) -> Iterator[str]:
    """Commands that come next, in their order. `device`: the name of another machine's device."""
    path = made.config.model.path
    if not path.startswith("tiny:") and not (Path(path) / "config.json").is_file():
        yield f"# download Qwen/{Path(path).name} into {path}, or set model.path"
    prepare = load(STARTERS, task).PREPARE
    if prepare is not None:
        yield prepare
    named = f" --device {device}" if device else ""
    yield f"npu-vlrl estimate --config {target}{named}" + (f" --devices {made.devices}" if made.devices > 1 else "")
    if made.devices > 1:
        yield f"torchrun --standalone --nproc-per-node {made.devices} -m npu_vlrl train --config {target}"
    else:
        yield f"npu-vlrl train --config {target}"
