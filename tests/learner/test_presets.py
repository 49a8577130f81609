"""The table of presets in the documents is the one that runs."""

from __future__ import annotations

from pathlib import Path

from npu_vlrl.algorithms import ESTIMATORS
from npu_vlrl.algorithms.presets import PRESETS, REMOVED
from npu_vlrl.config import AlgorithmConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
COLUMNS = [
    "advantage",
    "turn_rewards",
    "advantage_mask",
    "loss_mask",
    "token_discount",
    "turn_discount",
    "gae_lambda",
    "aggregation",
    "clip_high",
    "kl_coef",
    "kl_kind",
    "kl_in",
]


def table() -> str:
    """The presets as they resolve; what is the same in all of them is not in it."""

    def cell(value: object) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "" if value is None else str(value)

    rows = [["preset", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for name in PRESETS:
        found = dict(AlgorithmConfig(preset=name).resolved())
        rows.append([f"`{name}`", *(cell(found[column]) for column in COLUMNS)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def test_the_documented_table_is_what_the_presets_resolve_to() -> None:
    written = DOCUMENT.read_text().partition("<!-- presets -->\n")[2].partition("\n<!-- /presets -->")[0]
    assert written == table(), f"docs/algorithms.md should hold:\n{table()}"


def test_every_estimator_is_documented() -> None:
    text = DOCUMENT.read_text()
    assert all(f"| `{name}` |" in text for name in ESTIMATORS)


def test_the_overrides_of_removed_presets_are_documented() -> None:
    text = DOCUMENT.read_text()
    assert all(f"| `{name}` | `{words}` |" in text for name, words in REMOVED.items())


def test_presets_set_what_their_estimator_takes() -> None:
    """A preset that names a setting which its estimator ignores would say something untrue."""
    optional = {key for estimator in ESTIMATORS.values() for key in estimator.option_names}
    for name, settings in PRESETS.items():
        assert settings.keys() <= AlgorithmConfig.model_fields.keys(), name
        assert (settings.keys() & optional) <= set(ESTIMATORS[settings["advantage"]].option_names), name
