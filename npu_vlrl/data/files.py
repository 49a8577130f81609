"""Reads rows of parquet, JSON lines and Hugging Face `save_to_disk` folders, unchanged.

Rows are read one at a time from the disk; the operating system may drop unused pages. Only the columns of a table that
are accessed become Python values. Row numbers count from 0, in file order.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from npu_vlrl.data.values import parse_json, to_python
from npu_vlrl.types import DataError


class TableRow(Mapping[str, Any]):
    """Lazy row of a table: a column becomes a Python value when it is accessed, so an unused column cannot fail.

    Accessing a column raises DataError when its value cannot be read, or when two columns have its name.
    """

    def __init__(self, batch: pa.RecordBatch, row: int, where: str) -> None:
        self._batch, self._row, self._where = batch, row, where

    def __getitem__(self, name: str) -> Any:
        scalar = self._scalar(name)
        try:
            return to_python(scalar)
        except (pa.ArrowException, ArithmeticError, ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{self._where}, {name}: the value cannot be read ({error}); write it again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.schema.names)

    def __len__(self) -> int:
        return len(self._batch.schema.names)

    def is_null(self, name: str) -> bool:
        indices = self._batch.schema.get_all_field_indices(name)
        return not any(self._batch.column(index)[self._row].is_valid for index in indices)

    def _scalar(self, name: str) -> pa.Scalar:
        indices = self._batch.schema.get_all_field_indices(name)
        if not indices:
            raise KeyError(name)
        if len(indices) > 1:
            raise DataError(f"{self._where}, {name}: {len(indices)} columns have this name; rename all but one")
        return self._batch.column(indices[0])[self._row]


def given(row: Mapping[str, Any]) -> list[str]:
    """Columns of a row whose value is not null."""
    return [name for name in row if not (row.is_null(name) if isinstance(row, TableRow) else row[name] is None)]


@dataclass(frozen=True)
class Records:
    """The rows of a file or folder: `len(records)`, `records[17]` is a mapping. A damaged row raises DataError."""

    name: str
    """File or folder name, for messages."""
    fingerprint: str
    """Digest of the file's size, beginning and end."""
    length: int
    read: Callable[[int], Mapping[str, Any]]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        if not 0 <= row < self.length:
            raise IndexError(f"{self.name} has rows 0 to {self.length - 1}, not {row}")
        try:
            return self.read(row)
        except (pa.ArrowException, ValueError, RecursionError) as error:
            raise DataError(f"{self.where(row)}: the row cannot be read ({error}); write it again") from error

    def where(self, row: int) -> str:
        """Place of a row for messages, e.g. `train.parquet row 17`."""
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
            record = parse_json(lines.readline())
        if not isinstance(record, dict):
            raise ValueError(f"an object is expected, got {type(record).__name__}")
        return record

    return Records(path.name, _fingerprint([path]), len(offsets), read)


def _parquet(path: Path) -> Records:
    """Copies the rows of a parquet file, batch by batch, to a file that can be mapped: parquet has no access by row."""
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
    """Rows of Arrow stream files through memory maps. `originals` are the files whose fingerprint is taken."""
    batches = [batch for file in files for batch in pa.ipc.open_stream(pa.memory_map(str(file))) if batch.num_rows]
    ends: list[int] = []
    for batch in batches:
        ends.append((ends[-1] if ends else 0) + batch.num_rows)

    def read(row: int) -> TableRow:
        index = bisect.bisect_right(ends, row)
        start = ends[index - 1] if index else 0
        return TableRow(batches[index], row - start, f"{path.name} row {row}")

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
