"""Reads rows of a published benchmark from its files: parquet, JSON, JSON lines or CSV, with images in or beside
them."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_vlrl.data.files import read_records
from npu_vlrl.data.images import decode_image
from npu_vlrl.data.values import is_number, number_text, parse_json
from npu_vlrl.types import DataError

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


@dataclass(frozen=True)
class Row:
    """A row, its place in the file for messages, and the folder of its images."""

    values: Mapping[str, Any]
    where: str
    images: Path

    def get(self, *names: str) -> Any:
        """The first of these fields that is present and not null, or None."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def text(self, *names: str) -> str:
        """The first of these fields as text. Raises DataError when there is none."""
        return self.as_text(self.get(*names), *names)

    def as_text(self, value: Any, *names: str) -> str:
        """A text, or a number as it is written, from one of these fields. Raises DataError for others."""
        if isinstance(value, str):
            return value
        try:
            if is_number(value):
                return number_text(value)
        except ValueError as error:
            raise DataError(f"{self.where}, {' or '.join(names)}: {error}; {_REMEDY}") from error
        raise DataError(f"{self.where}: expected a text in {' or '.join(names)}, got {value!r:.60}; {_REMEDY}")

    def image(self, *names: str) -> bytes:
        """Content of the image file in the first of these fields: bytes, `{bytes, path}` or a path below `images`.

        Raises DataError when none can be read.
        """
        for name in names:
            value = self.values.get(name)
            if isinstance(value, Mapping):
                value = value.get("path") if value.get("bytes") is None else value["bytes"]
            if isinstance(value, str):
                value = self._file(value, name)
            if isinstance(value, bytes):
                decode_image(value, f"{self.where}, {name}")
                return value
        raise DataError(f"{self.where}: there is no image in {' or '.join(names)}; {_REMEDY}")

    def _file(self, name: str, column: str) -> bytes:
        file = (self.images / name).resolve()
        if not file.is_relative_to(self.images.resolve()) or not file.is_file():
            raise DataError(f"{self.where}, {column}: there is no {name} in {self.images}; name its folder by --images")
        return file.read_bytes()


_REMEDY = "get the benchmark again in one of the formats of docs/evaluation.md"


@dataclass(frozen=True)
class Question:
    """Question that an adapter makes of a row.

    Example: `Question("aime/1", "Find x. …", "204", category="2024")`
    """

    id: str
    text: str
    answer: str
    image: bytes | None = None
    """Content of the image file, shown before the text; None for a text-only question."""
    category: str | None = None
    image_type: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Data that the scoring needs, and the origin of the question; fields of `convert.EXTRA`."""


def read_rows(source: Path, images: Path | None) -> Iterator[Row]:
    """Reads the rows of a file, or of all files of one kind in a folder, in the order of their names.

    Images that rows only name are looked up in `images`, by default beside the file. Raises DataError.
    """
    for file in _files(source):
        for where, values in _read(file):
            yield Row(values, where, images or file.parent)


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    for suffix in SUFFIXES:
        if files := sorted(source.glob(f"*{suffix}")):
            return files
    raise DataError(f"{source}: there is no {', '.join(SUFFIXES)} file in it; name the folder or file of the benchmark")


def _read(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if file.suffix == ".json" and file.is_file():
        yield from ((f"{file.name} entry {name}", values) for name, values in _entries(file))
    elif file.suffix == ".csv" and file.is_file():
        with file.open(newline="", encoding="utf-8") as lines:
            yield from ((f"{file.name} row {n}", values) for n, values in enumerate(csv.DictReader(lines)))
    else:
        records = read_records(file)
        yield from ((records.where(n), records[n]) for n in range(len(records)))


def _entries(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Entries of a JSON file: a list of objects, or an object of them by id."""
    try:
        values = parse_json(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}); get the file again") from error
    named = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for name, entry in named:
        if not isinstance(entry, dict):
            raise DataError(f"{file.name} entry {name}: expected an object, got {entry!r:.60}; {_REMEDY}")
        yield str(name), entry
