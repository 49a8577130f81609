"""Renders messages as token ids, for any Hugging Face chat template that uses the control tokens of its family.

A conversation grows by *deltas*: the sampled ids are kept, id for id, and only the text that the template adds after
them is tokenised. Text that comes from users, tools or the policy can never turn into a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import jinja2

from npu_vlrl.model.families import CHATML, ChatFormat
from npu_vlrl.model.tokens import special_tokens
from npu_vlrl.types import (
    DataError,
    Image,
    ImageInput,
    Message,
    Segment,
    SegmentKind,
    SpecialTokens,
    ToolResult,
)
from npu_vlrl.workflow.thought import opened_thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Two Unicode noncharacters, which no interchanged text should hold; content that does hold the first is escaped too.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_PROBE = "probe"
END_OF_THOUGHT = "</think>"


class ImageDescriber(Protocol):
    """Function of one model: the number of patches and tokens of an image."""

    def describe(self, image: Image) -> ImageInput: ...


@dataclass(frozen=True)
class Conversation:
    """A conversation that waits for the policy's next turn.

    Example: after `renderer.open(task.messages)` the context is one PROMPT; a reply adds an ACTION and an OBSERVATION.
    """

    messages: tuple[Message, ...]
    text: str
    """Text that the template wrote, generation prompt included, with one placeholder an image. Control tokens inside
    content are marked (see `_ControlTokens.mark`), so this is for comparing, not for reading."""
    context: tuple[Segment, ...]
    """Segments that the engine receives next."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The function schemas given to `Renderer.open`."""
    rewritten: bool = False
    """Whether the template rewrote history at the last step: `context` is then a fresh PROMPT, not a continuation."""

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.context))

    opened_thought: str = ""
    """Beginning of the coming turn in the generation prompt, such as `<think>\\n`: the thought that it leaves open."""


class _ControlTokens:
    """Separates control tokens written by the template from the same characters inside content.

    `mark` replaces each control token in content by a reversible mark before the template sees it. `encode` takes the
    rendered text: a remaining control token was written by the template, and a mark becomes ordinary characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._names = names = [_OPEN, *special]
        self._marks = {name: f"{_OPEN}{index}{_CLOSE}" for index, name in enumerate(names)}
        self._find_name = re.compile("|".join(map(re.escape, names)))
        self._find_mark = re.compile(f"{_OPEN}([1-9][0-9]*){_CLOSE}")
        self._as_characters = [
            tokenizer.encode(name, add_special_tokens=False, split_special_tokens=True) for name in names
        ]

    def mark(self, content: str) -> str:
        if broken := re.search("[\ud800-\udfff]", content):
            raise DataError(f"text holds half of a surrogate pair, {broken[0]!a}: repair the encoding of the data")
        return self._find_name.sub(lambda found: self._marks[found[0]], content)

    def last(self, rendered: str) -> int:
        """Position of the last control token that the template wrote; 0 without any."""
        return max([0, *map(rendered.rfind, self._names[1:])])

    def encode(self, rendered: str) -> list[int]:
        """Encodes a marked text. Without marks the result is the tokenizer's own encoding."""
        ids: list[int] = []
        for position, piece in enumerate(self._find_mark.split(rendered)):
            if position % 2:  # re.split puts what the group matched between the pieces of text
                ids += self._as_characters[int(piece)]
            elif piece:
                text = piece.replace(self._marks[_OPEN], _OPEN)
                ids += self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids


