"""Converts a row in verl's schema to a `Task`: each part of a row is used, or refused by name.

Decoded images are not kept. Columns outside the schema are ignored; `TaskFile.unused` lists them.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from npu_vlrl.config import ColumnsConfig
from npu_vlrl.data.columns import IMAGE_TAG, REFUSED, as_verl, used_columns
from npu_vlrl.data.files import Records, given, read_records
from npu_vlrl.data.images import decode_base64, decode_image, read_image, shortened
from npu_vlrl.data.values import TimeText, as_json, clean, is_number, number_text, says
from npu_vlrl.types import DataError, Image, Message, Task

_DATA_URI = re.compile("data:image/[^;,]{1,40};base64,")
NEEDED = ("data_source", "prompt", "reward_model")
ROLES = ("system", "user", "assistant", "tool")

_REMEDIES = {
    "tool_calls": "write the calls into its content as the model's chat template writes them, and remove the key",
    "reasoning_content": "write it into its content between <think> and </think>, or remove the key",
}
_LIMITS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_OF_AGENTS = ("tools_kwargs", "need_tools_kwargs", "interaction_kwargs")
"""Entries of `extra_info` by which verl's agent loops set up a row's tools. Here rewards and tools may read them."""


def written_schema(extra: Mapping[str, pa.DataType]) -> pa.Schema:
    """Schema of verl, in which our converters write parquet; `extra` are the fields of `extra_info`."""
    return pa.schema(
        {
            "data_source": pa.string(),
            "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
            "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
            "ability": pa.string(),
            "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
            "extra_info": pa.struct(dict(extra)),
        }
    )


@dataclass(frozen=True)
class TaskFile:
    """Tasks of a file, made row by row on access: `len(tasks)`, `tasks[17] -> Task`. A bad row raises DataError."""

    records: Records
    root: Path
    """Folder at which image paths start, and which they may not leave."""
    stem: str
    columns: ColumnsConfig | None = None

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> Task:
        record, where = self.records[row], self.records.where(row)
        try:
            if self.columns is not None:
                record = as_verl(record, self.columns, where, self.stem)
            task = task_from_record(record, where, self.root)
        except RecursionError as error:
            raise DataError(f"{where}: its values are nested too deeply; write it again") from error
        return dataclasses.replace(task, id=f"{self.stem}/{task.extra.get('id', row)}")

    def unused(self, row: int) -> list[str]:
        """Columns of a row, and fields of its `reward_model` and `extra_info`, that hold something without effect."""
        record, used = self.records[row], used_columns(self.columns)
        fields = {name: _said(record.get(name)) for name in ("reward_model", "extra_info") if name in used}
        return [
            *(name for name in given(record) if name not in used),
            *(f"reward_model.{name}" for name in fields.get("reward_model", ()) if name != "ground_truth"),
            *(f"extra_info.{name}" for name in fields.get("extra_info", ()) if name in _OF_AGENTS),
        ]


def _said(value: Any) -> list[str]:
    """Keys of a struct whose values are not empty."""
    return [name for name, part in value.items() if says(part)] if isinstance(value, dict) else []


def load_tasks(path: Path, root: Path | None = None, columns: ColumnsConfig | None = None) -> TaskFile:
    """Opens `path` (see `read_records`); `root` for image paths is the folder of the file unless given. `columns`
    describe rows in another schema than verl's.

    A task's id is `<file stem>/<extra_info.id or row number>`. Raises DataError when there is no row at all.
    """
    records = read_records(path)
    if not len(records):
        raise DataError(f"{path}: there are no rows in it; write the file again")
    return TaskFile(records, root or (path if path.is_dir() else path.parent), path.stem, columns)


def task_from_record(record: Mapping[str, Any], where: str, root: Path) -> Task:
    """Converts a row in verl's schema to a `Task` with `id=where`; decodes its images.

    Fields: `data_source`; `prompt`, a list of {role, content}, where content is a string in which each `<image>` stands
    for the next of `images`, or a list of {"type": "text", "text"} and {"type": "image"} parts, where `<image>` in a
    text is just text and an image part may bring its own `image`; `images`, a list of {"bytes"} | {"path"} | bytes |
    path | "data:image/…;base64,…", where bytes may be base64 text; `reward_model.ground_truth`, a string
    or number ("" when no gold is needed); `extra_info`, optional.
    Raises DataError naming `where`, the field and the remedy.
    """
    _check_columns(record, where)
    for name, remedy in REFUSED.items():
        if says(record.get(name)) and not (name == "image" and says(record.get("images"))):
            raise DataError(f"{where}, {name}: {remedy}")
    source = _typed(record.get("data_source"), str, where, "data_source")
    return Task(
        id=where,
        messages=_messages(record, where, root),
        answer=_gold(record, where),
        data_source=clean(source, f"{where}, data_source"),
        extra=_extra(record, where),
    )


def _check_columns(record: Mapping[str, Any], where: str) -> None:
    """Raises DataError for missing columns. A file in another format lacks them in every row, so the message names the
    columns that it has.
    """
    missing = [name for name in NEEDED if name not in record]
    if not missing:
        return
    known = {"image": "images", "problem": "prompt", "question": "prompt", "answer": "answer"}
    settings = " ".join(f"data.train.columns.{known[name]}={name}" for name in record if name in known)
    raise DataError(
        f"{where}, {', '.join(missing)}: missing; the row has the columns {shortened(', '.join(record), 200)}; write "
        f"rows as in docs/data.md, or say which columns hold what{f', as in {settings}' if settings else ''}"
    )


def control_character(text: str) -> str | None:
    """The first control character other than a newline, as `U+000C`: the trace of a wrongly decoded escape."""
    return next((f"U+{ord(c):04X}" for c in text if c != "\n" and unicodedata.category(c) == "Cc"), None)


def _gold(record: Mapping[str, Any], where: str) -> str | None:
    field = "reward_model.ground_truth"
    gold = _typed(record.get("reward_model"), dict, where, "reward_model").get("ground_truth")
    if gold is None:
        raise DataError(f'{where}, {field}: missing; give the right answer, or "" when the judge needs none')
    if is_number(gold):
        try:
            return number_text(gold)
        except ValueError as error:
            raise DataError(f"{where}, {field}: {error}; correct the answer") from error
    if not isinstance(gold, str) or isinstance(gold, TimeText):
        kind = "a date or time" if isinstance(gold, TimeText) else type(gold).__name__
        raise DataError(f"{where}, {field}: expected a string or a number, got {kind}; change its type")
    text = clean(gold, f"{where}, {field}")
    if found := control_character(text):
        raise DataError(
            f"{where}, {field}: the answer {text!r} contains the control character {found}; it was probably damaged "
            "when a backslash was read as an escape (\\f of \\frac), so correct it at its source"
        )
    return text if text.strip() else None


def _extra(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    values = _typed(_or(record.get("extra_info"), {}), dict, where, "extra_info")
    extra = {
        str(key): as_json(value, f"{where}, extra_info.{key}")
        for key, value in values.items()
        if value is not None  # tables fill absent keys with null
    }
    if not isinstance(extra.get("id"), (str, int, type(None))) or isinstance(extra.get("id"), bool):
        raise DataError(f"{where}, extra_info.id: expected str or int, got {extra['id']!r:.60}; change its type")
    return extra


def _messages(record: Mapping[str, Any], where: str, root: Path) -> tuple[Message, ...]:
    prompt = _typed(record.get("prompt"), list, where, "prompt")
    if not prompt:
        raise DataError(f"{where}, prompt: empty; give at least one message {{role, content}}")
    images = _typed(_or(record.get("images"), []), list, where, "images")
    decoded = [_image(image, where, f"images[{i}]", root) for i, image in enumerate(images)]
    unused = iter(decoded)
    messages = tuple(_message(m, where, f"prompt[{i}]", root, unused) for i, m in enumerate(prompt))
    if any(True for _ in unused):
        raise DataError(
            f"{where}, images: {len(decoded)} images, but the prompt has fewer {IMAGE_TAG} tags or image parts; write "
            f"{IMAGE_TAG} once for each image, where the model should see it"
        )
    if messages[-1].role == "assistant":
        raise DataError(
            f"{where}, prompt[{len(messages) - 1}]: the prompt ends with a message of the assistant, so the policy "
            "would see the answer; end it with the question, and give the answer in reward_model.ground_truth"
        )
    return messages


def _message(message: Any, where: str, field: str, root: Path, unused: Iterator[Image]) -> Message:
    role = _typed(_typed(message, dict, where, field).get("role"), str, where, f"{field}.role")
    if role not in ROLES:
        raise DataError(f"{where}, {field}.role: unknown role {role!r}; use one of {', '.join(ROLES)}")
    _only(message, ("role", "content"), where, field)
    content, field = message.get("content"), f"{field}.content"
    parts: list[str | Image] = []
    if isinstance(content, str):
        for index, text in enumerate(clean(content, f"{where}, {field}").split(IMAGE_TAG)):
            parts += [_next_image(unused, where, field), text] if index else [text]
    else:
        for index, part in enumerate(_typed(content, list, where, field)):
            parts.append(_part(part, where, f"{field}[{index}]", root, unused))
    kept = tuple(part for part in parts if part != "")
    if not kept:
        raise DataError(f"{where}, {field}: empty; give the message a text or an image, or remove it")
    return Message(role, kept)


def _part(part: Any, where: str, field: str, root: Path, unused: Iterator[Image]) -> str | Image:
    part = _typed(part, dict, where, field)
    kind = part.get("type")
    if kind not in ("text", "image"):
        raise DataError(f"{where}, {field}.type: {kind!r} is not supported; use 'text' or 'image'")
    _only(part, ("type", kind), where, field)
    if kind == "text":
        return clean(_typed(part.get("text"), str, where, f"{field}.text"), f"{where}, {field}.text")
    if part.get("image") is None:
        return _next_image(unused, where, field)
    return _image(part["image"], where, f"{field}.image", root)


def _only(value: Mapping[str, Any], known: tuple[str, ...], where: str, field: str) -> None:
    """Raises DataError for keys beside the used ones, which would have no effect."""
    for key in value:
        if key in known or not says(value[key]):
            continue
        if key in _LIMITS:
            remedy = "images have no limits of their own; set model.min_pixels and model.max_pixels, or resize it"
        else:
            remedy = _REMEDIES.get(key, f"nothing uses it, only {' and '.join(known)}; rename or remove the key")
        raise DataError(f"{where}, {field}.{key}: {remedy}")


def _next_image(unused: Iterator[Image], where: str, field: str) -> Image:
    image = next(unused, None)
    if image is None:
        raise DataError(
            f"{where}, {field}: more {IMAGE_TAG} tags or image parts than there are images; add the missing image to "
            f"`images`, or write the content as a list of parts if {IMAGE_TAG} is meant as text"
        )
    return image


def _image(image: Any, where: str, field: str, root: Path) -> Image:
    if isinstance(image, dict):
        _only(image, ("bytes", "path"), where, field)
        if isinstance(image.get("bytes"), str):  # JSON has no bytes
            return decode_base64(image["bytes"], f"{where}, {field}")
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if isinstance(image, bytes):
        return decode_image(image, f"{where}, {field}")
    if not isinstance(image, str):
        raise DataError(
            f"{where}, {field}: expected bytes, a path, or {{bytes}} or {{path}}, got {type(image).__name__}; change it"
        )
    if found := _DATA_URI.match(image):
        return decode_base64(image[found.end() :], f"{where}, {field}")
    if "://" in image:
        raise DataError(
            f"{where}, {field}: {shortened(image)} is an address; download the image and give its path or bytes"
        )
    return read_image(Path(image), f"{where}, {field}", root)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _typed(value: Any, kind: type, where: str, field: str) -> Any:
    if value is None:
        raise DataError(f"{where}, {field}: missing; the row needs it (docs/data.md shows a row)")
    if not isinstance(value, kind):
        raise DataError(
            f"{where}, {field}: expected {kind.__name__}, got {type(value).__name__} {value!r:.60}; change its type"
        )
    return value
