"""A package that only some installations have is named with the extra that brings it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.program import program


@pytest.mark.parametrize(
    ("package", "users", "words", "extra"),
    [
        ("matplotlib", "npu_vlrl.report.plots", ["plot", "RUN"], "plots"),
        ("gymnasium", "npu_vlrl.tasks.frozenlake", ["play", "--environment", "frozenlake"], "games"),
    ],
)
def test_a_missing_package_is_one_sentence(
    package: str, users: str, words: list[str], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith((package, users))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # importing it now raises ModuleNotFoundError
    assert program(*words).refused() == f"{package} is not installed: pip install 'npu-vlrl[{extra}]'"


def test_another_missing_module_is_no_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "npu_vlrl.preview.play", raising=False)
    monkeypatch.setitem(sys.modules, "npu_vlrl.preview.play", None)
    with pytest.raises(ModuleNotFoundError, match="npu_vlrl.preview.play"):
        program("play", "--environment", "frozenlake")
