"""OpenAI function schemas from typed signatures, and a validator for the part of JSON schema that they use.

Source of the form: https://json-schema.org/understanding-json-schema and OpenAI's function calling guide.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from npu_vlrl.workflow.tools.context import ToolContext

PIXELS = "in pixels of the image as you see it"
"""Phrase by which a docstring says what positions mean; `on_scale` replaces it for models that write them otherwise."""

_SCALARS: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}
_ARTICLES = {"integer": "an integer", "number": "a number", "string": "a string", "boolean": "true or false"}
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a tool `function(ctx, name: type = default, …)`; all but its first parameter are the model's.

    The first is called `ctx`, or has the type ToolContext: a function that leaves it out would lose an argument.
    Types: int, float, str, bool, Literal, list[…], tuple[…] of one type (its length becomes minItems and maxItems),
    and any of these `| None` (which also takes null). A parameter with a default is not required. The docstring gives
    the description, and a line `name: text` under `Args:` that of a parameter. Raises ValueError for anything else, or
    without a docstring.
    """
    name = function.__name__
    description, arguments = _read_docstring(function)
    if not description:
        raise ValueError(f"tool {name}: a docstring is needed; it tells the model what the tool does")
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise ValueError(f"tool {name}: {error}; import the types of its parameters at run time") from error
    _check_first(function, hints)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        where = f"tool {name}, parameter {parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{where}: it must be a plain named parameter")
        if parameter.name not in hints:
            raise ValueError(f"{where}: it needs a type")
        properties[parameter.name] = _type_schema(hints[parameter.name], where)
        if parameter.name in arguments:
            properties[parameter.name]["description"] = arguments[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _check_first(function: Callable[..., Any], hints: Mapping[str, Any]) -> None:
    """Raises ValueError where the first parameter is not the episode."""
    name, signature = function.__name__, inspect.signature(function)
    first = next(iter(signature.parameters.values()), None)
    if first is None or not (first.name == "ctx" or hints.get(first.name) is ToolContext):
        raise ValueError(
            f"tool {name} takes {signature}; its first parameter must be the episode, which is not the model's: write "
            f"def {name}(ctx: ToolContext, …) -> ToolResult"
        )


def on_scale(schema: Mapping[str, Any], scale: int) -> dict[str, Any]:
    """A copy of a tool's schema for a model whose positions run from 0 to `scale` instead of `PIXELS`."""
    copied = copy.deepcopy(dict(schema))
    said = f"from 0 to {scale} over the width and height of the image"
    for parameter in copied["function"]["parameters"]["properties"].values():
        if "description" in parameter:
            parameter["description"] = parameter["description"].replace(PIXELS, said)
    return copied


def _type_schema(annotation: Any, where: str) -> dict[str, Any]:
    if annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal and len({type(value) for value in arguments}) == 1 and type(arguments[0]) in _SCALARS:
        return {"type": _SCALARS[type(arguments[0])], "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0], where)}
    if origin in (Union, UnionType) and len(arguments) == 2 and type(None) in arguments:
        schema = _type_schema(next(kind for kind in arguments if kind is not type(None)), where)
        null = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
        return {**schema, "type": [schema["type"], "null"], **null}
    if origin is tuple and len(set(arguments)) == 1:
        size = len(arguments)
        return {"type": "array", "items": _type_schema(arguments[0], where), "minItems": size, "maxItems": size}
    raise ValueError(
        f"{where}: the type {annotation} has no schema; use int, float, str, bool, Literal, list[…] or a tuple of "
        "one type, such as tuple[float, float], or one of these and None"
    )


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description, and the text of each argument under `Args:`; a deeper line continues the one before."""
    description, _, section = (inspect.getdoc(function) or "").partition("Args:\n")
    arguments: dict[str, str] = {}
    name, indent = "", len(section) - len(section.lstrip(" "))
    for line in section.splitlines():
        if not line.startswith(" " * max(indent, 1)):
            break
        match = _ARGUMENT.match(line[indent:])
        if match:
            name = match[1]
            arguments[name] = match[2]
        elif name:
            arguments[name] += f" {line.strip()}"
    return " ".join(description.split()), arguments


def validate(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Problems of `arguments`, each as a phrase for the model; empty when there are none.

    `schema` is the object schema of the parameters. Numbers must be finite: JSON's 1e999 is not.
    """
    known = schema["properties"]
    problems = [f"{name!r} is missing" for name in schema["required"] if name not in arguments]
    for name, value in arguments.items():
        if name not in known:
            problems.append(f"{name[:80]!r} is not a parameter (there are: {', '.join(known) or 'none'})")
        else:
            problems += _check(value, known[name], name)
    return problems


def _check(value: Any, schema: Mapping[str, Any], path: str) -> list[str]:
    kind = schema["type"]
    if isinstance(kind, list):  # the type, or null
        if value is None:
            return []
        kind = kind[0]
    if kind == "array":
        return _check_array(value, schema, path)
    if not _is_a(value, kind):
        return [f"{path!r} must be {_ARTICLES[kind]}, not {_shorten(value)}"]
    if value not in schema.get("enum", [value]):
        return [f"{path!r} must be one of {', '.join(map(repr, schema['enum']))}, not {_shorten(value)}"]
    return []


def _check_array(value: Any, schema: Mapping[str, Any], path: str) -> list[str]:
    if not isinstance(value, list | tuple):
        return [f"{path!r} must be a list, not {_shorten(value)}"]
    size = schema.get("minItems", len(value))
    if len(value) != size:
        return [f"{path!r} must have {size} items, not {len(value)}"]
    return [problem for i, item in enumerate(value) for problem in _check(item, schema["items"], f"{path}[{i}]")]


def _is_a(value: Any, kind: str) -> bool:
    if kind == "number":
        # An integer too large for a float would fail inside the tool.
        return type(value) in (int, float) and abs(value) <= 1e300 and not math.isnan(value)
    return type(value) is {"integer": int, "string": str, "boolean": bool}[kind]


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
