"""Reads a configuration from YAML files and `key=value` overrides, and writes it.

Unknown keys are errors that name the nearest known key.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from npu_vlrl.common.atomic_files import refusal
from npu_vlrl.common.fields import ConfigError, Section
from npu_vlrl.config.named import find
from npu_vlrl.config.schema import Config
from npu_vlrl.config.yaml_text import read_yaml, write_yaml

OPTIONS_OF = ("name", "rule")
"""Keys that name the owner of the `options` beside them: `environment.name`, `workflow.name`, `reward.rule`, a term's
`rule`."""

SUCCESSORS = {
    "rollout.record": "it is rollout.graphs now",
    "rollout.top_p": "training samples from the whole distribution; leave it out, or set evaluation.top_p",
    "rollout.top_k": "training samples from the whole distribution; leave it out, or set evaluation.top_k",
}
"""Keys of earlier versions, with the advice that the error gives."""

INTERPOLATION = re.compile(rf"\$\{{(oc\.\w+:|({'|'.join(Config.model_fields)})\.)[^}}]*\}}")
"""Pattern of interpolations such as `${train.seed}`, which earlier versions resolved."""


def load_config(path: str | Path | Sequence[str | Path], overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Reads YAML files, of which a later one wins, and applies overrides: `key=value` with a dotted key and a value in
    YAML, or a mapping of such keys to values. A file is a path, or the name of one in `configs/`. Where one names
    another game or rule, the `options` before it are dropped.

    Raises ConfigError, whose message names the file, the key, and the nearest known key for a misspelt one.

    Example: `load_config("photo_tiny", {"train.steps": 10})`
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    name = " + ".join(map(str, paths))
    changes = overrides.items() if isinstance(overrides, Mapping) else map(_override, overrides)
    given: dict[str, Any] = {}  # as one, so that their order does not matter
    for key, value in changes:
        given = _merged(given, _nested(key, value))
    values = reduce(_over, [*map(_read, paths), given])
    _check_plain(name, values)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{name}:\n" + "\n".join(_explain(error))) from None


def _read(path: str | Path) -> dict[str, Any]:
    try:
        with find(path).open(encoding="utf-8") as file:
            loaded = read_yaml(file)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(refusal(error) or f"{path}: {error}") from error
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; correct the file") from error
    if loaded is not None and not isinstance(loaded, dict):
        what = "a list" if isinstance(loaded, list) else repr(loaded)
        raise ConfigError(f"{path}: the file must hold a mapping of sections, got {what}; see configs/ for samples")
    return loaded or {}


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merges a later file, or the overrides, into the earlier ones."""
    kept = copy.deepcopy(below)
    _drop_options(kept, above)
    merged: dict[str, Any] = _merged(kept, above)
    return merged


def _merged(below: Any, above: Any) -> Any:
    """Merges two mappings at any depth, where `above` wins; anything else is `above`."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


def _drop_options(below: Any, above: Any) -> None:
    """Removes each `options` in `below`, at any depth, that belongs to another game or rule than the one that `above`
    names. Options without a name beside them are kept.
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return
    for name in OPTIONS_OF:
        if name in above and name in below and above[name] != below[name]:
            below.pop("options", None)
    for key, value in above.items():
        _drop_options(below.get(key), value)


def _override(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not key or not sign:
        raise ConfigError(f"override {text!r} is not of the form key=value, e.g. train.steps=10")
    try:
        return key, read_yaml(value)
    except YAMLError as error:
        raise ConfigError(f"override {text!r}: {error}; write the value as YAML, in quotes for the shell") from error


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Nested mapping of a dotted key: `{"a": {"b": value}}` for the key a.b."""
    above, _, last = key.rpartition(".")
    return _nested(above, {last: value}) if above else {last: value}


def _check_plain(name: str, value: Any, key: str = "") -> None:
    """Raises ConfigError for a text with a reference to another value, which would be taken literally."""
    if isinstance(value, str) and (found := INTERPOLATION.search(value)):
        raise ConfigError(
            f"{name}: {key}: {found[0]} is no longer replaced by what it names; write the value, or give it on the "
            f"command line, where the shell replaces variables: {key}=VALUE"
        )
    for inner, item in value.items() if isinstance(value, dict) else ():
        _check_plain(name, item, f"{key}.{inner}".lstrip("."))


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back."""
    return write_yaml(config.model_dump(mode="json"))


def sections(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every configuration key with its field, e.g. ("train.steps", FieldInfo)."""
    for name, info in model.model_fields.items():
        nested = [t for t in (info.annotation, *get_args(info.annotation)) if _is_section(t)]
        if nested:
            yield from sections(nested[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _explain(error: ValidationError) -> Iterator[str]:
    known = [key for key, _ in sections()]
    known += sorted({key.rpartition(".")[0] for key in known} - {""})
    for item in error.errors():
        key = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            if key in SUCCESSORS:
                yield f"  {key}: unknown key; {SUCCESSORS[key]}"
                continue
            same_depth = [name for name in known if name.count(".") == key.count(".")]
            near = difflib.get_close_matches(key, same_depth, 1)
            yield f"  {key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
        elif item["type"] == "missing":
            yield f"  {key}: required, but not given; add it to the file, or {key}=VALUE to the command"
        else:
            got = "" if item["type"] == "value_error" else f" (got {item['input']!r})"
            yield f"  {key or 'configuration'}: {item['msg'].removeprefix('Value error, ')}{got}{_hint(key, item)}"


def _hint(key: str, item: Any) -> str:
    """Advice on how to write the value, appended to the error; "" without any."""
    value = item["input"]
    if item["type"] == "tuple_type" and isinstance(value, str):
        return f"; write it as a list: {key}=[{value}]"
    if item["type"] == "string_type" and value is not None and not isinstance(value, list):
        shown = "…" if isinstance(value, dict) else str(value)  # YAML reads `a: b` as a mapping, and 5 as a number
        return f"""; quote it for YAML, and for the shell: '{key}="{shown}"'"""
    if item["type"] in ("model_type", "model_attributes_type", "dict_type"):
        own = next(((name, info) for name, info in sections() if name.startswith(f"{key}.")), None)
        if own is not None:
            name, info = own
            return f"; it is a section, so set what is in it, e.g. {name}={'…' if info.is_required() else info.default}"
    return ""
