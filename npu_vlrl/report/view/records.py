"""Reads the trajectories of a run folder line by line: the columns of the list, and pages of full records."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from yaml import YAMLError

from npu_vlrl.config import ConfigError, WorkflowConfig
from npu_vlrl.config.yaml_text import read_yaml
from npu_vlrl.model.families import family_of_path
from npu_vlrl.model.images import image_processor
from npu_vlrl.report.record_schema import read_record
from npu_vlrl.report.view.content import Content
from npu_vlrl.report.view.run_images import RunImages
from npu_vlrl.report.view.tokens import find_tokenizer
from npu_vlrl.workflow.export import trajectory_reward

PAGE = 40
"""Number of trajectories that are parsed together."""

SNIPPET = 96
"""Maximum number of characters of the last turn in the list."""

COLUMNS = (
    *("step", "id", "group", "phase", "task", "source", "status", "solved", "first", "stops", "reward"),
    *("turns", "tokens", "calls", "label", "picture", "snippet", "error"),
)


class RunRecords:
    """Records of a run that may be going on: `refresh` finds additions."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder without records."""
        self.folder = folder
        self._file = folder / "trajectories.jsonl"
        if not self._file.is_file():
            raise ConfigError(
                f"{folder} has no trajectories.jsonl; name the folder of a run whose run.record_every is above 0"
            )
        self._config = _read_config(folder / "config.yaml")
        self._workflow = _reward_settings(self._config)
        self.images = RunImages(folder / "images")
        self._tokens = find_tokenizer([path for path in self._model_folders() if path.is_dir()])
        self._patch = self._patch_size()
        self.content = Content(self.images, self._tokens, self._patch)
        self._start()
        self.generation = 0
        """Number that changes when earlier records changed, as when a resumed run repeats steps."""
        self.refresh()

    def _start(self) -> None:
        self.rows: list[list[Any]] = []
        """Values of `COLUMNS` for each trajectory."""
        self.unreadable = 0
        """Number of complete lines that are no record."""
        self._places: list[tuple[int, int]] = []
        self._end = 0
        self._last = b""

    def refresh(self) -> None:
        """Reads complete lines that were added; starts again when the file was replaced."""
        with self._file.open("rb") as file:
            if self._last and not self._still_there(file):
                self._start()
                self.generation += 1
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):  # a run is writing it
                    break
                start, self._end = self._end, self._end + len(line)
                try:
                    row = self._row(read_record(line))
                except ValueError:
                    self.unreadable += 1
                    continue
                self._places.append((start, len(line)))
                self._last = line
                self.rows.append(row)

    @property
    def notes(self) -> list[str]:
        """Notes of the page about missing parts."""
        found = []
        if self._tokens is None:
            found.append("No tokenizer was found: turns are shown as text, and their tokens cannot be.")
        if self._patch is None and any(row[COLUMNS.index("picture")] for row in self.rows):
            found.append("No image processor was found: images are shown at the size of their files.")
        return found

    @property
    def n_pages(self) -> int:
        return -(-len(self.rows) // PAGE)

    def page(self, number: int) -> dict[str, Any]:
        """The trajectories number·PAGE to (number+1)·PAGE - 1, as `Content` describes them. Raises IndexError."""
        if not 0 <= number < self.n_pages:
            raise IndexError(number)
        return self.content.page(self._read(number))

    def _read(self, number: int) -> Iterator[dict[str, Any]]:
        with self._file.open("rb") as file:
            for start, length in self._places[number * PAGE : (number + 1) * PAGE]:
                file.seek(start)
                yield read_record(file.read(length))

    def _still_there(self, file: Any) -> bool:
        start, length = self._places[-1]
        file.seek(start)
        return bool(file.read(length) == self._last)

    def _row(self, record: dict[str, Any]) -> list[Any]:
        turns = record.get("turns", [])
        stops = list(dict.fromkeys(turn["action"].get("stop_reason") for turn in turns))
        shown = [image["hash"] for turn in turns for s in turn["new_context"] for image in s.get("images", [])]
        words = re.match("[a-z]*", record["group"])
        return [
            record["step"],
            record["id"],
            record["group"],
            words[0] if words else "",
            record.get("task"),
            record.get("data_source"),
            record.get("status"),
            bool(record.get("solved")),
            bool(record.get("solved_first_try")),
            [stop for stop in stops if stop],
            self._reward(turns),
            len(turns),
            sum(len(turn["action"]["token_ids"]) for turn in turns),
            sum(len(turn.get("tool_calls", [])) for turn in turns),
            record.get("label"),
            shown[-1] if shown else None,
            turns[-1]["text"][:SNIPPET] if turns else None,
            record.get("error"),
        ]

    def _reward(self, turns: list[dict[str, Any]]) -> float | None:
        """Reward of the episode, by the rule that it was trained with; None where it is not known."""
        rewards = [turn["action"].get("reward") for turn in turns]
        verdicts = [(turn.get("verdict") or {}).get("reward") for turn in turns]
        known = [reward for reward in rewards if reward is not None]
        if len(known) < len(rewards):
            return None
        found = trajectory_reward(known, verdicts, self._workflow.reward_mode, self._workflow.turn_discount)
        return round(found, 6) if math.isfinite(found) else None

    @property
    def model(self) -> str:
        return str(_section(self._config, "model").get("path", ""))

    def _model_folders(self) -> list[Path]:
        """Folders where tokenizer and image processor may be, best first; a comparison names its run."""
        origin = _section(self._config, "run").get("dir")
        found: list[Path] = []
        for folder in (self.folder, *([Path(origin)] if isinstance(origin, str) else [])):
            found += [folder / "export", folder / "warm_start", *sorted((folder / "model").glob("*/"))]
        return found + ([Path(self.model)] if self.model else [])

    def _patch_size(self) -> int | None:
        for folder in self._model_folders():
            family = family_of_path(str(folder))
            try:
                processor = None if family is None else image_processor(folder, family)
            except ValueError:
                continue
            if processor is not None:
                return processor.patch_size
        return None


def _read_config(file: Path) -> dict[str, Any]:
    """Configuration as it was written, also by another release with other keys; empty when there is none."""
    try:
        found = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, YAMLError):
        return {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _reward_settings(config: dict[str, Any]) -> WorkflowConfig:
    """Reward settings of the episodes; the defaults where config.yaml lacks them or holds unknown values."""
    told = _section(config, "workflow")
    try:
        return WorkflowConfig(**{key: told[key] for key in ("reward_mode", "turn_discount") if key in told})
    except ValidationError:
        return WorkflowConfig()
