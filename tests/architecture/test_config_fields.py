"""A configuration key that nobody reads is a promise that nobody keeps.

Components (`npu_vlrl/algorithms/`) read their options from `options` or `self`, or take them by name as parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import npu_vlrl
from npu_vlrl.config import sections

PACKAGE = Path(npu_vlrl.__file__).parent
COMPONENTS = ("algorithms", "advantages", "losses")
"""Folders whose functions are given their options."""


def reads(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """(what it is read from, attribute) of every attribute that is read: `a.train.steps` gives ("train", "steps")."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                base = node.value
                name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
                yield name, node.attr
                if file.parent.name in COMPONENTS and name in ("options", "self", "here"):
                    yield "config", node.attr
            elif isinstance(node, ast.FunctionDef) and file.parent.name in COMPONENTS:
                yield from (("config", argument.arg) for argument in node.args.args)


def properties(file: Path) -> dict[str, set[str]]:
    """For each property of the schema, the fields that it is made of."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "property" for d in node.decorator_list):
            found[node.name] = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return found


def dead_keys(keys: Iterable[str], package: Path) -> list[str]:
    """Keys whose last word is read from nothing called like their section, or `config`, outside the schema."""
    schema = package / "config" / "schema.py"
    seen = set(reads(file for file in sorted(package.rglob("*.py")) if file != schema))
    for name, fields in properties(schema).items():
        seen |= {(base, field) for base, attribute in seen if attribute == name for field in fields}
    dead = []
    for key in keys:
        *above, leaf = key.split(".")
        holders = {*above[-1:], "config"}
        if not any((holder, leaf) in seen for holder in holders):
            dead.append(key)
    return dead


def test_every_key_is_read() -> None:
    keys = [key for key, _ in sections()]
    assert {"train.steps", "data.eval.path", "model.lora.rank", "workflow.retry_when"} <= set(keys)
    assert dead_keys(keys, PACKAGE) == []


def test_a_key_that_nobody_reads_is_found(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "schema.py").write_text(
        "class TrainConfig:\n"
        "    @property\n"
        "    def budget(self): return self.minutes\n"
        "    @property\n"
        "    def unused(self): return self.hours\n"
        "    def check(self): return self.days\n"
    )
    (tmp_path / "train.py").write_text(
        "def f(config, clock):\n"
        "    config.train.written = 1\n"
        "    return config.train.steps, config.train.budget, clock.seconds\n"
    )
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / "x.py").write_text(
        "class Options:\n    unread: float = 1.0\n"
        "def f(rewards, alpha): return rewards.gamma\n"
        "def g(tokens, options): return options.beta\n"
    )
    words = ["steps", "minutes", "alpha", "beta", "hours", "days", "seconds", "written", "never", "gamma", "unread"]
    dead = dead_keys([f"train.{word}" for word in words], tmp_path)
    assert dead == [
        "train.hours",
        "train.days",
        "train.seconds",
        "train.written",
        "train.never",
        "train.gamma",
        "train.unread",
    ]
