"""Texts of others: which a policy can be given, and how messages about them are made safe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_vlrl.workflow.texts import MAX_MESSAGE, MAX_TEXT, described, flaw, mended, told

anything = st.text(st.characters(codec=None, categories=None) | st.sampled_from("\x00\ud800\udfff\ud83d\ude00\ufeff"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("plain, ü, 😀, \x1b, \uffff", None),
        ("a\ud800", "half a surrogate pair, '\\ud800' (character 2)"),
        ("\udc00", "half a surrogate pair, '\\udc00' (character 1)"),
        ("ab\x00", "a NUL, '\\x00' (character 3)"),
        ("x" * MAX_TEXT, None),
        ("x" * (MAX_TEXT + 1), "100,001 characters, more than 100,000"),
    ],
)
def test_what_no_policy_can_be_given_is_named(text: str, expected: str | None) -> None:
    assert flaw(text) == expected


@given(anything)
def test_flaws_are_what_utf8_cannot_hold_and_nul(text: str) -> None:
    try:
        text.encode()
        holds = "\x00" not in text
    except UnicodeEncodeError:
        holds = False
    assert (flaw(text) is None) == holds


@given(anything)
def test_a_mended_text_is_utf8_and_a_whole_one_stays_as_it_is(text: str) -> None:
    mended(text).encode()
    if flaw(text.replace("\x00", "")) is None:
        assert mended(text) == text


def test_half_a_pair_is_replaced_and_two_halves_are_one_character() -> None:
    assert mended("a\ud800b") == "a\ufffdb"
    assert mended("\ud83d\ude00") == "😀"


@given(anything)
def test_a_message_can_always_be_shown(text: str) -> None:
    shown = told(text)
    assert flaw(shown) is None and len(shown) <= 6 * MAX_MESSAGE


def test_messages_are_cut_and_exceptions_are_described_whatever_they_say() -> None:
    assert told("a" * 3000) == "a" * MAX_MESSAGE + "… (3,000 characters)"
    assert told("a\ud800\x00") == "a\\ud800\\x00"

    class Odd(Exception):
        def __str__(self) -> str:
            raise KeyError

    assert described(ValueError("a\udfff")) == "ValueError: a\\udfff"
    assert described(Odd()) == "Odd: its message raised KeyError"
