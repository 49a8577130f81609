"""Identifies a `model.path` that is no model folder, such as a run, a checkpoint or an adapter, with the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

SHOWN = 3
"""Largest number of names that a message lists."""

NOT_A_FOLDER = "is not a Hugging Face model folder"

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def not_a_model(path: str) -> str:
    """Reason for which `path`, which has no config.json, is no model folder, with the remedy."""
    folder = Path(path)
    if not folder.exists():
        return _absent(path)
    if folder.is_file():
        return f"{path} {NOT_A_FOLDER} but a file; name the folder that holds it and its config.json"
    kind = _own_files(folder) or other_weights(folder) or _nearby(folder)
    if kind is None:
        kind = "it has no config.json; download a model there, or name the folder it is in"
    return f"{path} {NOT_A_FOLDER}: {kind}"


def other_weights(folder: Path) -> str | None:
    """Kind of the weights in a folder without readable safetensors, with the remedy; None where there are none."""
    for matches, told in _WEIGHTS:
        if matches(folder):
            return told.format(folder=folder)
    return None


def named(names: list[str]) -> str:
    """The first few of a list of names, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _absent(path: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
        return (
            f"{path} {NOT_A_FOLDER}: there is no such folder here, and nothing is downloaded; if it is a name of the "
            f"Hub, run `hf download {path} --local-dir DIR` and give DIR"
        )
    return f"{path} {NOT_A_FOLDER}: there is no such folder; correct the path, or download a model there"


def _own_files(folder: Path) -> str | None:
    """Kind of a folder that this project wrote, or of an adapter; None for another one."""
    if (folder / "state.json").is_file() and any(folder.glob("weights*.safetensors")):
        run = folder.parent.parent
        return f"it is a checkpoint of a run; run `npu-vlrl export {run} --checkpoint {folder} --out DIR` and give DIR"
    if (folder / "config.yaml").is_file():
        if (folder / "export" / "config.json").is_file():
            return f"it is the folder of a run; its model is {folder / 'export'}"
        return f"it is the folder of a run; run `npu-vlrl export {folder} --out DIR` and give DIR"
    if any(folder.glob("step-*/state.json")):
        return f"it holds the checkpoints of a run; run `npu-vlrl export {folder.parent} --out DIR` and give DIR"
    if (folder / "adapter_config.json").is_file():
        return (
            f"it is an adapter alone, of {_base_of(folder)}; merge the two with peft (`PeftModel.from_pretrained(model,"
            " folder).merge_and_unload()`, `save_pretrained`), or export the run that trained it without --adapter"
        )
    return None


def _base_of(folder: Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None
    return base if isinstance(base, str) and base else "a model that it does not name"


def _nearby(folder: Path) -> str | None:
    """Names model folders below this one, where a downloader or a training may have put them; None without any."""
    below = sorted(found.parent for depth in ("*", "snapshots/*", "*/snapshots/*") for found in _configs(folder, depth))
    return f"it has no config.json, but there is one in {named([str(path) for path in below])}" if below else None


def _configs(folder: Path, depth: str) -> list[Path]:
    return list(folder.glob(f"{depth}/config.json"))


def _any(*patterns: str) -> Callable[[Path], bool]:
    return lambda folder: any(True for pattern in patterns for _ in folder.glob(pattern))


_WEIGHTS: tuple[tuple[Callable[[Path], bool], str], ...] = (
    (
        _any("*.gguf"),
        "its weights are a GGUF file, quantised for inference, which cannot be trained; give the folder of the model "
        "that it was made from",
    ),
    (
        _any("zero_to_fp32.py", "global_step*/*_model_states.pt", "*_model_states.pt"),
        "it is a checkpoint of DeepSpeed; run its zero_to_fp32.py with --safe_serialization into a copy of the model's "
        "folder, and give that",
    ),
    (
        _any("model_world_size_*_rank_*.pt", "actor/model_world_size_*_rank_*.pt", "fsdp_config.json"),
        "it is an FSDP checkpoint of verl; run `python -m verl.model_merger merge --backend fsdp --local_dir {folder} "
        "--target_dir DIR` and give DIR",
    ),
    (
        _any(
            ".metadata",
            "*.distcp",
            "*/.metadata",
            "mp_rank_*",
            "iter_*/mp_rank_*",
            "latest_checkpointed_iteration.txt",
        ),
        "it is a checkpoint of Megatron or of torch's DCP (FSDP); run `npu-vlrl export {folder} --base MODEL --out "
        "DIR` and give DIR (docs/export.md)",
    ),
    (
        _any("model-*-of-*.safetensors"),
        "its weights are in several files and model.safetensors.index.json, which lists them, is missing; download it "
        "from the model's publisher",
    ),
    (
        _any(*PICKLES),
        "its weights are pickles (.bin, .pt), which can run code and are not read; if you trust who made them, load "
        "the model with transformers and write it with `save_pretrained`, which makes safetensors",
    ),
)
