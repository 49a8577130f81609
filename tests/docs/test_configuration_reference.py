"""docs/configuration.md says what the schema says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from npu_vlrl.config import sections

ROOT = Path(__file__).parents[2]
COMMITTED = (ROOT / "docs" / "configuration.md").read_text()


def keys(text: str) -> list[str]:
    return re.findall(r"^\| `([a-z_.]+)` \|", text, re.MULTILINE)


def test_the_committed_reference_is_what_the_schema_makes() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make" / "configuration.py"))["document"]()
    assert made == COMMITTED, "run: python docs/make/configuration.py"


def test_every_key_is_in_it_and_described() -> None:
    written = keys(COMMITTED)
    described_once = {key for key, _ in sections() if not key.startswith("data.eval.")}
    assert set(written) - {"model.lora", "data.eval", "data.train.columns"} == described_once
    assert len(written) == len(set(written))
    assert [key for key, info in sections() if not info.description] == []


def test_values_defaults_and_limits_are_those_of_the_schema() -> None:
    """A few rows, written by hand from npu_vlrl/config."""
    for row in (
        "| `rollout.group_size` | whole number ≥ 1 | `4` | Number of trajectories a task. |",
        "| `run.if_exists` | `raise`, `resume` | `raise` |",
        "| `optim.betas` | number ≥ 0, < 1 and number ≥ 0, < 1 | `[0.9, 0.999]` | Moment coefficients of AdamW. |",
        "| `model.path` | text | — |",
        "| `model.max_pixels` | whole number ≥ 1, `null` | `null` |",
        "| `environment.separator` | text of at least 1 character | `','` |",
    ):
        assert f"\n{row}" in COMMITTED
