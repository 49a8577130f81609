"""Values of files: numbers keep their digits, dates of any size are texts, nothing is rounded or left out."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies

from npu_vlrl.data.values import TimeText, WrittenFloat, as_json, number_text, parse_json, says, to_python
from npu_vlrl.types import DataError

WRITTEN = [
    ("5.0", "5"),
    ("12.00", "12"),
    ("100.0", "100"),
    ("2.50", "2.5"),
    ("-0.0", "0"),
    ("0.0", "0"),
    ("1e-05", "0.00001"),
    ("1E5", "100000"),
    ("1e+16", "10000000000000000"),
    ("-2.5e-6", "-0.0000025"),
    ("0.12345678901234567890123", "0.12345678901234567890123"),
    ("123456789012345678901.5", "123456789012345678901.5"),
]


@pytest.mark.parametrize(("written", "text"), WRITTEN)
def test_numbers_of_json_are_plain_decimals_with_the_digits_of_the_file(written: str, text: str) -> None:
    value = parse_json(f'{{"a": [{written}]}}')["a"][0]
    assert value == float(written) and number_text(value) == text
    assert json.dumps(value) == json.dumps(float(written))


OF_TYPES = [
    (0.1, "0.1"),
    (5.0, "5"),
    (1e22, "1" + "0" * 22),
    (np.float32(0.1), "0.1"),
    (np.float16(0.1), "0.1"),
    (np.float64(1e-7), "0.0000001"),
    (np.int8(-3), "-3"),
    (10**30, "1" + "0" * 30),
    (Decimal("12.00"), "12"),
    (Decimal("1E+3"), "1000"),
]


@pytest.mark.parametrize(("number", "text"), OF_TYPES)
def test_numbers_of_every_width_have_their_shortest_digits(number: Any, text: str) -> None:
    assert number_text(number) == text


@given(strategies.floats(allow_nan=False, allow_infinity=False))
def test_the_text_of_a_float_is_that_float_and_has_no_exponent(number: float) -> None:
    """`repr` is exact and `Fraction` reads it without rounding."""
    for value in (number, parse_json(json.dumps([number]))[0]):
        text = number_text(value)
        assert set(text) <= set("-.0123456789") and not text.endswith((".", ".0"))
        assert Fraction(text) == Fraction(repr(number))


@pytest.mark.parametrize(
    "number", [float("nan"), float("-inf"), Decimal("NaN"), WrittenFloat("1e-500"), Decimal("1e9999")]
)
def test_numbers_that_cannot_be_written_out(number: Any) -> None:
    with pytest.raises(ValueError, match=r"not finite|too many digits"):
        number_text(number)


def test_json_that_would_lose_something() -> None:
    with pytest.raises(ValueError, match="the key 'c' stands twice"):
        parse_json('{"a": 1, "b": {"c": 1, "c": 1}}')
    with pytest.raises(DataError, match="x.a: the number 1e400 is larger than any float"):
        as_json(parse_json('{"a": 1e400}'), "x")


def column(storage: pa.DataType, kind: pa.DataType, value: int) -> pa.Array:
    return pa.array([value, None], storage).cast(kind)


TIMES = [
    (column(pa.int32(), pa.date32(), 1), "1970-01-02"),
    (column(pa.int32(), pa.date32(), 10**8), "100000000 day since 1970-01-01"),
    (column(pa.int32(), pa.date32(), 2_932_896), "9999-12-31"),
    (column(pa.int32(), pa.date32(), 2_932_897), "2932897 day since 1970-01-01"),
    (column(pa.int32(), pa.date32(), -719_162), "0001-01-01"),
    (column(pa.int32(), pa.date32(), -719_163), "-719163 day since 1970-01-01"),
    (column(pa.int64(), pa.date64(), 10**17), "100000000000000000 ms since 1970-01-01"),
    (column(pa.int64(), pa.timestamp("ns"), 1_700_000_000_000_000_001), "2023-11-14 22:13:20.000000001"),
    (column(pa.int64(), pa.timestamp("s", "UTC"), 10**15), "1000000000000000 s since 1970-01-01"),
    (column(pa.int64(), pa.duration("ns"), 123_456_789), "123456789 ns"),
    (column(pa.int64(), pa.duration("s"), 10**17), "100000000000000000 s"),
    (column(pa.int64(), pa.time64("ns"), 123_456_789), "00:00:00.123456789"),
    (pa.array([pa.MonthDayNano([1, 2, 3]), None]), "1 months 2 days 3 ns"),
]


@pytest.mark.parametrize(("array", "text"), TIMES)
def test_dates_and_times_of_any_size(array: pa.Array, text: str) -> None:
    """Days from the civil calendar; seconds from 1970 by hand."""
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 2], array)], ["when"])
    found = to_python(nested[0])["when"]
    assert found == [text, None] and type(found[0]) is TimeText


def test_values_of_tables() -> None:
    half = pa.array(np.array([0.1], np.float16))
    assert [to_python(value) for value in (pa.scalar(0.1, pa.float32()), half[0], pa.scalar(0.1))] == [0.1] * 3
    assert to_python(pa.scalar(Decimal("5.00"))) == Decimal("5.00")
    assert to_python(pa.array(["a"]).dictionary_encode()[0]) == "a"
    assert to_python(pa.scalar([("k", 1)], pa.map_(pa.string(), pa.int8()))) == {"k": 1}
    for kind in (pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 2), pa.list_view(pa.int8())):
        assert to_python(pa.scalar([1, None], kind)) == [1, None] and to_python(pa.scalar(None, kind)) is None
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    with pytest.raises(ValueError, match="two fields of a, a have the same name"):
        to_python(twice[0])
    with pytest.raises(ValueError, match="the key 'k' stands twice"):
        to_python(pa.scalar([("k", 1), ("k", 2)], pa.map_(pa.string(), pa.int8())))


def test_json_for_judges_and_tools() -> None:
    values = {
        "number": WrittenFloat("1e-05"),
        "exact": Decimal("5.00"),
        "small": np.float32(0.1),
        "flags": (np.bool_(True), False, None),
        "many": np.arange(3),
        "raw": b"\x00\xff",
        "when": datetime.datetime(2024, 1, 2, 3, 4),
        "wait": datetime.timedelta(seconds=90),
        "time": TimeText("2024-01-02"),
        "large": 10**30,
    }
    assert json.loads(json.dumps(as_json(values, "x"))) == {
        "number": 0.00001,
        "exact": "5.00",
        "small": 0.1,
        "flags": [True, False, None],
        "many": [0, 1, 2],
        "raw": "AP8=",
        "when": "2024-01-02T03:04:00",
        "wait": "0:01:30",
        "time": "2024-01-02",
        "large": 10**30,
    }
    for bad, words in (({"a": [object()]}, r"x.a\[0\]: object .* has no form in JSON"), ("\ud800", "x: .*surrogate")):
        with pytest.raises(DataError, match=words):
            as_json(bad, "x")


@pytest.mark.parametrize("value", [None, False, "", b"", [], {}, [None, {"a": ""}], {"a": {"b": []}}])
def test_values_that_say_nothing(value: Any) -> None:
    assert not says(value) and says([value, 0])
