"""YAML of configurations: PyYAML's safe loader and dumper, with numbers such as 1e-5 and no repeated keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import IO, Any

import yaml

_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"[-+]?([0-9]+(_[0-9]+)*(\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
"""Floats that YAML 1.1 reads as texts, because it requires a point and a sign of the exponent."""

_BREAKS = re.compile("[\x85\u2028\u2029]")
"""Line breaks of Unicode, which YAML reads as spaces unless they are escaped between double quotes."""

_TEXTS = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
"""Tags of plain words that stay texts: dates such as 2026-01-31, and `=`."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if name in seen:
                problem = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError("in a mapping", node.start_mark, problem, key.start_mark)
            seen.add(name)
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if _BREAKS.search(data) else None
        node: yaml.ScalarNode = self.represent_scalar("tag:yaml.org,2002:str", data, style)
        return node


def _complete(construct: Callable[..., Any]) -> Callable[[_Loader, Any], Any]:
    """Constructs a collection completely, so that a collection that contains itself is an error."""
    return lambda loader, node: construct(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _complete(_Loader.construct_mapping))
_Loader.add_constructor("tag:yaml.org,2002:seq", _complete(_Loader.construct_sequence))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _TEXTS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Dumper.add_representer(str, _Dumper.represent_str)
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))


def read_yaml(text: str | IO[str]) -> Any:
    """Parses the one document of a text or an open file; None where there is none.

    Raises yaml.YAMLError, whose message names file, line and column, for invalid YAML, tags of Python, repeated keys,
    and aliases of a collection inside itself.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def write_yaml(value: Any) -> str:
    """Writes dictionaries, lists and plain values as text that `read_yaml` reads back; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)
