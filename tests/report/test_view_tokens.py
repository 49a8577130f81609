"""Ids back to text, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_vlrl.report.view.tokens import BYTES, TokenTexts, find_tokenizer
from tests.support.learning import tiny_folder
from tests.support.scripted import tokenizer

TEXTS = TokenTexts(tiny_folder())


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_together_are_what_the_tokenizer_decodes(text: str) -> None:
    ids = encode(text)
    pieces = TEXTS.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer().decode(ids, clean_up_tokenization_spaces=False)


def test_a_character_of_several_tokens_stands_on_the_last_one() -> None:
    ids = encode("é🙂")
    assert len(ids) == 6  # every byte is a token of this small vocabulary
    assert TEXTS.pieces(ids) == ["", "é", "", "", "", "🙂"]


def test_bytes_that_are_no_character_are_shown_where_they_stop_to_be_one() -> None:
    first, second = encode("é")
    assert TEXTS.pieces([first]) == ["\ufffd"]
    assert TEXTS.pieces([second, *encode("a")]) == ["\ufffd", "a"]
    assert TEXTS.pieces([first, *encode("a")]) == ["", "\ufffda"]
    end = tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert TEXTS.pieces([first, end, second]) == ["", "\ufffd<|im_end|>", "\ufffd"]


def test_every_byte_has_a_character_of_its_own() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(BYTES.values()) == list(range(256)) and set(BYTES) == set(ByteLevel.alphabet())


def test_control_tokens_and_unknown_ids() -> None:
    assert TEXTS.id_of("<|im_end|>") in TEXTS.control
    assert TEXTS.id_of("<think>") is not None and TEXTS.id_of("<think>") not in TEXTS.control
    assert TEXTS.id_of("no such token") is None
    assert TEXTS.pieces([10**6]) == ["⟨1000000⟩"] and TEXTS.pieces([]) == []


def test_the_first_folder_that_can_be_read_is_taken(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken/tokenizer\.json: "):
        TokenTexts(broken)
    with pytest.raises(OSError):
        TokenTexts(tmp_path)
    assert find_tokenizer([tmp_path, broken, tiny_folder()]) is not None
    assert find_tokenizer([tmp_path, broken]) is None
