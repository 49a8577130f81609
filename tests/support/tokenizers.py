"""The real Qwen vocabulary and chat templates, taken from packages that ship them (test dependencies, not copies).

`dashscope` carries the byte-pair ranks of Qwen; `trl` carries the published chat templates. Neither is imported: only
their files are read. A template that `trl` lacks is in `tests/assets/chat_templates`.
"""

from __future__ import annotations

import base64
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATES = ("qwen2_5_vl", "qwen3_vl", "qwen2_5", "qwen3")
"""Names for `template`; the first two take images."""

ASSETS = Path(__file__).parents[1] / "assets" / "chat_templates"

CONTROL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|{shape}_{side}|>" for shape in ("object_ref", "box", "quad", "vision") for side in ("start", "end")),
    *(f"<|{medium}_pad|>" for medium in ("vision", "image", "video")),
]
"""Special tokens, ids 151643 to 151656 in the published vocabulary."""

ADDED_WORDS = [
    "<tool_call>",
    "</tool_call>",
    *(f"<|fim_{place}|>" for place in ("prefix", "middle", "suffix", "pad")),
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
"""Added tokens that are not special, ids 151657 to 151668."""


def _installed_file(package: str, path: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the tests need the package {package!r}: pip install --no-deps {package}")
    return Path(spec.submodule_search_locations[0]) / path


def template(name: str) -> str:
    """The chat template that a model is published with (never the variant patched for training)."""
    own = ASSETS / f"{name}.jinja"
    file = own if own.is_file() else _installed_file("trl", f"chat_templates/{name}.jinja")
    return file.read_text(encoding="utf-8")


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces whose merge makes `token`: what is left after every merge of a lower rank."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in zip(pieces, pieces[1:], strict=False)]
        best = joined.index(min(joined))
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return pieces[0], pieces[1]


@cache
def qwen_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer of Qwen2.5-VL, Qwen3-VL and their text siblings (151669 tokens), without a chat template.

    It is built once a process and is to be treated as read-only. Building takes about three seconds, hardly more
    than reading a saved copy, so nothing is cached on disk.
    """
    lines = _installed_file("dashscope", "resources/qwen.tiktoken").read_bytes().split()
    ranks = {base64.b64decode(token): int(rank) for token, rank in zip(lines[::2], lines[1::2], strict=True)}
    letters = bytes_to_unicode()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    by_rank = sorted(ranks, key=lambda token: ranks[token])
    pairs = [_last_merge(token, ranks) for token in by_rank if len(token) > 1]
    merges: Any = [(spell(left), spell(right)) for left, right in pairs]  # annotated as strings, wants pairs
    tokenizer = Qwen2Tokenizer(
        vocab={spell(token): rank for token, rank in ranks.items()},
        merges=merges,
        eos_token=CONTROL_TOKENS[0],  # the tokens of these arguments take ids before the others
        pad_token=CONTROL_TOKENS[0],
        extra_special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
    )
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in ADDED_WORDS])
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def byte_tokenizer(control: list[str]) -> Qwen2Tokenizer:
    """A tokenizer whose ids 0 to 255 are single bytes, with the named control tokens after them."""
    vocab = {letter: index for index, letter in enumerate(bytes_to_unicode().values())}
    added = [AddedToken(token, special=True, normalized=False) for token in control]
    ends = dict.fromkeys(("eos_token", "pad_token", "unk_token"), control[0])
    return Qwen2Tokenizer(vocab=vocab, merges=[], extra_special_tokens=added, **ends)
