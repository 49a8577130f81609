"""Plain readings: a table of golds, answers and verdicts, and numbers at random in all their writings."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from npu_vlrl.tasks.benchmark import reward as benchmark
from npu_vlrl.tasks.geo3k import reward as geometry3k
from npu_vlrl.tasks.rotation.angle import read_angle
from npu_vlrl.types import DataError
from npu_vlrl.workflow.rewards import math_verify, tagged
from npu_vlrl.workflow.rewards.answers import Number, Option, read, same_plain
from npu_vlrl.workflow.rewards.answers.reading import LONGEST
from npu_vlrl.workflow.rewards.extract import letter
from npu_vlrl.workflow.rewards.math_verify import check_gold, equals

EQUAL, DIFFERENT, REFUSED = "equal", "different", "refused"


def _table() -> list[tuple[str, str, str]]:
    lines = (Path(__file__).parent / "verdicts.tsv").read_text("utf-8").split("\n")
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [tuple(re.sub(r"<U\+([0-9A-F]{4})>", lambda c: chr(int(c[1], 16)), cell) for cell in row) for row in rows]  # type: ignore[misc]


TABLE = _table()
JUDGED = [(gold, answer, verdict) for gold, answer, verdict in TABLE if verdict != REFUSED]


def test_the_table_is_whole() -> None:
    assert len(TABLE) > 700 and {verdict for _, _, verdict in TABLE} == {EQUAL, DIFFERENT, REFUSED}
    assert len({(gold, answer) for gold, answer, _ in TABLE}) == len(TABLE)


@pytest.mark.parametrize(("gold", "answer", "verdict"), JUDGED)
def test_verdicts(gold: str, answer: str, verdict: str) -> None:
    check_gold(gold)
    assert equals(gold, answer) is (verdict == EQUAL)


@pytest.mark.parametrize("gold", [gold for gold, _, verdict in TABLE if verdict == REFUSED])
def test_golds_without_one_value_are_refused(gold: str) -> None:
    with pytest.raises(DataError, match="the gold answer .*(write|give)"):
        check_gold(gold)


def test_refusals_name_the_gold_its_readings_and_the_remedy() -> None:
    with pytest.raises(
        DataError, match=r"'1,5' can be read as the list 1, 5 or as the number 1\.5; write a decimal poi"
    ):
        check_gold("1,5")
    with pytest.raises(
        DataError, match=r"'3 4' can be read as the list 3, 4 or as 3 times 4; write the sign between th"
    ):
        geometry3k.check_gold("3 4")
    with pytest.raises(
        DataError, match=r"'12,34,567' can be read as the list 12, 34, 567 or as the number 1234567; wri"
    ):
        check_gold("12,34,567")
    with pytest.raises(DataError, match=r"can be read as 2 \+ 5/3 or as 2 times 5/3"):
        check_gold("2\\frac{5}{3}")


def test_training_and_evaluation_read_boxes_alike() -> None:
    """Every tenth row, the gold of a benchmark and of the training rule: the same verdict."""
    for gold, answer, verdict in JUDGED[::10]:
        if "{" in answer.replace("\\{", "").replace("}", "") or answer.count("{") == answer.count("}"):
            text = f"So \\boxed{{{answer}}}."
            extra = {"benchmark": "math500"}
            assert benchmark.score(gold, text, extra).solved is math_verify.score(gold, text).solved, (gold, answer)
            assert benchmark.score(gold, text, extra).solved is (verdict == EQUAL)


def test_letters_are_the_same_to_both_rules() -> None:
    for gold, answer, verdict in JUDGED:
        reading = read(gold)
        if isinstance(reading, Option) and gold.isalpha() and gold.isupper() and isinstance(read(answer), Option):
            assert (letter(f"\\boxed{{{answer}}}") == gold) is (verdict == EQUAL), (gold, answer)


@pytest.mark.parametrize(
    ("gold", "content", "right"),
    [
        ("5", "5.0", True),
        ("5.0", "5", True),
        ("1000", "1,000", True),
        ("1,000", "1000", True),
        ("0.00001", "1e-05", True),
        ("1e-05", "0.00001", True),
        ("1/2", "0.5", True),
        ("5 cm", "5 m", False),
        ("5", "6", False),
        ("5", "5 or 6", False),
        ("B", "(B)", True),
        ("B", "B. 12 cm", True),
        ("B", "C", False),
        ("left", "LEFT", True),
        ("left", "left.", False),  # words are compared as they are
        ("left", "felt", False),
        ("\\sqrt{4}", "2", False),  # no mathematics here
        ("\\sqrt{4}", "\\sqrt 4", False),
        ("2\\sqrt{3}", "2 \\sqrt{3}", True),
        ("[10, 20, 30, 40]", "[10,20,30,40]", True),  # a box in an image
        ("[10, 20, 30, 40]", "[20, 10, 30, 40]", False),
        ("(1, 2)", "(1,2)", True),
        ("x = 5", "5", True),
    ],
)
def test_tagged_reads_numbers_and_letters(gold: str, content: str, right: bool) -> None:
    assert tagged.score(gold, f"<answer>{content}</answer>").solved is right


def test_tagged_refuses_a_number_of_two_readings() -> None:
    with pytest.raises(DataError, match="can be read as the list 1, 5 or as the number 1.5"):
        tagged.check_gold("1,5")
    tagged.check_gold("1,5", choices=["1,5", "2,5"])


def _grouped(digits: str, separator: str) -> str:
    return re.sub(r"(?<=\d)(?=(?:\d{3})+$)", lambda _: separator, digits)


def _writings(value: Fraction) -> list[str]:
    """A decimal number in all writings, each made by string operations alone."""
    sign = "-" if value < 0 else ""
    places = next(n for n in range(30) if (value * 10**n).denominator == 1)
    digits = str(abs(value.numerator * 10**places // value.denominator)).rjust(places + 1, "0")
    whole, decimals = digits[: len(digits) - places], digits[len(digits) - places :]
    tail = f".{decimals}" if decimals else ""
    written = [f"{whole}{tail}", f"{whole}{tail or '.'}0", f"0{whole}{tail}", f"{whole}{tail}e0", f"{digits}e-{places}"]
    if len(whole) > 3:
        separators = (
            ",",
            "{,}",
            "\\,",
            " ",
            "\N{THIN SPACE}",
            "\N{NO-BREAK SPACE}",
            "\N{NARROW NO-BREAK SPACE}",
            "~",
            "'",
        )
        written += [_grouped(whole, separator) + tail for separator in separators]
    for times in ("\\times 10^{%d}", "\\cdot 10^{%d}", " \\times10^{%d}", "*10^{%d}", "E%d", "e%+d"):
        written.append(f"{digits[0]}.{digits[1:] or '0'}{times % (len(digits) - 1 - places)}")
    written.append(f"{digits}/1" + "0" * places)
    written.append(f"\\frac{{{digits}}}{{1{'0' * places}}}")
    if places and int(whole):
        written.append(f"{whole}\\frac{{{decimals}}}{{1{'0' * places}}}")
        written.append(f"{whole} {decimals}/1{'0' * places}")
    wide = str.maketrans("0123456789.,", "０１２３４５６７８９．，")
    bold = str.maketrans("0123456789", "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗")
    written += [written[0].translate(wide), written[0].translate(bold), f"\\text{{{written[0]}}}", f"${written[0]}$"]
    signed = [(sign.replace("-", "\N{MINUS SIGN}") if i % 2 else sign) + text for i, text in enumerate(written)]
    return [*signed, f"x = {signed[0]}", f"{signed[0]} cm", f"\\left({signed[0]}\\right)", f"{signed[0]}."]


decimals = st.builds(lambda n, places: Fraction(n, 10**places), st.integers(-(10**9), 10**9), st.integers(0, 12))


@given(decimals, st.data())
@settings(max_examples=300, deadline=None)
def test_a_number_is_equal_to_itself_in_any_writing(value: Fraction, data: st.DataObject) -> None:
    one, other = data.draw(st.sampled_from(_writings(value))), data.draw(st.sampled_from(_writings(value)))
    assert same_plain(one, other), (one, other)
    reading = read(one)
    assert not isinstance(reading, Number) or reading.value == value


@given(decimals, decimals, st.data())
@settings(max_examples=300, deadline=None)
def test_different_numbers_are_different_in_any_writing(one: Fraction, other: Fraction, data: st.DataObject) -> None:
    assume(one != other)
    near = data.draw(st.sampled_from([other, one + Fraction(1, 10**20), one * 10, -one, one / 1000]))
    assume(near != one)
    gold, answer = data.draw(st.sampled_from(_writings(one))), data.draw(st.sampled_from(_writings(near)))
    assert not same_plain(gold, answer), (gold, answer)


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_fractions_are_compared_exactly(above: int, below: int, times: int) -> None:
    gold, answer = f"\\frac{{{above}}}{{{below}}}", f"{above * times}/{below * times}"
    assert same_plain(gold, answer)
    assert not same_plain(gold, f"{above * times + 1}/{below * times}")


@given(st.text(alphabet="abcdefgh", min_size=2, max_size=8))
@settings(max_examples=100, deadline=None)
def test_a_word_is_equal_to_no_other_order_of_its_letters(word: str) -> None:
    assume(word != word[::-1])
    assert same_plain(word, word.upper()) and not same_plain(word, word[::-1])


@given(st.text(max_size=40), st.text(alphabet="0123456789., \\{}()[]^_/-+=×frac½²°$%cmtexAB;", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_has_a_reading_that_is_its_own(noise: str, numbers: str) -> None:
    for text in (noise, numbers):
        assert read(text) == read(text)
        same_plain(text, noise)
        read_angle(text)


@pytest.mark.parametrize(
    "part", ["9", "1,", "(", "\\frac{", "\\text{", "5 cm ", "A, ", "x=", "^{2", "and ", "1 000 ", "[1;"]
)
def test_a_megabyte_is_read_in_linear_time(part: str) -> None:
    """With the square of a megabyte in steps none of these would end within the time of a test."""
    text = part * (1_000_000 // len(part))
    assert not same_plain("5", text) and not tagged.score("5", f"<answer>{text}</answer>").solved
    read(text[:LONGEST])
    letter(f"answer {text}")


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("The answer is B", "B"),
        ("Final answer: (C)", "C"),
        ("**Answer: D**", "D"),
        ("Answer: I think it is C", "C"),
        ("Answer:\nB", "B"),
        ("Answer：B", "B"),
        ("The answer must be (B)", "B"),
        ("The answer is not A but C", "C"),
        ("The answer is A, not B", "A"),
        ("The answer is A. B is wrong", "A"),
        ("The answer is A because I saw it", "A"),
        ("The answer is A or B", None),
        ("The answer is A cat", None),
        ("The answer is 5", None),
        ("The answer is option (C)", "C"),
        ("the answer is \\text{C}", "C"),
        ("答案是B", "B"),
        ("答案：C", "C"),
        ("\\boxed{x + 1}. So the answer is: \\mathbf{D}", "D"),
        ("\\boxed{3.2}. The answer is A. No, the answer is B", "B"),
        ("\\boxed{\\text{(E) all}}. The answer is A", "E"),
        ("\\boxed{B, C}", None),
    ],
)
def test_the_letter_that_a_text_states(text: str, stated: str | None) -> None:
    assert letter(text) == stated
