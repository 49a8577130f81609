"""Base class and field types of the sections of the configuration."""

from __future__ import annotations

import os.path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from npu_vlrl.types import MAX_REWARD

Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Earned = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]


def expand_home(*fields: str) -> Any:
    """Validator of paths that replaces a leading `~` by the home folder; shells do not expand it after `key=`."""
    return field_validator(*fields)(lambda value: value and os.path.expanduser(value))


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key and what to change."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def changed(self) -> list[str]:
        """Fields that differ from their defaults; those without a default always do."""
        defaults = {
            name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()
        }
        return [key for key, value in self if value != defaults[key]]
