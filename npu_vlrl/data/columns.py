"""Converts rows of data sets that were not written for this project to verl's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_vlrl.config import ColumnsConfig
from npu_vlrl.data.files import given
from npu_vlrl.types import DataError

IMAGE_TAG = "<image>"


USED = ("data_source", "prompt", "images", "reward_model", "extra_info")
"""Columns of verl's schema from which a task is made."""

_NO_VIDEO = "videos are not supported; remove them or give their frames as images"
_NO_SOUND = "sounds are not supported; remove them"
REFUSED = {
    "videos": _NO_VIDEO,
    "video": _NO_VIDEO,
    "audios": _NO_SOUND,
    "audio": _NO_SOUND,
    "tools": "a row brings no tools; name those of all rows in workflow.tools, and remove the column",
    "image": "nothing uses it, so the model would be blind; name the column `images`, or set columns.images=image",
}
"""Columns that are refused: they would change what the policy sees, and no task is made from them."""


def used_columns(columns: ColumnsConfig | None) -> frozenset[str]:
    """Names of a file's columns from which tasks are made."""
    if columns is None:
        return frozenset(USED)
    renamed = {"prompt": columns.prompt, "images": columns.images, "reward_model": columns.answer}
    return frozenset(renamed.get(name) or name for name in USED)


def as_verl(record: Mapping[str, Any], columns: ColumnsConfig, where: str, data_source: str) -> dict[str, Any]:
    """Renames a row's `columns` to those of verl's schema, see `records.task_from_record`.

    A prompt that is a text becomes one user message. Where no text has an `<image>`, the images come before the
    first. `data_source` is the default for rows without one. Raises DataError for a column that the row lacks.
    """
    taken = {*used_columns(columns), *REFUSED} - ({"image"} if columns.images is not None else set())
    row = {name: record[name] for name in (*USED, *REFUSED) if name in record and name in taken}
    prompt = _column(record, "prompt", columns.prompt, where)
    row["prompt"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if columns.images is not None:
        # a row without an image says so: one that only lacks the column would be trained blind for a misspelt name
        none = columns.images in record and record[columns.images] is None
        images = [] if none else _column(record, "images", columns.images, where)
        row["images"] = images if isinstance(images, list) else [images]
    if columns.answer is not None:
        row["reward_model"] = {"ground_truth": _column(record, "answer", columns.answer, where)}
    if row.get("data_source") is None:
        row["data_source"] = data_source
    _show_first(row)
    return row


def _column(record: Mapping[str, Any], key: str, column: str, where: str) -> Any:
    value = record.get(column)
    if value is None:
        there = ", ".join(given(record))
        raise DataError(f"{where}, {column}: missing, and columns.{key} names it; it has {there}; name one of these")
    return value


def _show_first(row: dict[str, Any]) -> None:
    """Inserts one tag an image before the first text, if the prompt has no tag."""
    prompt, images = row["prompt"], row.get("images")
    if not isinstance(prompt, list) or not isinstance(images, list):
        return  # what is wrong with them is told later
    contents: list[Any] = [message.get("content") if isinstance(message, dict) else None for message in prompt]
    if contents and all(isinstance(content, str) and IMAGE_TAG not in content for content in contents):
        first = next((i for i, message in enumerate(prompt) if message.get("role") != "system"), 0)
        row["prompt"] = list(prompt)
        row["prompt"][first] = prompt[first] | {"content": IMAGE_TAG * len(images) + contents[first]}
