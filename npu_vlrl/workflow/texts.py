"""Checks texts of others for characters that no tokenizer or record can hold, and shortens messages."""

from __future__ import annotations

import re

MAX_TEXT = 100_000
"""Maximum number of characters of a judge's, tool's or game's text to the policy: more than a context holds."""

MAX_MESSAGE = 2_000
"""Maximum length of a displayed error message, in characters."""

_HALF = re.compile("[\ud800-\udfff]")
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")


def half_pair(text: str) -> str | None:
    """Names the first half of a surrogate pair in `text`, which has no UTF-8, so that no tokenizer takes it.

    Example: `half_pair("a\ud800") == "half a surrogate pair, '\\ud800' (character 2)"`
    """
    return _named("half a surrogate pair", _HALF.search(text))


def flaw(text: str, limit: int = MAX_TEXT) -> str | None:
    """Reason why `text` cannot be given to a policy, as a phrase; None when it can. A NUL ends texts elsewhere."""
    if len(text) > limit:
        return f"{len(text):,} characters, more than {limit:,}"
    return half_pair(text) or _named("a NUL", re.search("\0", text))


def _named(what: str, found: re.Match[str] | None) -> str | None:
    return found and f"{what}, {found[0]!r} (character {found.start() + 1})"


def mended(text: str) -> str:
    """Replaces half surrogate pairs by U+FFFD, as decoders do with bytes that are not UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def told(text: str) -> str:
    """Makes an error message safe to show: shortens it, and escapes the characters that `flaw` names."""
    short = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}… ({len(text):,} characters)"
    return _UNUSABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), short)


def shown(value: object) -> str:
    """Beginning of a value's repr, on one line, for a message about it: it may be an array."""
    try:
        text = repr(value)
    except Exception as error:  # an int of too many digits has none
        text = f"a value of type {type(value).__name__} ({type(error).__name__})"
    return " ".join(told(text[:1000]).split())[:80]


def described(error: BaseException) -> str:
    """Type and message of an exception of others' code, whose message may raise, too."""
    try:
        message = str(error)
    except Exception as second:
        message = f"its message raised {type(second).__name__}"
    return told(f"{type(error).__name__}: {message}")
