"""Rows of parquet, jsonl and Hugging Face `save_to_disk` folders, and their way to a `Task` (verl's schema).

Rows are read one at a time from the disk: the operating system may drop what is not in use, and no decoded picture is
kept here. Row numbers count from 0, in file order.
"""

from __future__ import annotations

import bisect
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import tempfile
import unicodedata
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from npu_vlrl.config import ColumnsConfig
from npu_vlrl.data.columns import IMAGE_TAG, as_verl
from npu_vlrl.data.images import decode_base64, decode_image, read_image, shortened
from npu_vlrl.types import DataError, Image, Message, Task

_DATA_URI = re.compile("data:image/[^;,]{1,40};base64,")
NEEDED = ("data_source", "prompt", "reward_model")
ROLES = ("system", "user", "assistant", "tool")


def written_schema(extra: Mapping[str, pa.DataType]) -> pa.Schema:
    """verl's schema, in which our converters write parquet; `extra` are the fields of `extra_info`."""
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
class Records:
    """The rows of a file or folder: `len(records)`, `records[17] -> dict`. Reading a damaged row raises DataError."""

    name: str
    """File or folder name, for messages."""
    fingerprint: str
    """Changes when the file does: of its size, its beginning and its end."""
    length: int
    read: Callable[[int], dict[str, Any]]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self.length:
            raise IndexError(f"{self.name} has rows 0 to {self.length - 1}, not {row}")
        try:
            return self.read(row)
        except (pa.ArrowException, ValueError, RecursionError) as error:
            raise DataError(f"{self.where(row)}: the row cannot be read ({error}); write it again") from error

    def where(self, row: int) -> str:
        """Example: `train.parquet row 17`"""
        return f"{self.name} row {row}"