class Renderer:
    """Renders the conversations of one model.

    `images` is None for a text-only model. `template_name` appears in errors. `chat_template` replaces the one that
    came with the tokenizer. Raises ValueError when there is no chat template, or when the tokenizer lacks the end of
    turns or, with `images`, their placeholder.
    """

    special: SpecialTokens
    """Ids of the special tokens; without placeholders for a text-only model."""
    opens_thought: bool
    """Whether the generation prompt ends inside a `<think>`, so that the policy samples no such tag."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        images: ImageDescriber | None,
        template_name: str = "of the tokenizer",
        chat_template: str | None = None,
        chat: ChatFormat = CHATML,
    ) -> None:
        self.chat = chat
        self._tokenizer = tokenizer
        self._images = images
        self._name = f"chat template {template_name!r}"
        self._template = chat_template
        if chat_template is None and tokenizer.chat_template is None:
            raise ValueError(f"{self._name}: the tokenizer has none; add chat_template.jinja to the model's folder")
        self.special = special_tokens(tokenizer, images is not None, self._name, chat)
        self._ends = {end: str(tokenizer.convert_ids_to_tokens(end)) for end in self.special.end_of_turn}
        self._control = _ControlTokens(tokenizer)
        self._plain_content = _PROBE in self._probe({"role": "user", "content": _PROBE})
        self._tool_role = self._has_tool_role()
        self.opens_thought = bool(self._opened_thought(self._probe(self._as_dict(Message("user", (_PROBE,))))))

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> Conversation:
        """Opens a conversation whose context is one PROMPT.

        `tools` are OpenAI function schemas for the template. A template without a section for tools (Qwen2.5-VL's)
        ignores them: the text is then the same as without.
        Raises DataError when the template cannot render the messages, drops one, or does not write exactly one
        placeholder for each image, and when there are images for a text-only model.
        """
        schemas = tuple(tools or ())
        described = self._describe(messages)
        text = self._render(messages, schemas)
        prompt = self._segment(SegmentKind.PROMPT, text, described)
        self._check_written(messages, text)
        return Conversation(tuple(messages), text, (prompt,), schemas, opened_thought=self._opened_thought(text))

    def reply(self, conversation: Conversation, action: Segment, new: Sequence[Message]) -> Conversation:
        """Adds the policy's turn and the messages that answer it.

        The ids of the action are kept. The template is given the turn with the `<think>` that it opened, so that it can
        tell the thought from the answer. The OBSERVATION starts with the control token that follows an answer when the
        action lacks it, because it was cut or ended otherwise. When the template changes anything before that point,
        the result is `rewritten`. Raises DataError as `open` does.
        """
        assert action.kind is SegmentKind.ACTION
        described = self._describe(new)
        answer = self.decode(action.token_ids)
        turn = Message("assistant", (conversation.opened_thought + answer,))
        messages = (*conversation.messages, turn, *new)
        text = self._render(messages, conversation.tools)
        before = conversation.text + self._control.mark(answer) + self.chat.closing
        if rewritten := not text.startswith(before):
            added = text
            seen = [image for segment in conversation.context for image in segment.images]
            context: tuple[Segment, ...] = (self._segment(SegmentKind.PROMPT, text, [*seen, *described]),)
        else:
            added = text[len(before) :]
            delta = (self.chat.closing + added).removeprefix(self._end_of(action.token_ids))
            context = (*conversation.context, action, self._segment(SegmentKind.OBSERVATION, delta, described))
        self._check_written(new, added)
        return Conversation(messages, text, context, conversation.tools, rewritten, self._opened_thought(text))

    def tool_messages(self, results: Sequence[ToolResult]) -> list[Message]:
        """Tool results as messages of the role "tool" where the template has it, else as one user message.

        The user message follows the Hermes convention of Qwen, which is what templates with the role write themselves.
        """
        if self._tool_role:
            return [Message("tool", (result.text, *result.images)) for result in results]
        parts: list[str | Image] = []
        for index, result in enumerate(results):
            opening = "<tool_response>\n" if index == 0 else "\n<tool_response>\n"
            parts += [opening + result.text, *result.images, "\n</tool_response>"]
        return [Message("user", tuple(parts))] if results else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes an action for judges and people, without the token that ends the turn."""
        ids = list(token_ids)
        end = self._end_of(ids)
        if end and end not in self.chat.spoken_ends:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _end_of(self, token_ids: Sequence[int]) -> str:
        """Text of the token that ended a turn; empty where the turn was cut."""
        return self._ends.get(token_ids[-1], "") if token_ids else ""

    def _opened_thought(self, text: str) -> str:
        """Opened thought of the generation prompt, which begins with the last control token; content has none."""
        return opened_thought(text[self._control.last(text) :])

    def _apply(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: the template expects plain strings
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"{self._name} cannot render messages of the roles [{roles}]: {error}") from error
        assert isinstance(text, str)
        return text

    def _probe(self, *messages: Mapping[str, Any]) -> str:
        """Renders `messages`; an empty text if the template refuses them."""
        try:
            return self._apply(messages)
        except DataError:
            return ""

    def _has_tool_role(self) -> bool:
        """Whether the template treats the role "tool" otherwise than an unknown role, and shows all of its content."""
        image = [] if self._images is None else [{"type": "image"}]
        listed = [{"type": "text", "text": _PROBE}, *image]
        content = listed if image or not self._plain_content else _PROBE
        earlier = [self._as_dict(Message(role, (role,))) for role in ("user", "assistant")]
        tool, unknown = (self._probe(*earlier, {"role": role, "content": content}) for role in ("tool", "stranger"))
        complete = _PROBE in tool and tool.count(self.chat.image) == len(image)
        return complete and tool.replace("tool", "stranger") != unknown.replace("tool", "stranger")

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        """Marked content in the template's form; adjacent texts are joined, since they could form a token later."""
        if self._plain_content and not message.images:
            return self._control.mark(message.text)
        content: list[dict[str, str]] = []
        for is_image, parts in groupby(message.parts, key=lambda part: isinstance(part, Image)):
            if is_image:
                content += [{"type": "image"} for _ in parts]
            else:
                content.append({"type": "text", "text": self._control.mark("".join(map(str, parts)))})
        return content

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """Renders the whole conversation as marked text."""
        schemas = json.loads(self._control.mark(json.dumps(list(tools), ensure_ascii=False)))
        return self._apply([self._as_dict(message) for message in messages], schemas)

    def _as_dict(self, message: Message) -> dict[str, Any]:
        return {"role": self._control.mark(message.role), "content": self._content(message)}

    def _check_written(self, messages: Sequence[Message], text: str) -> None:
        """Raises DataError when the template drops text of a message, e.g. of a role that it does not know."""
        for message in messages:
            content = self._content(message)
            pieces = [content] if isinstance(content, str) else [item.get("text", "") for item in content]
            if message.role == "assistant":  # templates may drop what it thought in earlier turns
                pieces = [piece.rpartition(END_OF_THOUGHT)[2] for piece in pieces]
            if not all(piece.strip() in text for piece in pieces):  # they may trim the ends of any text
                raise DataError(f"{self._name} drops text of a {message.role!r} message: use a role that it knows")

    def _describe(self, messages: Sequence[Message]) -> list[ImageInput]:
        images = [image for message in messages for image in message.images]
        if not images:
            return []
        if self._images is None:
            raise DataError(
                f"{self._name} belongs to a text-only model, but the messages hold {len(images)} images: "
                "choose a vision-language model or data without images"
            )
        return [self._images.describe(image) for image in images]

    def _segment(self, kind: SegmentKind, text: str, images: Sequence[ImageInput]) -> Segment:
        ids = self._control.encode(text)
        found = ids.count(self.special.image) if self.special.image is not None else 0
        if found != len(images):
            raise DataError(
                f"{self._name} writes {found} image placeholders for {len(images)} images: "
                "put images where the template takes them, or choose a vision-language template"
            )
        coming = iter(images)
        expanded: list[int] = []
        for token in ids:
            expanded += self._placeholders(next(coming)) if token == self.special.image else [token]
        return Segment(kind, tuple(expanded), self.special, images=tuple(images))

    def _placeholders(self, image: ImageInput) -> list[int]:
        special = self.special
        assert special.image is not None
        inner = [special.image] * image.n_tokens
        if not self.chat.frames_images:
            return inner
        assert special.vision_start is not None and special.vision_end is not None
        return [special.vision_start, *inner, special.vision_end]
