"""The ids of Qwen's control tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_vlrl.types import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TURN = "<|im_end|>"
IMAGE = "<|image_pad|>"


def special_tokens(tokenizer: PreTrainedTokenizerBase, with_images: bool, owner: str) -> SpecialTokens:
    """The control tokens that the tokenizer has; no placeholders for a text-only model (`with_images=False`).

    Raises ValueError when it lacks `<|im_end|>` or, with images, `<|image_pad|>`; `owner` begins the message.
    """
    ids = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    needed = [END_OF_TURN, IMAGE] if with_images else [END_OF_TURN]
    if missing := [name for name in needed if name not in ids]:
        raise ValueError(f"{owner}: the tokenizer has no special token {missing[0]}; use one of a Qwen model")
    end_of_turn = tuple(ids[name] for name in (END_OF_TURN, "<|endoftext|>") if name in ids)
    if not with_images:
        return SpecialTokens(end_of_turn)
    vision = ("<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    return SpecialTokens(end_of_turn, ids[IMAGE], *(ids.get(name) for name in vision))
