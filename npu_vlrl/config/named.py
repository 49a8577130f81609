"""Configurations that come with the package, found by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from npu_vlrl.common.fields import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
"""Folder of the configurations: in a checkout a link to the top-level `configs/`, in a built package a copy of it."""


def find(name: str | Path) -> Path:
    """Finds the file of a configuration: a path, or a name such as `photo_tiny` or `tasks/geo3k`. Files win over names.

    Raises ConfigError that lists the nearest names, or all names.
    """
    if (path := Path(name)).is_file():
        return path
    known = {file.relative_to(CONFIGS).with_suffix("").as_posix(): file for file in sorted(CONFIGS.rglob("*.yaml"))}
    if str(name) in known:
        return known[str(name)]
    last_words = {word.rpartition("/")[2]: word for word in known}
    near = difflib.get_close_matches(path.stem, last_words, 1)
    told = f"did you mean {last_words[near[0]]}?" if near else f"known by name are {', '.join(known)};"
    raise ConfigError(f"{name}: no such configuration file; {told} `npu-vlrl init` writes a first one")
