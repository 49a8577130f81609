"""Calls code of the user's own files, and checks the texts and numbers that it returns."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from npu_vlrl.types import DataError
from npu_vlrl.workflow.texts import described, flaw

Result = TypeVar("Result")


class UserCode:
    """Calls code of a user's file; what it raises becomes a DataError that names file, method, line and remedy."""

    def __init__(self, spec: str, kind: str) -> None:
        """`spec`: `path/to/file.py:function`; `kind`: name of the object in remedies, e.g. "game"."""
        self._spec, self._kind = spec, kind
        self._file = str(Path(spec.rpartition(":")[0]).expanduser().resolve())

    def wrong(self, problem: str, remedy: str) -> DataError:
        return DataError(f"{self._spec}: {problem}; {remedy}")

    def called(self, what: str, function: Callable[[], Result], *passed: type[Exception]) -> Result:
        """Returns what `function` returns. Exceptions of the types `passed` are raised as they are."""
        try:
            return function()
        except passed:
            raise
        except (Exception, SystemExit) as error:  # it is the user's code, and may raise anything
            raise self.raised(what, error) from error

    async def awaited(self, what: str, function: Callable[[], Awaitable[Result]], *passed: type[Exception]) -> Result:
        """Awaits `function`, guarded as in `called`."""
        try:
            return await function()
        except passed:
            raise
        except (Exception, SystemExit) as error:
            raise self.raised(what, error) from error

    def text(self, what: str, text: str) -> str:
        if problem := flaw(text):
            raise self.wrong(f"{what} holds {problem}", "replace it")
        return text

    def numbers(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Converts named numbers to plain ones, since numpy's own cannot be written to the records."""
        return {self.text("the name of a term", str(name)): float(value) for name, value in values.items()}

    def raised(self, what: str, error: BaseException) -> DataError:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self._file]
        where = f" (line {lines[-1]})" if lines else ""
        problem = " ".join(described(error).split())[:300]
        return self.wrong(f"{what}raised {problem}{where}", f"correct the {self._kind}")
