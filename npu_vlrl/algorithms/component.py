"""Components: functions that the configuration names, each with the options that it takes.

A component is one file: its function, its options and its metrics. The tables of components are the vocabulary of the
section `algorithm`. A function of the user's own file is a component in the same form.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from npu_vlrl.common.fields import Section

FIXED = "fixed"
"""Metadata of the type of an option that no preset fills: the configuration has its default. Other options are null
there until a preset or the component fills them."""

SCORES = ("proximal_N", "reference_N", "values_N")
"""Names of the `types.Scores` that a component may need of the learner before an update."""


class Options(Section):
    """Base of the options of a component: typed keys with defaults, limits and docstrings; other keys are errors.

    Example: `class PowerOptions(Options): power: float = 2.0`
    """


@dataclass(frozen=True)
class Component:
    """A function of one subject and its options; without options it takes the subject alone."""

    function: Callable[..., Any]
    options: type[Any] | None = None
    """A subclass of `Options`, or a dataclass."""
    needs: frozenset[str] = frozenset()
    """Names of `SCORES`."""

    def __post_init__(self) -> None:
        if unknown := self.needs - set(SCORES):
            raise ValueError(f"needs names {', '.join(sorted(unknown))}; choose from {', '.join(SCORES)}")

    @property
    def option_names(self) -> tuple[str, ...]:
        """Names of the component's options."""
        if self.options is None:
            return ()
        if issubclass(self.options, BaseModel):
            return tuple(self.options.model_fields)
        return tuple(field.name for field in dataclasses.fields(self.options))


C = TypeVar("C", bound=Component)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Chosen(Generic[C]):
    """A component and the options that the configuration gives it."""

    component: C
    options: Any = None

    def __call__(self, subject: Any) -> Any:
        given = () if self.component.options is None else (self.options,)
        return self.component.function(subject, *given)


def marked(make: Callable[[F], Component]) -> Callable[[F], F]:
    """A decorator that leaves a function as it is, and makes the component that `component_of` finds."""

    def mark(function: F) -> F:
        function.__dict__["component"] = make(function)
        return function

    return mark


def component_of(function: Callable[..., Any], kind: type[C]) -> C:
    """The component of a decorated function. Raises ValueError for a component of another kind; a function without one
    is a component without options.
    """
    found = function.__dict__.get("component")
    if found is None:
        return kind(function)
    if not isinstance(found, kind):
        raise ValueError(f"it is decorated as {_named(type(found))} where {_named(kind)} is asked for; correct that")
    return found


def _named(kind: type[Any]) -> str:
    return kind.__name__


def table(kind: type[C], functions: Iterable[Callable[..., Any]]) -> dict[str, C]:
    """Components by the names of their functions."""
    return {function.__name__: component_of(function, kind) for function in functions}


def make_options(component: Component, given: Mapping[str, Any], key: str) -> Any:
    """The options of a component, from the values under the configuration's `key`.

    Raises ValueError, naming the key, for an unknown key and for a value of the wrong type or beyond its limits.
    """
    known = component.option_names
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
            raise ValueError(f"{key}.{name}: unknown option; {meant}")
    if component.options is None:
        return None
    try:
        return TypeAdapter(component.options).validate_python(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join([key, *map(str, first["loc"])])
        raise ValueError(f"{name}: {first['msg'].removeprefix('Value error, ')} (got {first['input']!r})") from None
