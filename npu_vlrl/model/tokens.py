"""The ids of a family's control tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_vlrl.model.families import CHATML, ChatFormat
from npu_vlrl.types import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def special_tokens(
    tokenizer: PreTrainedTokenizerBase, with_images: bool, owner: str, chat: ChatFormat = CHATML
) -> SpecialTokens:
    """The control tokens that the tokenizer has; no placeholders for a text-only model (`with_images=False`).

    Raises ValueError when it lacks the first end of turn or, with images, the placeholder; `owner` begins the message.
    """
    tokens = tokenizer.added_tokens_decoder.items()
    ids = {token.content: index for index, token in tokens if token.special or token.content in chat.spoken_ends}
    needed = [chat.end_of_turn[0], chat.image] if with_images else chat.end_of_turn[:1]
    if missing := [name for name in needed if name not in ids]:
        raise ValueError(f"{owner}: the tokenizer has no special token {missing[0]}; use one of a {chat.title} model")
    end_of_turn = tuple(ids[name] for name in chat.end_of_turn if name in ids)
    if not with_images:
        return SpecialTokens(end_of_turn)
    return SpecialTokens(
        end_of_turn, ids[chat.image], *(ids.get(name) for name in (chat.video, chat.image_start, chat.image_end))
    )
