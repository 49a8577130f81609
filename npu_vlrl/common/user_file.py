"""Functions from the user's own files, named in the configuration as `path/to/file.py:function`.

Loading runs code, so a name may come from the configuration only, never from data or from a model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def is_spec(name: str) -> bool:
    return ".py:" in name


def load_function(spec: str, classes: bool = False) -> Callable[..., Any]:
    """Loads the function, or with `classes` also the class, that `path/to/file.py:function` names.

    A relative path starts at the working directory, and `~` is the home folder.

    Raises ValueError, naming the path, when the file or the function is missing or the file cannot be imported.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{spec!r} does not name a function; write path/to/file.py:function")
    function = getattr(_load_module(Path(path).expanduser().resolve()), name, None)
    if classes and inspect.isclass(function):
        return function
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"{spec}: the file has no plain function {name!r}; write `def {name}(…)` at its top level")
    return function


def _load_module(path: Path) -> ModuleType:
    name = f"_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ValueError(f"there is no file {path}; correct the path in the configuration")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here while it is being executed
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
