"""Converts values of files to Python: numbers as written, dates as texts, nothing rounded or left out."""

from __future__ import annotations

import base64
import datetime
import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from npu_vlrl.types import DataError

MAX_DIGITS = 400
"""Maximum number of digits before or behind the point with which a number is written; a float has fewer than 330."""

_PER_DAY = {"day": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_DAYS_BEFORE_1970, _DAYS_TO_10000 = 719_162, 2_932_897
"""Days from 0001-01-01 to 1970-01-01, and from 1970-01-01 to 10000-01-01."""


class WrittenFloat(float):
    """Number of a JSON text, with the digits in which it is written.

    Example: `WrittenFloat("1e-05").written == "1e-05"`
    """

    written: str

    def __new__(cls, written: str) -> WrittenFloat:
        number = super().__new__(cls, written)
        number.written = written
        return number


class TimeText(str):
    """Date, time or duration of a table as ISO 8601 text, which unlike Python's types represents all of them."""

    __slots__ = ()


def parse_json(text: bytes | str) -> Any:
    """Parses a JSON text; numbers with a point or exponent become `WrittenFloat`.

    Raises ValueError for invalid JSON, and for an object with a repeated key.
    """
    return json.loads(text, parse_float=WrittenFloat, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.60} stands twice in one object; keep one of them")
    return found


def is_number(value: Any) -> bool:
    """Whether a value is a number of Python, numpy or a table; booleans are not."""
    return isinstance(value, int | float | Decimal | np.integer | np.floating) and not isinstance(value, bool)


def number_text(number: Any) -> str:
    """Formats a number (see `is_number`) as a plain decimal text, without exponent and without trailing zeros.

    The digits are those of the file, or the shortest that distinguish the float from all others of its width. Raises
    ValueError for a number that is not finite, or that has more than `MAX_DIGITS` digits on a side of the point.

    Example: 1e-05 is "0.00001", 5.0 is "5", 2.50 is "2.5", float32 0.1 is "0.1"
    """
    if isinstance(number, int | np.integer):
        return str(int(number))
    written = number.written if isinstance(number, WrittenFloat) else str(number)
    exact = Decimal(written)
    if not exact.is_finite():
        raise ValueError(f"the number is {written}, which is not finite")
    if exact and not -MAX_DIGITS < exact.adjusted() < MAX_DIGITS:
        raise ValueError(f"the number {written:.40} has too many digits to be written out")
    text = f"{exact:f}" if exact else "0"
    return text.rstrip("0").rstrip(".") if "." in text else text


def to_python(scalar: pa.Scalar) -> Any:
    """Converts a value of a table. Numbers keep the digits of their width, dates and durations become `TimeText`.

    `Scalar.as_py` would widen float32 (0.1 becomes 0.10000000149…), and raise for dates and nanoseconds that Python's
    types cannot represent.
    """
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.StructScalar):
        names = [field.name for field in scalar.type]
        if len(set(names)) < len(names):
            raise ValueError(f"two fields of {', '.join(names):.80} have the same name; rename one")
        return {name: to_python(scalar[index]) for index, name in enumerate(names)}
    if isinstance(scalar, pa.MapScalar):
        return _object([(to_python(key), to_python(value)) for key, value in zip(*_entries(scalar), strict=True)])
    if isinstance(scalar, pa.ListScalar):
        return [to_python(value) for value in scalar.values]
    if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar):
        return to_python(scalar.value)
    if pa.types.is_temporal(scalar.type):
        return _time_text(scalar)
    if isinstance(scalar, pa.FloatScalar | pa.HalfFloatScalar):
        return float(str(np.dtype(scalar.type.to_pandas_dtype()).type(scalar.as_py())))
    return scalar.as_py()


def _entries(scalar: pa.MapScalar) -> tuple[pa.Array, pa.Array]:
    return scalar.values.field(0), scalar.values.field(1)


def _time_text(scalar: pa.Scalar) -> TimeText:
    if isinstance(scalar, pa.MonthDayNanoIntervalScalar):
        months, days, nanoseconds = scalar.as_py()
        return TimeText(f"{months} months {days} days {nanoseconds} ns")
    unit = getattr(scalar.type, "unit", "day" if pa.types.is_date32(scalar.type) else "ms")
    if isinstance(scalar, pa.DurationScalar):
        return TimeText(f"{scalar.value} {unit}")
    if not -_DAYS_BEFORE_1970 <= scalar.value // _PER_DAY[unit] < _DAYS_TO_10000:
        return TimeText(f"{scalar.value} {unit} since 1970-01-01")  # Arrow writes these wrongly
    return TimeText(scalar.cast(pa.string()).as_py())


def clean(text: str, where: str) -> str:
    """Returns the text. Raises DataError that begins with `where` for a null byte or half a surrogate pair."""
    if "\0" in text:
        raise DataError(f"{where}: the text contains a null byte; remove it")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(f"{where}: the text contains half of a surrogate pair; write the text again as UTF-8")
    return text


def says(value: Any) -> bool:
    """Whether a value is not empty: null, false, "" and containers of nothing else are.

    Tables fill absent fields with null, and writers of chats give each message all fields.
    """
    if isinstance(value, dict):
        return any(map(says, value.values()))
    if isinstance(value, list | tuple):
        return any(map(says, value))
    return value is not None and value is not False and not (isinstance(value, str | bytes) and not value)


def as_json(value: Any, where: str) -> Any:
    """Converts a value to JSON, for processes that receive it so: exact decimals and dates become texts, bytes base64.

    Raises DataError that begins with `where` for a value without such a form.
    """
    if isinstance(value, dict):
        return {str(key): as_json(part, f"{where}.{key}") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part, f"{where}[{index}]") for index, part in enumerate(value)]
    if isinstance(value, np.ndarray):
        return as_json(list(value), where)
    if isinstance(value, str):
        return str(clean(value, where))
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, WrittenFloat) and math.isinf(value):
        raise DataError(f"{where}: the number {value.written:.40} is larger than any float; write it as a text")
    if isinstance(value, float | np.floating):
        return float(str(value))
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return str(value)
    raise DataError(f"{where}: {type(value).__name__} {value!r:.60} has no form in JSON; change its type")
