"""Atomic file writes (a file is complete or absent), and OSErrors that name the file where the library's do not."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safetensors import SafetensorError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or an exhausted quota."""

REFUSED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTEMPTY),
)
"""Error numbers of a path that cannot be used as it is."""

_NUMBER = re.compile(r"\(os error (\d+)\)")
"""Pattern of a system error inside a message of safetensors."""


def is_full(error: OSError | SafetensorError) -> bool:
    return _number(error) in FULL


def refusal(error: OSError | SafetensorError) -> str | None:
    """Message for the user who gave an unusable path. None for other errors, and for errors without a path."""
    if not isinstance(error, OSError) or error.errno not in REFUSED or error.filename is None:
        return None
    names = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{names}: {error.strerror}; correct the path or the rights to it, or choose another place"


def unwritable(folder: Path) -> str | None:
    """Reason why nothing can be written in a folder, which may not exist yet; None where it is writable."""
    try:
        for there in (folder.absolute(), *folder.absolute().parents):
            if there.exists():
                break
            if there.is_symlink():
                return f"{there} is a link to nothing"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


def _number(error: OSError | SafetensorError) -> int | None:
    """Error number of the operating system; None where the error has none."""
    if isinstance(error, OSError):
        return error.errno
    found = _NUMBER.search(str(error))
    return int(found[1]) if found is not None else None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Re-raises a full disk, and any refusal that safetensors reports, as an OSError that names `path`. Passes on other
    errors unchanged.
    """
    from safetensors import SafetensorError  # a configuration is read without it

    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number(error)
        if number is None or number not in (FULL if isinstance(error, OSError) else (*FULL, *REFUSED)):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file atomically: `write` makes a file beside `path`, which replaces it. Raises what `writing` raises."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with writing(path):
            write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 text file atomically. Raises what `writing` raises."""
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def set_permissions(file: Path) -> None:
    """Gives a file of safetensors, which is readable by its owner alone, the permissions of ordinary new files."""
    mask = os.umask(0o077)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


def sha256(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
