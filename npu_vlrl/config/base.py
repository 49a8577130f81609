"""What every section of the configuration is made of."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key and what to change."""


def at_home(path: str | None) -> str | None:
    """A path with the home that a `~` in front stands for; no shell puts one behind a `key=`."""
    return None if path is None else os.path.expanduser(path)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )
