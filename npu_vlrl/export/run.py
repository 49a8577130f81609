"""Exports a checkpoint of a run, for `npu-vlrl export` and at the end of a training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from npu_vlrl import __version__
from npu_vlrl.config import Config, ConfigError, load_config
from npu_vlrl.export.card import Source, run_card
from npu_vlrl.learner.checkpoint import STATE, complete, latest
from npu_vlrl.learner.state import load_policy
from npu_vlrl.model.folder import export_model
from npu_vlrl.model.load import LoadedModel, load_model
from npu_vlrl.report.absolute_paths import rooted
from npu_vlrl.report.fingerprints import Inputs
from npu_vlrl.report.lines import read_lines

MARK = "npu_vlrl_export.json"
"""File in every folder that an export wrote, and may overwrite."""


def export_run(run: Path, out: Path, checkpoint: str | None, adapter: bool) -> str:
    """Writes a checkpoint of a run as a Hugging Face folder, and returns a description.

    `checkpoint` is a number of steps or the path of a checkpoint; None takes the newest one. Memory: the model on the
    host, and one tensor.

    Raises ConfigError for a path that is no run or checkpoint, for another model than the run began with, and for an
    unusable output folder; CheckpointError for a checkpoint of another model.
    """
    if (run / STATE).is_file():
        raise ConfigError(f"{run} is one checkpoint of a run; write `npu-vlrl export RUN --checkpoint {run}`")
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"{run} is no run folder: it has no config.yaml; give the run.dir of a training, or, for a checkpoint of "
            "another program, also --base with the Hugging Face folder of its model"
        )
    config = load_config(run / "config.yaml")
    if adapter and config.model.lora is None:
        raise ConfigError(f"--adapter: {run} trained no adapter (model.lora is not set); leave it out")
    path = find_checkpoint(run, checkpoint)
    check_out(out)
    here = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run)})})
    Inputs(here, rooted(here)).check_model()  # what was not trained comes from there
    loaded = load_model(config.model, run / "model", config.train.seed, torch.device("cpu"))
    step, _ = load_policy(path, loaded.policy)
    _write(loaded, config, out, step, run, _read_json(run / "summary.json"), adapter, used_up=True)
    return f"{path} after {step} of {config.train.steps} steps"


def export_end(loaded: LoadedModel, config: Config, run: Path, summary: Mapping[str, Any]) -> None:
    """Writes RUN/export at the end of a training, from the policy in memory."""
    _write(loaded, config, run / "export", config.train.steps, run, summary)


def find_checkpoint(run: Path, wanted: str | None) -> Path:
    """Finds a checkpoint. Raises ConfigError when there is none, or not the requested one, and lists those that exist;
    and what `latest` raises.
    """
    there = complete(run / "checkpoints")
    steps = ", ".join(str(int(path.name.removeprefix("step-"))) for path in there) or "none"
    if wanted is None:
        newest = latest(run / "checkpoints")
        if newest is None:
            raise ConfigError(
                f"{run} has no checkpoint; a training writes one at its end and run.checkpoint_every steps"
            )
        return newest
    if wanted.isdecimal():
        found = [path for path in there if path.name == f"step-{int(wanted):08d}"]
        if not found:
            raise ConfigError(f"--checkpoint {wanted}: {run} has no checkpoint of that step; it has those of: {steps}")
        return found[0]
    path = Path(wanted)
    if not path.is_dir():
        raise ConfigError(f"--checkpoint {wanted}: no such folder; {run} has checkpoints of the steps: {steps}")
    return path


def check_out(out: Path) -> None:
    """Raises ConfigError for a folder that holds anything other than an earlier export."""
    if out.exists() and not (out / MARK).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"--out: {out} exists and is no earlier export; choose another folder, or remove it yourself")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out: {out.absolute().parent} is no folder; make it first")


def marked(**facts: Any) -> str:
    """Content of MARK."""
    return json.dumps({"npu_vlrl": __version__, **facts}, indent=2) + "\n"


def _write(
    loaded: LoadedModel,
    config: Config,
    out: Path,
    step: int,
    run: Path,
    summary: Mapping[str, Any],
    adapter: bool = False,
    used_up: bool = False,
) -> None:
    weights = weights_of(loaded, adapter)
    source = Source(loaded.processor is not None, adapter, weights)
    ended = summary.get("steps") == step
    card = run_card(config, source, step, list(read_lines(run / "metrics.jsonl")), summary if ended else {})
    mark = marked(run=run.absolute().name, steps=step, weights=weights)
    export_model(loaded, out, {"README.md": card, MARK: mark}, adapter, used_up)


def weights_of(loaded: LoadedModel, adapter: bool) -> str:
    """Dtype of the written weights, and of those that they were made from."""
    policy = loaded.policy
    name, trained = _dtype(policy.dtype), _dtype(next(iter(policy.trainable().values())).dtype)
    if not adapter and policy.has_adapter:
        return f"{name}, with adapters of {trained} merged in float32"
    written = f"adapters in {trained}" if adapter else name
    return written if trained == "float32" else f"{written}, rounded from masters in float32 where they were trained"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file; empty for a training that has not ended."""
    return dict(json.loads(file.read_text())) if file.is_file() else {}
