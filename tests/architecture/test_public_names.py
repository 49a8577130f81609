"""What `import npu_vlrl` offers: at run time, to type checkers, and in docs/api.md."""

from __future__ import annotations

import ast
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest

import npu_vlrl
import npu_vlrl.train_loop

ROOT = Path(__file__).parents[2]


def imported_for_type_checkers() -> dict[str, str]:
    """The module of each name below `if TYPE_CHECKING`."""
    tree = ast.parse(Path(npu_vlrl.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        str(alias.asname): str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }


def test_type_checkers_are_told_what_there_is() -> None:
    told = imported_for_type_checkers()
    assert {"train", "evaluate", "load_config", "Environment", "Tool", "Judge", "Image", "Trajectory"} <= set(told)
    assert told == {name: module for module, names in npu_vlrl._ORIGINS.items() for name in names}
    for name, module in told.items():
        assert getattr(npu_vlrl, name) is getattr(import_module(module), name)
    assert set(told) <= set(dir(npu_vlrl)) and sorted(npu_vlrl.__all__) == sorted(told)
    assert (Path(npu_vlrl.__file__).parent / "py.typed").is_file()


def test_no_module_takes_the_place_of_a_name() -> None:
    """Importing `npu_vlrl.train`, were there one, would make `npu_vlrl.train` a module."""
    modules = {module.name for module in pkgutil.iter_modules(npu_vlrl.__path__)}
    assert "train_loop" in modules and modules & set(npu_vlrl.__all__) == set()


def test_a_name_that_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'npu_vlrl' has no attribute 'trian'"):
        npu_vlrl.trian  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'trian'"):
        from npu_vlrl import trian  # type: ignore[attr-defined]  # noqa: F401


def test_the_document_has_every_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    rows = {name for row in re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert rows == set(npu_vlrl.__all__)
