"""Reads a configuration from YAML files and `key=value` overrides, and writes it.

Unknown keys are errors that name the nearest known key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from npu_vlrl.config.schema import Config
from npu_vlrl.fields import ConfigError, Section

OPTIONS_OF = ("name", "rule")
"""Keys that name the owner of the `options` beside them: `environment.name`, `workflow.name`, `reward.rule`, a term's
`rule`."""


def load_config(path: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Reads YAML files (OmegaConf interpolation allowed), of which a later one wins, and applies dotted `key=value`
    overrides. Where one names another game or rule, the `options` before it are dropped.

    Raises ConfigError, whose message names the file, the key, and the nearest known key for a misspelt one.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    name = " + ".join(map(str, paths))
    try:
        given = OmegaConf.merge({}, *map(_override, overrides))  # as one, so that their order does not matter
        merged = reduce(_merged, [*map(_read, paths), given])
        values = OmegaConf.to_container(merged, resolve=True)
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{name}:\n" + "\n".join(_explain(error))) from None


def _read(path: str | Path) -> DictConfig:
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such configuration file; see configs/, or write one with `npu-vlrl init`")
    try:
        loaded = OmegaConf.load(path)
    except (OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"{path}: {error}; correct the file") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: the file must hold a mapping of sections, got a list; see configs/ for samples")
    return loaded


def _merged(below: Any, above: Any) -> Any:
    """OmegaConf's merge of two mappings, without options of another game or rule."""
    kept = OmegaConf.to_container(below)
    _drop_options(kept, OmegaConf.to_container(above))
    return OmegaConf.merge(OmegaConf.create(kept), above)


def _drop_options(below: Any, above: Any) -> None:
    """Removes the `options` in `below`, at any depth, of a game or rule for which `above` names another one: they
    belong to what they were written for. Options below which no name stands are for whatever `above` names.
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return
    for name in OPTIONS_OF:
        if name in above and name in below and above[name] != below[name]:
            below.pop("options", None)
    for key, value in above.items():
        _drop_options(below.get(key), value)


def _override(text: str) -> DictConfig:
    if not text.partition("=")[0] or "=" not in text:
        raise ConfigError(f"override {text!r} is not of the form key=value, e.g. train.steps=10")
    try:
        return OmegaConf.from_dotlist([text])
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"override {text!r}: {error}; write the value as YAML, in quotes for the shell") from error


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(config.model_dump(mode="json"))))


def _escaped(value: Any) -> Any:
    """`value` with its strings written so that OmegaConf finds no interpolation in them."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


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
            same_depth = [name for name in known if name.count(".") == key.count(".")]
            near = difflib.get_close_matches(key, same_depth, 1)
            yield f"  {key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
        elif item["type"] == "missing":
            yield f"  {key}: required, but not given; add it to the file, or {key}=VALUE to the command"
        else:
            got = "" if item["type"] == "value_error" else f" (got {item['input']!r})"
            yield f"  {key or 'configuration'}: {item['msg'].removeprefix('Value error, ')}{got}{_hint(key, item)}"


def _hint(key: str, item: Any) -> str:
    """How to write what was meant."""
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
