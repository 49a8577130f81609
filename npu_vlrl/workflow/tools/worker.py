"""The service of a user's tool: its file is imported, and its function runs, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from npu_vlrl.types import Image, Message, Task, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext
from npu_vlrl.workflow.tools.frame import Frame
from npu_vlrl.workflow.tools.invoke import invoke
from npu_vlrl.workflow.tools.schema import function_schema
from npu_vlrl.workflow.workers import load_function
from npu_vlrl.workflow.workers.serve import Handler
from npu_vlrl.workflow.workers.wire import Content, json_part


def open_service(options: Mapping[str, Any]) -> tuple[dict[str, Any], Handler]:
    """Says hello with the tool's schema. Raises ValueError when file, function or signature cannot be used."""
    function = load_function(options["function"])
    schema = function_schema(function)
    given = get_type_hints(function).get("return", ToolResult)
    if given in (str, int, float, bool, list, dict, type(None)):
        raise ValueError(f"{options['function']} returns {given.__name__}; let it return a ToolResult")

    def handle(request: Content, images: Sequence[Image]) -> tuple[Content, Sequence[Image]]:
        result = invoke(function.__name__, function, unpack(request, images), request["arguments"])
        return {"text": result.text, "error": result.error}, result.images

    return schema, handle


def pack(ctx: ToolContext) -> tuple[Content, list[Image]]:
    """A context as JSON, in which numbers stand for images of a list without repetitions.

    What of `task.extra` is neither JSON nor an image stays behind.
    """
    images: dict[Image, int] = {}

    def number(image: Image) -> int:
        return images.setdefault(image, len(images))

    task = ctx.task
    messages = [
        (message.role, [number(part) if isinstance(part, Image) else part for part in message.parts])
        for message in task.messages
    ]
    pictures = {key: number(value) for key, value in task.extra.items() if isinstance(value, Image)}
    content = {
        "task": {"id": task.id, "answer": task.answer, "data_source": task.data_source, "extra": json_part(task.extra)},
        "messages": messages,
        "pictures": pictures,
        "images": [number(image) for image in ctx.images],
        "frames": [(frame.stored, frame.canvas, frame.seen, frame.scale) for frame in ctx.frames],
    }
    return content, list(images)


def unpack(content: Content, images: Sequence[Image]) -> ToolContext:
    messages = tuple(
        Message(role, tuple(images[part] if isinstance(part, int) else part for part in parts))
        for role, parts in content["messages"]
    )
    fields = content["task"]
    extra = {**fields["extra"], **{key: images[number] for key, number in content["pictures"].items()}}
    frames = tuple(Frame(tuple(a), tuple(b), tuple(c), scale) for a, b, c, scale in content["frames"])
    task = Task(**{**fields, "extra": extra}, messages=messages)
    return ToolContext(task, tuple(images[number] for number in content["images"]), frames)
