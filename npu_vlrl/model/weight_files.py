"""Headers of a model folder's safetensors: the files, and the names, shapes and dtypes of their tensors.

No weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from npu_vlrl.config import ConfigError
from npu_vlrl.model.identify import named, other_weights
from npu_vlrl.model.versions import untied

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Arguments of every call by which transformers reads a folder: it neither runs the folder's code nor asks to."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DISTRIBUTED = "shard-*-model-*-of-*.safetensors"

FLOATS = ("F64", "F32", "F16", "BF16")
BUILT_IN_ATTENTION = "sdpa"
"""Attention until `attach` replaces it by ours: a config.json may name a kernel of the Hub, which would be downloaded.
"""

AGAIN = "download it again"
POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Header:
    """A tensor as its file describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Dtype as safetensors spells it, e.g. `BF16`."""


def read_headers(folder: Path) -> dict[str, Header] | None:
    """Headers of the tensors that transformers would read, by their names in the files; None without any weights.

    Raises ConfigError for weights of another kind, and for a file that is missing, damaged, or holds no floats.
    """
    if any(folder.glob(DISTRIBUTED)):
        raise ConfigError(
            f"model.path: {folder} holds a distributed checkpoint ({DISTRIBUTED}), which transformers reads before "
            f"{SINGLE}; run `npu-vlrl export {folder} --base MODEL --out DIR` and give DIR"
        )
    if (folder / SINGLE).exists() and (folder / INDEX).exists():
        raise ConfigError(
            f"model.path: {folder} has both {SINGLE} and {INDEX}, and programs differ in which of them they read; "
            "remove the one that is out of date"
        )
    if (folder / INDEX).exists():
        tensors = _indexed(folder)
    elif (folder / SINGLE).exists():
        tensors = _header(folder / SINGLE)
    elif (kind := other_weights(folder)) is not None:
        raise ConfigError(f"model.path: {folder} has no {SINGLE}: {kind}")
    else:
        return None
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise ConfigError(
                f"model.path: {tensor.file}: {name} is {tensor.dtype}, so the weights are quantised, and those "
                "cannot be trained; give the folder of the model that they were made from"
            )
    return tensors


def _indexed(folder: Path) -> dict[str, Header]:
    index = read_object(folder / INDEX)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"model.path: {folder / INDEX} lists no weights (`weight_map`); {AGAIN}")
    files = sorted(set(places.values()))
    if strange := [name for name in files if Path(name).name != name or not name.endswith(".safetensors")]:
        raise ConfigError(f"model.path: {folder / INDEX} names {strange[0]!r}, which is no file of the folder; {AGAIN}")
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ConfigError(
            f"model.path: {folder} lacks {len(missing)} of the {len(files)} files that {INDEX} lists "
            f"({named(missing)}); download them from the model's publisher"
        )
    tensors: dict[str, Header] = {}
    for name in files:
        tensors |= _header(folder / name)
    if absent := [name for name in places if name not in tensors]:
        raise ConfigError(
            f"model.path: {folder / INDEX} lists weights that its files do not hold ({named(absent)}); {AGAIN}"
        )
    return tensors


def _header(file: Path) -> dict[str, Header]:
    """Headers of a file's tensors. Raises ConfigError for a file that cannot be read, or that is cut short."""
    try:
        with file.open("rb") as opened:
            start = opened.read(len(POINTER))
        if not start:
            raise ConfigError(f"model.path: {file} is empty; {AGAIN}")
        if start == POINTER:
            raise ConfigError(
                f"model.path: {file} is a pointer of Git LFS, not the weights; run `git lfs pull` in its folder"
            )
        with safe_open(file, "pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # it has no __iter__
            return {name: Header(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.path: {file} is cut short or no safetensors file ({error}); {AGAIN}") from error


def read_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object of a model folder. Raises ConfigError with the name of the file for anything else."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {file} is not a valid JSON file ({error}); {AGAIN}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model.path: {file} holds no JSON object; {AGAIN}")
    return value


def check_names(folder: Path, family: Any, settings: Any, tensors: Mapping[str, Header]) -> None:
    """Lets transformers load tensors without values into the model class `family`, on the device `meta`.

    Older names are so renamed as in a real load. Raises ConfigError as `check_report` does.
    """
    values = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    _, report = family.from_pretrained(
        None,
        config=untied(settings, tensors),
        state_dict=values,
        device_map="meta",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        attn_implementation=BUILT_IN_ATTENTION,
        **NO_CODE,
    )
    check_report(folder, report)


def check_report(folder: Path, report: Mapping[str, Iterable[Any]]) -> None:
    """Raises ConfigError when transformers' `loading_info` names weights that are missing, left over or misshapen.

    transformers itself fills missing weights with random numbers, and only warns.
    """
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    misshapen = [
        f"{name} {list(found)} instead of {list(wanted)}" for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    if not (missing or unexpected or misshapen):
        return
    if missing == ["lm_head.weight"] and not (unexpected or misshapen):
        raise ConfigError(
            f"model.path: {folder}: config.json says `tie_word_embeddings: false`, and the weights have no "
            "lm_head.weight; write true if the head is the embedding, or download the weights again"
        )
    parts = {"missing": missing, "left over": unexpected, "of another shape": misshapen}
    told = "; ".join(f"{len(names)} {what} ({named(names)})" for what, names in parts.items() if names)
    remedy = AGAIN
    if any(".lora_" in name or ".base_layer." in name for name in unexpected):
        remedy = "an adapter that was not merged is among them, merge it first (`merge_and_unload` of peft)"
    raise ConfigError(f"model.path: the weights of {folder} do not fit its config.json: {told}; {remedy}")