def read_records(path: Path) -> Records:
    """Opens .parquet, .jsonl, or a folder written by `Dataset.save_to_disk`. Raises DataError when it cannot."""
    try:
        if (path / "state.json").is_file():
            files = _arrow_files(path)
            return _mapped(path, files, files)
        if path.is_dir():
            remedy = "name one split inside" if (path / "dataset_dict.json").is_file() else "name a file inside"
            raise DataError(f"{path}: the folder is not one saved data set (no state.json); {remedy}")
        if not path.is_file():
            raise DataError(f"{path}: there is no such file or folder; correct the path")
        if path.suffix == ".jsonl":
            return _jsonl(path)
        if path.suffix == ".parquet":
            return _parquet(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read ({error}); write the file again") from error
    raise DataError(f"{path}: unknown kind of file; use .parquet, .jsonl or a folder of Dataset.save_to_disk")


def _jsonl(path: Path) -> Records:
    offsets = array("q")
    position = 0
    with path.open("rb") as lines:
        for line in lines:
            if line.strip():
                offsets.append(position)
            position += len(line)

    def read(row: int) -> dict[str, Any]:
        with path.open("rb") as lines:
            lines.seek(offsets[row])
            record = json.loads(lines.readline())
        if not isinstance(record, dict):
            raise ValueError(f"an object is expected, got {type(record).__name__}")
        return record

    return Records(path.name, _fingerprint([path]), len(offsets), read)


def _parquet(path: Path) -> Records:
    """Parquet has no access by row, so its rows are copied once, batch by batch, to a file that can be mapped."""
    try:
        with tempfile.TemporaryDirectory(prefix="npu_vlrl_") as folder, pq.ParquetFile(path) as parquet:
            copy = Path(folder) / "rows.arrow"
            with pa.ipc.new_stream(copy, parquet.schema_arrow) as writer:
                for batch in parquet.iter_batches(batch_size=64):
                    writer.write_batch(batch)
            return _mapped(path, [copy], [path])  # the mapping outlives the file's name
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # these are about writing, so not about `path`
            raise
        raise DataError(
            f"{path}: its copy does not fit into the temporary folder {tempfile.gettempdir()} ({error}); make room "
            "there, or set TMPDIR to another folder"
        ) from error


def _arrow_files(folder: Path) -> list[Path]:
    """The data files of a `save_to_disk` folder, in order."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        names = [file["filename"] for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: state.json lists no data files ({error!r}); save the data set again") from error
    if state.get("_indices_data_files"):
        raise DataError(f"{folder}: the data set keeps an index apart; call flatten_indices() and save it again")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(f"{folder}: state.json names {name!r}, which leaves the folder; save the data set again")
    return [folder / name for name in names]


def _mapped(path: Path, files: list[Path], originals: list[Path]) -> Records:
    """Rows of Arrow stream files through memory maps. `originals` are what the fingerprint is taken of."""
    batches = [batch for file in files for batch in pa.ipc.open_stream(pa.memory_map(str(file))) if batch.num_rows]
    ends: list[int] = []
    for batch in batches:
        ends.append((ends[-1] if ends else 0) + batch.num_rows)

    def read(row: int) -> dict[str, Any]:
        index = bisect.bisect_right(ends, row)
        start = ends[index - 1] if index else 0
        return batches[index].slice(row - start, 1).to_pylist()[0]

    return Records(path.name, _fingerprint(originals), ends[-1] if ends else 0, read)


def _fingerprint(files: list[Path], edge: int = 1 << 16) -> str:
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size};".encode())
        with file.open("rb") as data:
            digest.update(data.read(edge))
            data.seek(max(0, size - edge), os.SEEK_SET)
            digest.update(data.read(edge))
    return digest.hexdigest()


@dataclass(frozen=True)
class TaskFile:
    """Tasks made row by row when asked for: `len(tasks)`, `tasks[17] -> Task`, which raises DataError for a bad row."""

    records: Records
    root: Path
    """Image paths start here and may not leave."""
    stem: str
    columns: ColumnsConfig | None = None

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> Task:
        record, where = self.records[row], self.records.where(row)
        if self.columns is not None:
            record = as_verl(record, self.columns, where, self.stem)
        task = task_from_record(record, where, self.root)
        return dataclasses.replace(task, id=f"{self.stem}/{task.extra.get('id', row)}")


def load_tasks(path: Path, root: Path | None = None, columns: ColumnsConfig | None = None) -> TaskFile:
    """Opens `path` (see `read_records`); `root` for image paths is the folder of the file unless given. `columns` are
    for rows in another schema than verl's.

    A task's id is `<file stem>/<extra_info.id or row number>`. Raises DataError when there is no row at all.
    """
    records = read_records(path)
    if not len(records):
        raise DataError(f"{path}: there are no rows in it; write the file again")
    return TaskFile(records, root or (path if path.is_dir() else path.parent), path.stem, columns)


def task_from_record(record: Mapping[str, Any], where: str, root: Path) -> Task:
    """A row in verl's schema as a `Task` with `id=where`; pictures are decoded here.

    Fields: `data_source`; `prompt`, a list of {role, content}, where content is a string in which each `<image>` stands
    for the next of `images`, or a list of {"type": "text", "text"} and {"type": "image"} parts, where `<image>` in a
    text is just text and an image part may bring its own `image`; `images`, a list of {"bytes"} | {"path"} | bytes |
    path | "data:image/…;base64,…", where bytes may be base64 text; `reward_model.ground_truth`, a string
    or number ("" when no gold is needed); `extra_info`, optional.
    Raises DataError naming `where`, the field and the remedy.
    """
    _check_columns(record, where)
    if record.get("videos"):
        raise DataError(f"{where}, videos: videos are not supported; remove them or give their frames as images")
    source = _typed(record.get("data_source"), str, where, "data_source")
    extra = _typed(_or(record.get("extra_info"), {}), dict, where, "extra_info")
    if not isinstance(extra.get("id"), (str, int, type(None))):
        raise DataError(f"{where}, extra_info.id: expected str or int, got {extra['id']!r:.60}; change its type")
    return Task(
        id=where,
        messages=_messages(record, where, root),
        answer=_gold(record, where),
        data_source=_clean(source, where, "data_source"),
        extra={key: value for key, value in extra.items() if value is not None},  # tables fill absent keys with null
    )


def _check_columns(record: Mapping[str, Any], where: str) -> None:
    """Of a file in another format every row lacks the same columns; what it has instead tells its owner why."""
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
    """The first control character other than a newline, as `U+000C`. It tells of an escape that was once misread."""
    return next((f"U+{ord(c):04X}" for c in text if c != "\n" and unicodedata.category(c) == "Cc"), None)


def _gold(record: Mapping[str, Any], where: str) -> str | None:
    field = "reward_model.ground_truth"
    gold = _typed(record.get("reward_model"), dict, where, "reward_model").get("ground_truth")
    if gold is None:
        raise DataError(f'{where}, {field}: missing; give the right answer, or "" when the judge needs none')
    if isinstance(gold, bool) or not isinstance(gold, (str, int, float)):
        raise DataError(f"{where}, {field}: expected a string or a number, got {type(gold).__name__}; change its type")
    if isinstance(gold, float) and not math.isfinite(gold):
        raise DataError(f"{where}, {field}: the answer is {gold}, which is not finite; correct it")
    text = _clean(str(gold), where, field)
    if found := control_character(text):
        raise DataError(
            f"{where}, {field}: the answer {text!r} contains the control character {found}; it was probably damaged "
            "when a backslash was read as an escape (\\f of \\frac), so correct it at its source"
        )
    return text if text.strip() else None


def _messages(record: Mapping[str, Any], where: str, root: Path) -> tuple[Message, ...]:
    prompt = _typed(record.get("prompt"), list, where, "prompt")
    if not prompt:
        raise DataError(f"{where}, prompt: empty; give at least one message {{role, content}}")
    images = _typed(_or(record.get("images"), []), list, where, "images")
    pictures = [_image(image, where, f"images[{i}]", root) for i, image in enumerate(images)]
    unused = iter(pictures)
    messages = tuple(_message(m, where, f"prompt[{i}]", root, unused) for i, m in enumerate(prompt))
    if any(True for _ in unused):
        raise DataError(
            f"{where}, images: {len(pictures)} images, but the prompt has fewer {IMAGE_TAG} tags or image parts; write "
            f"{IMAGE_TAG} once for each image, where the model should see it"
        )
    return messages


def _message(message: Any, where: str, field: str, root: Path, unused: Any) -> Message:
    role = _typed(_typed(message, dict, where, field).get("role"), str, where, f"{field}.role")
    if role not in ROLES:
        raise DataError(f"{where}, {field}.role: unknown role {role!r}; use one of {', '.join(ROLES)}")
    content, field = message.get("content"), f"{field}.content"
    parts: list[str | Image] = []
    if isinstance(content, str):
        for index, text in enumerate(_clean(content, where, field).split(IMAGE_TAG)):
            parts += [_next_image(unused, where, field), text] if index else [text]
    else:
        for index, part in enumerate(_typed(content, list, where, field)):
            parts.append(_part(part, where, f"{field}[{index}]", root, unused))
    kept = tuple(part for part in parts if part != "")
    if not kept:
        raise DataError(f"{where}, {field}: empty; give the message a text or an image, or remove it")
    return Message(role, kept)


def _part(part: Any, where: str, field: str, root: Path, unused: Any) -> str | Image:
    part = _typed(part, dict, where, field)
    if part.get("type") == "text":
        return _clean(_typed(part.get("text"), str, where, f"{field}.text"), where, f"{field}.text")
    if part.get("type") != "image":
        raise DataError(f"{where}, {field}.type: {part.get('type')!r} is not supported; use 'text' or 'image'")
    if part.get("image") is None:
        return _next_image(unused, where, field)
    return _image(part["image"], where, f"{field}.image", root)


def _next_image(unused: Any, where: str, field: str) -> Image:
    image = next(unused, None)
    if image is None:
        raise DataError(
            f"{where}, {field}: more {IMAGE_TAG} tags or image parts than there are images; add the missing image to "
            f"`images`, or write the content as a list of parts if {IMAGE_TAG} is meant as text"
        )
    return image


def _image(image: Any, where: str, field: str, root: Path) -> Image:
    if isinstance(image, dict):
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


def _clean(text: str, where: str, field: str) -> str:
    if "\0" in text:
        raise DataError(f"{where}, {field}: the text contains a null byte; remove it")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(f"{where}, {field}: the text contains half of a surrogate pair; write the text again as UTF-8")
    return text
