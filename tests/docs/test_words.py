"""Keys, metrics and messages that the documents name are those of the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import npu_vlrl
from npu_vlrl.config import Config, sections
from tests.docs.markdown import DOCUMENTS, ROOT

PACKAGE = Path(npu_vlrl.__file__).parent
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
KEYS = {key for key, _ in sections()}
FILES = {"py", "md", "yaml", "jsonl", "json", "parquet", "png"}


def texts() -> Iterator[str]:
    """Every string of the package, and the launch scripts."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    yield from (file.read_text(encoding="utf-8") for file in (ROOT / "launch").glob("*.sh"))


TEXTS = list(texts())


def unknown_keys(text: str) -> set[str]:
    """Words like `train.stepz` between backticks that begin with a section and are no key."""
    words = [
        w for code in re.findall(r"`([^`\n]+)`", text) for w in re.findall(r"(?<![\w./])[a-z_]+\.[a-z_.]+\w", code)
    ]
    named = {w for w in words if w.split(".")[0] in Config.model_fields and w.split(".")[-1] not in FILES}
    groups = {key.rpartition(".")[0] for key in KEYS}
    return named - KEYS - groups


def missing(message: str) -> list[str]:
    """Parts of a quoted message, between its `…`, that no string of the program holds."""
    parts = [part.strip() for part in message.split("…")]
    return [part for part in parts if len(part) > 2 and not any(part in text for text in TEXTS)]


def metrics(text: str) -> set[str]:
    """Names between backticks that look like a metric: `update/fill`, or one of the words after "look at"."""
    return set(re.findall(r"`((?:update|status|async|engine|learner|critic)/\w+)`", text))


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: f.name)
def test_keys_are_real(file: Path) -> None:
    assert unknown_keys(file.read_text(encoding="utf-8")) == set()


def test_an_unknown_key_is_found() -> None:
    assert unknown_keys("`train.stepz=1`, `model.lora`, `train.steps`, `run.py`, `data.eval.path`") == {"train.stepz"}


def test_messages_are_the_programs_words() -> None:
    messages = re.findall(r"^ *\*Message:\* `(.+)`$", TROUBLES, re.MULTILINE)
    assert len(messages) > 15 and len(messages) == TROUBLES.count("*Message:*")
    assert {message: parts for message in messages if (parts := missing(message))} == {}


def test_a_message_that_nobody_says_is_found() -> None:
    assert missing("is gone … with the wind") == ["with the wind"]


@pytest.mark.parametrize("name", sorted(metrics(TROUBLES)))
def test_metrics_are_recorded(name: str) -> None:
    room, word = name.split("/")
    assert any(name in text for text in TEXTS) or (f"{room}/" in TEXTS and any(word in text for text in TEXTS))


def test_metrics_without_a_room_are_recorded() -> None:
    for name in (
        *("reward_std", "groups_without_spread", "cut_turns", "judge_errors", "kl", "entropy", "logprob_gap"),
        *("action_tokens", "clip_low", "ratio_max", "peak_memory_gib", "rollout_seconds", "tool_errors"),
        *("skipped_records", "failed_groups", "replaced_groups", "images_encoded", "images_referenced"),
    ):
        assert f"`{name}`" in TROUBLES and {name, f"{name}_sum"} & set(TEXTS)
