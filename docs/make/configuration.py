"""Writes docs/configuration.md from the schema: python docs/make/configuration.py

A test compares the file with what this makes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic.fields import FieldInfo

from npu_vlrl.common.fields import Section
from npu_vlrl.config import Config

TARGET = Path(__file__).parents[1] / "configuration.md"

HEAD = """# Configuration reference

Every key, made from the schema in `npu_vlrl/config/` by `python docs/make/configuration.py`. A key stands in the YAML
file, or on the command line as `section.key=value`, which goes first. `npu-vlrl config --config FILE` shows what comes
out. A key that is not here is an error that names the nearest one.

A file is given by its path, or by its name where it comes with the package: `--config photo_tiny`, `--config
tasks/geo3k`. Values are YAML 1.1, in which `yes` and `off` are switches and `012` is octal; `1e-5` is a number all the
same. A repeated key is an error. A value never refers to another one: what looks like `${train.seed}` is an error, too.

Of several files a later one wins, and the command line wins over all; what it does not name is kept. Options are of the
game or rule that they stand beside: where `environment.name`, `reward.rule`, or the `rule` of a term of a weighted sum
becomes another one, the `options` before it are dropped, and those that are given with it count alone. With the same
name they are merged key by key. What a file sets in `algorithm` beside its `preset` stays when only the preset is
changed; set it to `null` to take what the new preset fills in. Of `path` and `generator` of a data source one must be
set to `null`.

A key without a default must be given. More about groups of keys: [algorithms](algorithms.md), [losses](losses.md),
[rewards](rewards.md), [tools](tools.md), [environments](environments.md), [asynchronous training](asynchronous.md),
[learners](learners.md), [vLLM](vllm.md), [Ray](ray.md).
"""

KINDS = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", Any: "anything"}
LIMITS = {
    "ge": "≥ {}",
    "gt": "> {}",
    "le": "≤ {}",
    "lt": "< {}",
    "pattern": "that matches `{}`",
    "min_length": "of at least {} character",
}


def document() -> str:
    """The whole file."""
    return "\n".join([HEAD, *_sections(Config, "")])


def _sections(model: type[Section], key: str) -> Iterator[str]:
    """A heading with a table of the keys of a section, then the sections inside it."""
    hints = get_type_hints(model, include_extras=True)
    fields = {name: (hints[name], info, _inside(hints[name])) for name, info in model.model_fields.items()}
    if key:
        yield f"{'#' * (2 + key.count('.'))} {key}\n"
        if model.__doc__:
            yield f"{_linked(inspect.cleandoc(model.__doc__))}\n"
    rows = [
        f"| `{key}.{name}` | {_values(hint)} | {_default(info)} | {_linked(_cell(info.description or ''))} |"
        for name, (hint, info, inside) in fields.items()
        if inside is None or info.default is None
    ]
    if rows:
        yield "\n".join(["| key | values | default | meaning |", "| --- | --- | --- | --- |", *rows, ""])
    seen: dict[type[Section], str] = {}
    for name, (_, _, inside) in fields.items():
        nested = f"{key}.{name}".lstrip(".")
        if inside in seen:
            yield f"{'#' * (2 + nested.count('.'))} {nested}\n\nThe same keys as `{seen[inside]}`.\n"
        elif inside is not None:
            seen[inside] = nested
            yield from _sections(inside, nested)


def _inside(hint: Any) -> type[Section] | None:
    """The section that a key holds, if it holds one."""
    return next((t for t in (hint, *get_args(hint)) if isinstance(t, type) and issubclass(t, Section)), None)


def _values(hint: Any) -> str:
    """What may be given, in words."""
    if hint is NoneType:
        return "`null`"
    if _inside(hint) is hint:
        return "a section"
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [_limit(limit) for info in arguments[1:] for limit in info.metadata]
        return " ".join(filter(None, [_values(arguments[0]), ", ".join(filter(None, limits))]))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_values(arguments[0])}" if ... in arguments else " and ".join(map(_values, arguments))
    if origin is dict:
        return "mapping"
    if arguments:  # a union
        return ", ".join(map(_values, arguments))
    return KINDS[hint]


def _limit(limit: Any) -> str:
    given = {name: value for name in LIMITS if (value := getattr(limit, name, None)) is not None}
    return ", ".join(LIMITS[name].format(_cell(str(value))) for name, value in given.items())


def _default(info: FieldInfo) -> str:
    """As YAML would have it in one line."""
    if info.is_required():
        return "—"
    value = info.get_default(call_default_factory=True)
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _linked(text: str) -> str:
    """Documents that a docstring names are links in this one."""
    text = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)
    return re.sub(r"benchmarks/README\.md", "[benchmarks](../benchmarks/README.md)", text)


if __name__ == "__main__":
    TARGET.write_text(document())
