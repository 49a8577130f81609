"""Converts ids back to text, token by token: characters of a byte-level BPE may span several tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from npu_vlrl.model.families import CHATML, family_of_path


def _byte_of_character() -> dict[str, int]:
    """Character of each byte in the vocabularies of byte-level BPEs (Radford et al. 2019): the byte itself where it is
    visible in Latin-1, and else the next character from U+0100 on.
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


BYTES = _byte_of_character()


class TokenTexts:
    """Texts of a tokenizer's tokens. Raises OSError or ValueError when `folder` has no readable tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
        except OSError:
            raise
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from error
        family = family_of_path(str(folder))
        self.chat = CHATML if family is None else family.chat
        """Control tokens of the folder's model."""
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self.control = frozenset(number for number, token in added.items() if token.special)
        """Ids of tokens that only a template may write."""
        self._bytes = cache(self._look_up)

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Text of each token. A character that spans several tokens stands at the last of them, the others are empty;
        bytes that are no character become U+FFFD.
        """
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        found = []
        for number in ids:
            name = self._added.get(number)
            if name is None:
                found.append(reader.decode(self._bytes(number)))
            else:
                broken = reader.decode(b"", final=True)
                reader.reset()
                found.append(broken + name)
        if found:
            found[-1] += reader.decode(b"", final=True)
        return found

    def _look_up(self, number: int) -> bytes:
        name = self._tokenizer.id_to_token(number)
        if name is None:
            return f"⟨{number}⟩".encode()
        return bytes(BYTES[c] for c in name) if set(name) <= BYTES.keys() else name.encode()


def find_tokenizer(candidates: Sequence[Path]) -> TokenTexts | None:
    """Tokenizer texts of the first folder with a readable tokenizer."""
    for folder in candidates:
        try:
            return TokenTexts(folder)
        except (OSError, ValueError):
            continue
    return None
